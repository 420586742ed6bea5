"""Snippets, commands and links of the README and of docs/.

The snippets of a page run in their order. Command lines are parsed, links lead to files and headings.
"""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.pages import PAGES, ROOT, ROWS, blocks, public_names
from helpers.problems import CLASSES, assert_same_gradients, build_net, class_targets, gradients
from test_walls import MAY_IMPORT
from torch import nn

import balanced_parallel
import balanced_parallel.__main__

pytestmark = pytest.mark.usefixtures("trace_in_this_process")

LINKING = PAGES | {name: (ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "CHANGELOG.md")}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.RNN(4, 3)

    def forward(self, sequence, scale):
        return self.layer(sequence * scale)[0]


def page_names(rows):
    """Names that pages use and do not define."""
    net = build_net()
    model = balanced_parallel.DataParallelModel(net, ["cpu"] * 3)
    inputs, targets = torch.randn(rows, 4), class_targets(rows, ignored=2)
    return public_names() | {
        "net": net,
        "model": model,
        "criterion": balanced_parallel.DataParallelCriterion(nn.CrossEntropyLoss()),
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "inputs": inputs,
        "targets": targets,
        "values": torch.rand(ROWS, CLASSES),
        "mask": torch.tensor([1.0, 1, 1, 0, 0, 1, 0]),
        "loader": [(inputs, targets), (inputs[:4], targets[:4])],
        "micro_batches": [(inputs, targets), (inputs[:4], targets[:4])],
        "recurrent": Recurrent(),
        "sequence": torch.randn(5, ROWS, 4),
        "scale": torch.ones(4),
        "net_of_teacher": build_net(),
    }


WITH_SNIPPETS = [page for page in PAGES if page != "docs/migrating.md" and blocks(page, "python")]


@pytest.mark.parametrize("page", WITH_SNIPPETS)
def test_snippets_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = page_names(rows=2048 if page == "docs/memory.md" else ROWS)  # fewer do not show in the peak
    for snippet in blocks(page, "python"):
        exec(compile(snippet, page, "exec"), names)
    loss = names.get("loss", torch.zeros(()))
    assert loss.device.type == "sim" or loss.isfinite()


def test_most_pages_have_snippets():
    assert {"README.md", "docs/quickstart.md", "docs/exactness.md", "docs/balance.md", "docs/memory.md"} <= set(WITH_SNIPPETS)


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
    assert "fits: yes, " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("nothing found: Sequential runs as replicas; random numbers, and ")


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
    for part in (
        "docs/images/memory.png",
        "```diff",
        "2.6 → 1.0",
        "0.35 → 6e-16",
        "pip install",
        "scripts/train.py --simulate 4 --plot",
    ):
        assert part in first


def test_readme_numbers_equal_the_benchmark_tables():
    balance = (ROOT / "benchmarks" / "balance" / "README.md").read_text()
    expected = {"nn.DataParallel": 2.6, "balanced_parallel": 1.2, "+ BalancedOptimizer": 1.0}
    ratios = {name: float(re.search(rf"\| 4 +\| {re.escape(name)} +\|[^|]*\| ([\d.]+)", balance)[1]) for name in expected}
    assert {name: round(ratio, 1) for name, ratio in ratios.items()} == expected
    exactness = (ROOT / "benchmarks" / "exactness" / "README.md").read_text()
    errors = [float(error) for error in re.findall(r"\| (?:hand-written DDP|balanced_parallel) \|[^|]*\| ([\de.-]+)", exactness)]
    assert [round(errors[0], 2), float(f"{errors[1]:.0e}")] == [0.35, 6e-16]


def test_api_lists_all_public_names_and_index_all_pages():
    for name in balanced_parallel.__all__:
        assert f"`{name}" in PAGES["docs/api.md"], name
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


def test_there_are_at_most_19_pages():
    assert len(set(PAGES) - {"README.md"}) <= 19
