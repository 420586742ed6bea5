"""The examples: the same losses before and after, and a difference of a few lines."""

import difflib
import importlib.util
from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401  its first import changes environment variables
from helpers.processes import run_script

from balanced_parallel import simulate

EXAMPLES = Path(__file__).parents[2] / "examples" / "image_classification"


def load(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(f"{name}_example", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "STEPS", 6)
    return module


def test_losses_on_three_simulated_gpus_equal_the_plain_program(monkeypatch):
    plain, balanced = load("plain", monkeypatch), load("balanced", monkeypatch)
    expected = plain.main()
    with simulate(3) as cluster:
        assert balanced.main() == pytest.approx(expected, rel=1e-4)
        assert min(cluster.peak) > 0
    assert len(set(expected)) == 6


def test_examples_print_the_same_losses():
    outputs = [run_script(EXAMPLES / name).stdout for name in ("plain.py", "balanced.py")]
    assert outputs[0].count("accuracy") == 7
    assert outputs[0] == outputs[1]


def test_examples_differ_in_at_most_seven_lines():
    plain, balanced = ((EXAMPLES / name).read_text().splitlines() for name in ("plain.py", "balanced.py"))
    added = [line[2:] for line in difflib.ndiff(plain, balanced) if line.startswith("+ ") and line[2:].strip()]
    assert len(added) <= 7
    assert max(len(plain), len(balanced)) <= 55
