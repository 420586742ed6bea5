"""Snippets, commands and links of the README and of docs/, and their number of words.

The blocks of a page run in their order. Command lines are parsed, links lead to files and headings.
"""

import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from helpers.pages import PAGES, ROOT, ROWS, blocks, public_names
from helpers.problems import (
    assert_equal,
    assert_same_gradients,
    build_net,
    class_targets,
    gradients,
)
from helpers.processes import run_script
from helpers.slow import slow
from test_walls import MAY_IMPORT

import balanced_parallel
import balanced_parallel.__main__

OTHERS = ("CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")
LINKING = PAGES | {name: (ROOT / name).read_text(encoding="utf-8") for name in OTHERS}
INTERNALS = "docs/internals.md"  # outside of the navigation: CONTRIBUTING.md leads to it

WITH_BLOCKS = [page for page in PAGES if blocks(page, "python")]
SLOW = {f"docs/{name}.md" for name in ("balance", "memory", "savings", "training")}
SLOW |= {f"docs/recipes/{name}.md" for name in ("lora", "several_hosts", "trainer", "transformers")}
assert {
    *SLOW,
    "README.md",
    "docs/quickstart.md",
    "docs/exactness.md",
    "docs/recipes/dataparallel.md",
} <= set(WITH_BLOCKS)
IN_A_LINE = 88
MOST_WORDS = 22_000
CELLS = json.loads((ROOT / "docs" / "recipes" / "notebook.ipynb").read_text(encoding="utf-8"))[
    "cells"
]


def test_readme_and_pages_have_at_most_22_000_words():
    """Words are what ``wc -w`` counts, in code and tables too."""
    words = {
        path: len(path.read_text(encoding="utf-8").split())
        for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    }
    assert sum(words.values()) <= MOST_WORDS, sorted(words.items(), key=lambda item: -item[1])[:10]


@pytest.mark.parametrize(
    "pages", [sorted(set(WITH_BLOCKS) - SLOW), slow(sorted(SLOW))], ids=["pages", "slow"]
)
def test_blocks_of_a_page_run_as_pasted(pages, tmp_path):
    """No name is given to a page: its blocks, in their order, are a program, which runs in a folder of its own."""
    failures = {}
    for number, page in enumerate(pages):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "page.py").write_text("\n".join(blocks(page, "python")), encoding="utf-8")
        done = run_script(folder / "page.py", cwd=folder, timeout=100)
        failures |= {page: done.stderr[-1500:]} if done.returncode else {}
    assert failures == {}


def test_lines_of_code_fit_beside_the_navigation():
    lines = {
        page: [line for block in blocks(page, "python") for line in block.splitlines()]
        for page in WITH_BLOCKS
    }
    assert not {
        page: line for page, code in lines.items() for line in code if len(line) > IN_A_LINE
    }


def tutorial():
    """Returns the quickstart as two programs: its blocks but ``train.py``, and that one."""
    programs = {True: [], False: []}
    for block in blocks("docs/quickstart.md", "python"):
        programs[block.startswith("# train.py")].append(block)
    (train,) = programs[True]
    return "\n".join(programs[False]), train


@pytest.mark.slow
def test_the_program_of_the_tutorial_has_the_same_losses_on_one_device_and_on_two_ranks(tmp_path):
    """They are those of the plain program, which the tutorial begins with."""
    program, train = tutorial()
    (tmp_path / "plain.py").write_text(
        program + "print([round(loss, 4) for loss in plain_losses])\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = []
    for launcher, name, strategy in (
        ([], "plain", ""),
        ([], "train", "auto"),
        (torchrun, "train", "auto"),
        (torchrun, "train", "fsdp"),
    ):
        (tmp_path / "train.py").write_text(
            train.replace('strategy="auto"', f'strategy="{strategy}"')
        )
        command = [sys.executable, *launcher, f"{name}.py"]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True
        )
        printed.append(
            set(re.findall(r"\[[\d., ]+\]", done.stdout))
        )  # lines of ranks may run together
    assert len(printed[0]) == 1
    assert printed[1:] == printed[:1] * 3


# Lines whose types torch leaves open, and gather, which returns what the model returns: a tensor, or a tuple of them
UNTYPED = re.compile(r" in DataLoader\(|loss_function\(net\(|\.gather\(")


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("mypy"), reason="needs mypy, of the extra dev")
def test_programs_of_the_readme_and_the_tutorial_have_types_that_an_editor_knows(tmp_path):
    """A type checker finds no error and no ``Any`` in them, but where torch has no types."""
    start, train = tutorial()
    programs = {
        "readme.py": "\n".join(blocks("README.md", "python")),
        "start.py": start,
        "train.py": train,
    }
    for name, program in programs.items():
        (tmp_path / name).write_text(program)
    flags = [
        "--strict",
        "--disallow-any-expr",
        "--allow-untyped-calls",
        "--follow-imports=silent",
        "--config-file=",
    ]
    command = [sys.executable, "-m", "mypy", *flags, *programs]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )
    found = re.findall(r"^(\w+\.py):(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr  # a loader of torch yields Any
    places = [
        (programs[name].splitlines()[int(line) - 1], message) for name, line, message in found
    ]
    assert not [place for place in places if not UNTYPED.search(place[0]) or "Any" not in place[1]]


@pytest.mark.slow
def test_cells_of_the_notebook_run_as_one_program(tmp_path):
    code = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
    (tmp_path / "cells.py").write_text(
        "\n".join([*code, "assert '<table' in report._repr_html_()"]), encoding="utf-8"
    )
    done = run_script(tmp_path / "cells.py", cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr[-1500:]
    assert done.stdout.count("epoch") == 3


def test_the_notebook_is_saved_without_outputs():
    assert not [cell["id"] for cell in CELLS if cell.get("outputs") or cell.get("execution_count")]
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)


@pytest.mark.usefixtures("double")
def test_readme_diff_keeps_loss_accuracy_gradients_and_update():
    (difference,) = blocks("README.md", "diff")
    found = {}
    for sign in "-+":
        *wrapping, metric = (line[1:] for line in difference.splitlines() if line.startswith(sign))
        names = public_names() | {
            "net": build_net(),
            "inputs": torch.ones(ROWS, 4),
            "targets": class_targets(ROWS, ignored=2),
        }
        exec(
            "\n".join(
                [
                    *wrapping,
                    "outputs = model(inputs)",
                    "loss = criterion(outputs, targets)",
                    "loss.backward()",
                    metric,
                ]
            ),
            names,
        )
        names["gradients"] = gradients(names["net"], optimizer=names["optimizer"])
        names["optimizer"].step()
        found[sign] = names
    assert_equal(found["+"]["loss"], found["-"]["loss"])
    assert found["+"]["accuracy"] == found["-"]["accuracy"]
    assert_same_gradients(found["+"]["gradients"], found["-"]["gradients"])
    assert_same_gradients([*found["+"]["net"].parameters()], [*found["-"]["net"].parameters()])


def commands():
    """Yields the page and the words of each command line with a program of this repository."""
    for page in PAGES:
        for block in blocks(page, "bash"):
            for line in block.splitlines():
                for command in line.split("&&"):
                    if re.search(r"scripts/|examples/|benchmarks/|-m balanced_parallel", command):
                        yield page, shlex.split(command)


def test_flags_in_commands_are_accepted(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    train = importlib.import_module("train").make_parser()
    seen = []
    for page, words in commands():
        place = next(
            i for i, word in enumerate(words) if word.endswith(".py") or word == "balanced_parallel"
        )
        program, flags = words[place], words[place + 1 :]
        seen.append((page, program))
        if program == "balanced_parallel":
            balanced_parallel.__main__.make_parser().parse_args(flags)
            continue
        assert (ROOT / program).exists(), f"{page} runs {program}"
        if program == "scripts/train.py":
            train.parse_args(flags)
        else:
            assert not flags, f"{page} has flags of {program} that no test parses"
    assert ("README.md", "scripts/train.py") in seen
    assert ("docs/memory.md", "balanced_parallel") in seen


@pytest.mark.slow
def test_commands_of_the_memory_page_run(tmp_path):
    block, of_gpt = (block for block in blocks("docs/memory.md", "bash") if ".py:build" in block)
    script = "set -e\n" + (of_gpt + block).replace(".venv/bin/python", shlex.quote(sys.executable))
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fits: yes, ") == 2


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", LINKING)
def test_links_point_to_existing_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", LINKING[page]):
        if link.startswith("http"):
            continue
        path, _, fragment = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page} links to {link}"
        if fragment:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert fragment in map(anchor, headings), f"{page} links to {link}"


def test_readme_has_a_screen_for_a_full_gpu_and_one_for_exactness():
    assert len(PAGES["README.md"].splitlines()) <= 100
    top, full, exact, *_ = PAGES["README.md"].split("\n## ")
    assert "pip install" in top
    assert max(len(section.splitlines()) for section in (top + full, exact)) <= 52
    for part in (
        "```diff",
        "2.71 → 1.04",
        "docs/images/memory.png",
        "24 rows",
        "not measured on a GPU",
        'micro_batch_size="auto"',
    ):
        assert part in full
    for part in ("print(verify(", "6e-16", 'reproducible="bits"'):
        assert part in exact
    assert "scripts/train.py --simulate 4 --plot" in PAGES["README.md"]


def test_readme_says_the_balance_once_as_its_picture_does():
    plain, balanced = re.search(
        r"nn.DataParallel: (.*?)\. balanced_parallel: (.*?)\.\]", PAGES["README.md"]
    ).groups()
    assert [re.findall(r"\d{2,}", text) for text in (plain, balanced)] == [
        ["423", "67"],
        ["96", "81"],
    ]
    ratios = [423 * 4 / (423 + 3 * 67), 96 * 4 / (3 * 96 + 81)]
    assert (
        PAGES["README.md"].count(" → ".join(f"{ratio:.2f}" for ratio in ratios))
        == PAGES["README.md"].count("→")
        == 1
    )


def test_readme_numbers_equal_the_benchmark_tables():
    largest = (ROOT / "benchmarks" / "largest_batch" / "README.md").read_text()
    rows = re.findall(
        r"\d+(?= )", re.search(r"^\| GPT-2 small, 1,024 tokens \|(.*)\|$", largest, re.MULTILINE)[1]
    )
    assert [rows[0], rows[2], rows[3]] == re.findall(
        r"(\d+)(?= rows with| with these|\s+with\s+\[savings)", PAGES["README.md"]
    )
    peers = (ROOT / "benchmarks" / "peers" / "README.md").read_text()
    for name, peer in {
        "`Trainer`": "HF Trainer",
        "`Trainer`, told of the shift": "HF Trainer, told of the shift",
        "Accelerate": "Accelerate",
        "Accelerate, tokens counted": "Accelerate, tokens counted",
        "Lightning Fabric": "Lightning Fabric",
        "DDP by hand": "DDP by hand",
    }.items():
        errors = re.search(
            rf"^\| {peer} +\|[^|]*\| 4 ranks +\| (\S+) +\| (\S+)", peers, re.MULTILINE
        ).groups()
        assert (
            re.search(
                rf"^\| \[{name}\]\S+ \| (\S+) \| (\S+) \|$", PAGES["README.md"], re.MULTILINE
            ).groups()
            == errors
        )


def test_readme_has_the_error_of_predicted_memory():
    table = (ROOT / "benchmarks" / "published" / "README.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    worst = {"layers": 0.0, "models": 0.0, "convolutions": 0.0}
    for _, program, *_, difference, _ in (row[1:-1] for row in rows if row[7:8] and "%" in row[-3]):
        layers = r"cross entropy|MLP|LayerNorm|RMSNorm|head|20 linear|GPT-2|BERT"
        kind = "layers" if re.match(layers, program) else "models"
        kind = "convolutions" if "Net" in program or "VGG" in program else kind
        worst[kind] = max(worst[kind], abs(float(difference.rstrip("%"))))
    assert worst["layers"] <= 0.2 < worst["models"] <= 5 < worst["convolutions"]
    for said in ("[0.2 %]", "5 % for LoRA and ViT; convolutions are further off"):
        assert said in PAGES["README.md"]


def test_index_lists_all_pages_but_internals():
    for page in {*PAGES, "docs/recipes/notebook.ipynb"} - {
        "README.md",
        "docs/README.md",
        INTERNALS,
    }:
        assert f"({page.removeprefix('docs/')})" in PAGES["docs/README.md"], page
    assert "internals" not in PAGES["docs/README.md"] + PAGES["README.md"]
    assert f"({INTERNALS})" in LINKING["CONTRIBUTING.md"]


def test_the_map_of_the_folders_is_the_table_of_imports():
    folders = set()
    for folder, imports in re.findall(
        r"^\| `(\w+)` \|.*\| ([^|]*) \|$", LINKING["CONTRIBUTING.md"], re.MULTILINE
    ):
        if folder in MAY_IMPORT:
            names = folders if imports == "all above" else set(re.findall(r"`(\w+)`", imports))
            assert names == MAY_IMPORT[folder], folder
            folders = folders | {folder}
    assert folders == set(MAY_IMPORT)


def texts_of_errors():
    """Yields the constant strings of the package. What is filled in is an ellipsis."""
    for path in (ROOT / "balanced_parallel").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    part.value if isinstance(part, ast.Constant) else "…" for part in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_pages_that_errors_name_exist():
    pages = set(re.findall(r"docs/\w[\w/]*\.md", "\n".join(texts_of_errors())))
    assert "docs/troubleshooting.md" in pages
    assert pages <= set(PAGES)


def test_troubleshooting_has_errors_as_the_package_raises_them():
    table = PAGES["docs/troubleshooting.md"].partition("## Errors and warnings")[2]
    errors = re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)
    assert len(errors) >= 20
    texts = "\n".join(texts_of_errors())
    assert not [error for error in errors if error not in texts]
