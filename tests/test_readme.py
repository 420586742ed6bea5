"""Snippets, commands and links of the README and of docs/.

The blocks of a page run in their order. Command lines are parsed, links lead to files and headings.
"""

import ast
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.pages import PAGES, ROOT, ROWS, blocks, public_names
from helpers.problems import assert_same_gradients, build_net, class_targets, gradients
from helpers.processes import run_script
from helpers.slow import slow
from test_walls import MAY_IMPORT

import balanced_parallel
import balanced_parallel.__main__

LINKING = PAGES | {name: (ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "CHANGELOG.md")}


WITH_BLOCKS = [page for page in PAGES if blocks(page, "python")]
SLOW = {f"docs/{name}.md" for name in ("balance", "huggingface", "libraries", "memory", "migrating", "savings", "training")}
assert {*SLOW, "README.md", "docs/quickstart.md", "docs/exactness.md", "docs/balance.md"} <= set(WITH_BLOCKS)
IN_A_LINE = 88


@pytest.mark.parametrize("pages", [sorted(set(WITH_BLOCKS) - SLOW), slow(sorted(SLOW))], ids=["pages", "slow"])
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
    lines = {page: [line for block in blocks(page, "python") for line in block.splitlines()] for page in WITH_BLOCKS}
    assert not {page: line for page, code in lines.items() for line in code if len(line) > IN_A_LINE}


@pytest.mark.slow
def test_the_program_of_the_tutorial_has_the_same_losses_on_one_device_and_on_two_ranks(tmp_path):
    (program,) = [block for block in blocks("docs/quickstart.md", "python") if block.startswith("# train.py")]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = []
    for launcher, strategy in (([], "auto"), (torchrun, "auto"), (torchrun, "fsdp")):
        (tmp_path / "train.py").write_text(program.replace('STRATEGY = "auto"', f'STRATEGY = "{strategy}"'))
        command = [sys.executable, *launcher, "train.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True)
        printed.append(set(re.findall(r"\[[\d., ]+\]", done.stdout)))  # lines of ranks may run together
    assert len(printed[0]) == 1
    assert printed[1:] == printed[:1] * 2


@pytest.mark.usefixtures("double")
def test_readme_diff_keeps_loss_accuracy_and_gradients():
    (difference,) = blocks("README.md", "diff")
    found = {}
    for sign in "-+":
        wrap_model, wrap_criterion, metric = (line[1:] for line in difference.splitlines() if line.startswith(sign))
        names = public_names() | {"net": build_net(), "inputs": torch.ones(ROWS, 4), "targets": class_targets(ROWS, ignored=2)}
        middle = ["outputs = model(inputs)", "loss = criterion(outputs, targets)", "loss.backward()"]
        exec("\n".join([wrap_model, wrap_criterion, *middle, metric]), names)
        found[sign] = names
    torch.testing.assert_close(found["+"]["loss"], found["-"]["loss"], rtol=1e-10, atol=1e-10)
    assert found["+"]["accuracy"] == found["-"]["accuracy"]
    assert_same_gradients(gradients(found["+"]["net"]), gradients(found["-"]["net"]))


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
        place = next(i for i, word in enumerate(words) if word.endswith(".py") or word == "balanced_parallel")
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
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=200)
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


def test_readme_has_at_most_100_lines_and_the_numbers_in_the_first_25():
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 100
    first = "\n".join(lines[:25])
    for part in ("```diff", "2.6 → 1.0", "0.35 → 6e-16", "24 rows", "not measured on a GPU", "pip install"):
        assert part in first
    for part in ("docs/images/memory.png", "scripts/train.py --simulate 4 --plot"):
        assert part in PAGES["README.md"]


def test_readme_numbers_equal_the_benchmark_tables():
    balance = (ROOT / "benchmarks" / "balance" / "README.md").read_text()
    expected = {"nn.DataParallel": 2.6, "balanced_parallel": 1.2, "+ BalancedOptimizer": 1.0}
    ratios = {name: float(re.search(rf"\| 4 +\| {re.escape(name)} +\|[^|]*\| ([\d.]+)", balance)[1]) for name in expected}
    assert {name: round(ratio, 1) for name, ratio in ratios.items()} == expected
    exactness = (ROOT / "benchmarks" / "exactness" / "README.md").read_text()
    errors = [float(error) for error in re.findall(r"\| (?:hand-written DDP|balanced_parallel) \|[^|]*\| ([\de.-]+)", exactness)]
    assert [round(errors[0], 2), float(f"{errors[1]:.0e}")] == [0.35, 6e-16]


def test_index_lists_all_pages_of_which_there_are_at_most_18_and_three_that_lead_to_them():
    assert len(set(PAGES) - {"README.md", "docs/choose.md", "docs/troubleshooting.md", "docs/libraries.md"}) <= 18
    for page in set(PAGES) - {"README.md", "docs/README.md"}:
        assert f"({Path(page).name})" in PAGES["docs/README.md"], page


def test_the_map_of_the_folders_is_the_table_of_imports():
    folders = set()
    for folder, imports in re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", LINKING["CONTRIBUTING.md"], re.MULTILINE):
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
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_troubleshooting_has_errors_as_the_package_raises_them():
    table = PAGES["docs/troubleshooting.md"].partition("## Errors and warnings")[2]
    errors = re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)
    assert len(errors) >= 25
    texts = "\n".join(texts_of_errors())
    assert not [error for error in errors if error not in texts]
