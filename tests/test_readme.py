"""Snippets, commands and links of the README and of docs/, and their number of words.

The blocks of a page run in their order. Command lines are parsed, links lead to files and headings.
"""

import ast
import contextlib
import copy
import importlib
import importlib.util
import io
import json
import os
import re
import runpy
import shlex
import struct
import subprocess
import sys

import pytest
import torch
from helpers.pages import PAGES, ROOT, blocks
from helpers.processes import run_script
from helpers.slow import slow
from helpers.sources import parse
from helpers.torchrun import run_torchrun
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
    printed = []
    for run, name, strategy in (
        (run_script, "plain", ""),
        (run_script, "train", "auto"),
        (run_torchrun, "train", "auto"),
        (run_torchrun, "train", "fsdp"),
    ):
        (tmp_path / "train.py").write_text(
            train.replace('strategy="auto"', f'strategy="{strategy}"')
        )
        done = run(tmp_path / f"{name}.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
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


def kinds(cells):
    """Returns what each cell shows: text that it printed, and the types of its last line."""
    return [
        [sorted(output.get("data", {"stdout": None})) for output in cell["outputs"]]
        for cell in cells
    ]


@pytest.mark.slow
def test_cells_of_the_notebook_run_and_show_what_is_stored():
    with_outputs = runpy.run_path(ROOT / "docs" / "notebook.py")["with_outputs"]
    cells = with_outputs({"cells": copy.deepcopy(CELLS)})["cells"]
    shown = [cell for cell in cells if cell["cell_type"] == "code"]
    assert kinds(shown) == kinds(cell for cell in CELLS if cell["cell_type"] == "code")


def test_the_notebook_is_saved_with_the_outputs_of_one_run():
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert sum("<table" in "".join(each.get("data", {}).get("text/html", "")) for each in outputs)
    printed = "".join("".join(each.get("text", "")) for each in outputs)
    assert printed.count("epoch") == 3
    assert "accuracy 0." in printed
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)


def run_diff(sign, devices=1):
    """Runs one side of the diff of the README. Returns its names, with the lines that it has printed."""
    (difference,) = blocks("README.md", "diff")
    kept = [line[1:] for line in difference.splitlines() if line[0] in (" ", sign)]
    program = "\n".join(kept).replace("Model(net)", f"Model(net, ['cpu'] * {devices})")
    printed = io.StringIO()
    names = {}
    with contextlib.redirect_stdout(printed):
        exec(program, names)
    return names | {"printed": printed.getvalue().split()}


def test_readme_diff_prints_the_losses_that_stand_below_it_on_one_device_and_on_three():
    said = re.search(r"^It prints (.*?): before, and after", PAGES["README.md"], re.MULTILINE)[1]
    runs = [run_diff("-"), run_diff("+", 1), run_diff("+", 3)]
    for run in runs:
        assert run["printed"] == said.split(", ")
        assert run["accuracy"] == runs[0]["accuracy"]
        for parameter, expected in zip(
            run["net"].parameters(), runs[0]["net"].parameters(), strict=True
        ):
            torch.testing.assert_close(parameter, expected, rtol=1e-3, atol=1e-6)
    wrapped = runs[2]["model"]
    assert len(wrapped(runs[2]["inputs"])) == 3


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
        program = words[place]
        flags = words[place + 1 :]
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


def test_readme_has_a_screen_for_each_of_three_claims():
    assert len(PAGES["README.md"].splitlines()) <= 100
    top, full, exact, larger, *_ = PAGES["README.md"].split("\n## ")
    assert "pip install" in top
    assert max(len(section.splitlines()) for section in (top + full, exact, larger)) <= 52
    assert "(docs/compare.md)" in top + full
    parts = {
        full: ("```diff", "It prints", "docs/images/memory.png"),
        exact: ("print(verify(", 'reproducible="bits"'),
        larger: ("24 rows", "not measured on a GPU", 'micro_batch_size="auto"'),
    }
    for section, texts in parts.items():
        for text in texts:
            assert text in section
    assert "scripts/train.py --simulate 4 --plot" in PAGES["README.md"]


def test_badges_are_those_of_workflows():
    badges = re.findall(
        r"\[!\[(\w+)\]\((https:\S+)/badge.svg\)\]\((\S+)\)", PAGES["README.md"].splitlines()[1]
    )
    assert [name for name, *_ in badges] == ["tests", "docs", "release"]
    for name, picture, link in badges:
        assert picture == link
        assert link.endswith(f"/actions/workflows/{name}.yml")
        workflow = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
        assert workflow.startswith(f"name: {name}\n")


def title_of(picture):
    """Returns the title that is stored in a PNG."""
    content = picture.read_bytes()
    start = content.index(b"tEXtTitle\0")
    (size,) = struct.unpack(">I", content[start - 4 : start])
    return content[start + len(b"tEXtTitle\0") : start + 4 + size].decode("latin-1")


def peaks(title):
    """Returns MiB of each GPU and the ratio by configuration, as scripts/train.py has stored them in its picture."""
    found = re.findall(r"(\S+), 4 GPUs: ([\d., ]+) MiB, hottest / mean = (\d+\.\d\d)", title)
    return {name: ([float(peak) for peak in text.split(",")], ratio) for name, text, ratio in found}


def test_readme_has_the_numbers_of_its_picture():
    """The command of the README stores them in the picture. A slow test runs it."""
    found = peaks(title_of(ROOT / "docs" / "images" / "memory.png"))
    (first, *others), plain = found["nn.DataParallel"]
    (*most, last), ours = found["balanced_parallel"]
    assert len({*others}) == len({*most}) == 1
    assert (
        f"nn.DataParallel: {first:.0f} on GPU 0, {others[0]:.0f} on the other three. "
        f"balanced_parallel: {most[0]:.0f} on three, {last:.0f} on the fourth."
    ) in PAGES["README.md"]
    assert PAGES["README.md"].count(f"{plain} → {ours}") == PAGES["README.md"].count("→") == 1


@pytest.mark.slow
def test_the_picture_of_the_readme_is_drawn_by_its_command(tmp_path):
    (command,) = [words for page, words in commands() if page == "README.md"]
    done = run_script(ROOT / command[1], *command[2:], cwd=tmp_path, timeout=400)
    assert done.returncode == 0, done.stderr[-1500:]
    assert peaks(title_of(tmp_path / "runs" / "memory.png")) == peaks(
        title_of(ROOT / "docs" / "images" / "memory.png")
    )


def rows_of(text):
    """Returns the numbers of each row of the table of the largest batches: plain, with the wrappers, with savings."""
    table = re.findall(r"^\| ([\w-]+[^|]*?) +\|((?: +\d+ \|){4})$", text, re.MULTILINE)
    rows = {name: [int(number) for number in re.findall(r"\d+", cells)] for name, cells in table}
    return {name: (plain, ours, most) for name, (plain, _, ours, most) in rows.items()}


def test_readme_has_the_largest_batches_of_the_best_and_of_the_worst_model():
    rows = rows_of((ROOT / "benchmarks" / "largest_batch" / "README.md").read_text())
    assert len(rows) == 4
    for place in (1, 2):  # The wrappers, and the savings, gain the most and the least for the same.
        gains = {name: numbers[place] / numbers[0] for name, numbers in rows.items()}
        best = max(gains, key=gains.get)
        worst = min(gains, key=gains.get)
        for name in (best, worst):
            plain, ours, most = rows[name]
            assert f"| {name} | {plain:,} rows | {ours:,} | {most:,} |" in PAGES["README.md"]


def test_readme_has_the_errors_of_the_peers():
    peers = (ROOT / "benchmarks" / "peers" / "README.md").read_text()
    shown = re.findall(
        r"^\| \[(.*?)\]\(benchmarks/peers/README.md\)(.*?) \| (\S+) \| (\S+) \|$",
        PAGES["README.md"],
        re.MULTILINE,
    )
    assert len(shown) == 8
    for name, more, *errors in shown:
        peer = name.replace("`Trainer`", "HF Trainer") + ("" if "replicas" in more else more)
        rows = re.findall(
            rf"^\| {re.escape(peer)}(?:, \w+)? +\|[^|]*\| (?:4 ranks|1 device|1 process[^|]*?) +\| (\S+) +\| (\S+)",
            peers.replace("0e+00", "0    "),
            re.MULTILINE,
        )
        assert tuple(errors) in rows, peer
        if "replicas" in more:  # Each of three layouts has no larger error.
            assert len(rows) == 3
            assert all(
                float(a) <= float(errors[0]) and float(b) <= float(errors[1]) for a, b in rows
            )


def test_readme_has_the_error_of_predicted_memory():
    table = (ROOT / "benchmarks" / "published" / "README.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    worst = {"layers": 0.0, "models": 0.0, "convolutions": 0.0}
    for _, program, *_, difference, _ in (row[1:-1] for row in rows if row[7:8] and "%" in row[-3]):
        layers = r"cross entropy|MLP|LayerNorm|RMSNorm|head|20 linear|GPT-2|BERT,"
        kind = "layers" if re.match(layers, program) else "models"
        kind = "convolutions" if "Net" in program or "VGG" in program else kind
        assert kind != "models" or re.search("LoRA|ViT|bf16|float16", program)
        worst[kind] = max(worst[kind], abs(float(difference.rstrip("%"))))
    assert worst["layers"] <= 0.2 < worst["models"] <= 10 < worst["convolutions"]
    for said in (
        "[0.2 %]",
        "10 % for LoRA, ViT and models in half precision; convolutions are further off",
    ):
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
        for node in ast.walk(parse(path.read_text(encoding="utf-8"))):
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
    errors = re.findall(r"^- `(.*?)`: ", table, re.MULTILINE)
    assert len(errors) >= 20
    texts = "\n".join(texts_of_errors())
    assert not [error for error in errors if error not in texts]


def test_comparison_is_short_and_has_the_numbers_of_the_benchmark():
    page = PAGES["docs/compare.md"]
    assert len(page.split()) <= 400
    peers = (ROOT / "benchmarks" / "peers" / "README.md").read_text()
    rows = {}
    for line in re.findall(r"^\| .*\d+ -\d+ +\|$", peers, re.MULTILINE):
        name, _, _, error, last, hottest, _, _, _, lines = map(str.strip, line.split("|")[1:-1])
        rows[name.replace("*", "")] = [error, last, hottest, lines]
    shown = [
        [*map(str.strip, line.split("|")[1:-1])]
        for line in re.findall(r"^\| .*\d+ -\d+ \|$", page, re.MULTILINE)
    ]
    assert len(shown) == 8
    assert all(
        rows[re.fullmatch(r"\[(.*)\]\(.*\)", name)[1]] == numbers for name, *numbers in shown
    )
