"""The pairs of examples: equal losses on three replicas, in float64, and a difference of a few lines."""

import difflib
import importlib.util
import re
from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401  its first import changes environment variables

EXAMPLES = Path(__file__).parents[2] / "examples"
PAIRS = sorted(path.parent.name for path in EXAMPLES.glob("*/plain.py"))
IN_ITS_OWN_FILE = {"image_classification"}
assert set(PAIRS) >= IN_ITS_OWN_FILE


def run(pair, name, capsys):
    """Runs one program of a pair. Returns its losses and its output."""
    spec = importlib.util.spec_from_file_location(f"{pair}_{name}", EXAMPLES / pair / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(), capsys.readouterr().out


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("pair", sorted({*PAIRS} - IN_ITS_OWN_FILE))
def test_losses_are_equal(pair, capsys):
    (expected, printed), (losses, printed_too) = (run(pair, name, capsys) for name in ("plain", "balanced"))
    assert losses == pytest.approx(expected, rel=1e-10)
    assert printed_too == printed
    assert printed.count("\n") >= 4
    assert sum(expected[-4:]) < sum(expected[:4])


@pytest.mark.parametrize("pair", PAIRS)
def test_programs_are_short_and_differ_in_a_few_lines(pair):
    plain, balanced = ((EXAMPLES / pair / f"{name}.py").read_text().splitlines() for name in ("plain", "balanced"))
    added = [line[2:] for line in difflib.ndiff(plain, balanced) if line.startswith("+ ") and line[2:].strip()]
    assert len(added) <= 9
    assert max(len(plain), len(balanced)) <= 80


def test_page_lists_every_pair_and_shows_a_true_difference():
    page = (EXAMPLES.parent / "docs" / "quickstart.md").read_text()
    assert sorted(re.findall(r"\(\.\./examples/(\w+)/balanced\.py\)", page)) == PAIRS
    plain, balanced = ((EXAMPLES / "contrastive" / f"{name}.py").read_text().splitlines() for name in ("plain", "balanced"))
    (difference,) = re.findall("```diff\n(.*?)```", page, re.DOTALL)
    assert {line[1:] for line in difference.splitlines() if line[0] in "- "} <= set(plain)
    assert {line[1:] for line in difference.splitlines() if line[0] in "+ "} <= set(balanced)
