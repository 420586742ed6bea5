"""The benchmark of layouts, on the models that are small, and what its page states."""

import re

import pytest
import torch
from helpers.benchmarks import BENCHMARKS, load
from helpers.slow import slow

EXACT = 1e-13


@pytest.fixture
def layouts(monkeypatch):
    return load("layouts", monkeypatch)


@pytest.mark.parametrize(
    "name",
    [
        "MLP",
        slow("mixed"),
        slow("VAE"),
        slow("DDPM"),
        slow("BERT eager"),
        slow("BERT sdpa"),
        slow("GPT-2"),
    ],
)
def test_dropout_is_that_of_one_device_in_layouts_of_one_process(layouts, name):
    expected = layouts.train(name, layouts.WHOLE)
    for label, layout in layouts.LAYOUTS.items():
        if layout.devices is None or layout.checkpointed:
            continue
        error = layouts.relative_error(layouts.run_layout(name, layout), expected)
        assert error < EXACT if layout.reproducible else error > 0.1, label


def test_the_same_layout_repeats_itself_and_checkpoints_change_nothing(layouts):
    expected = layouts.train("GPT-2", layouts.WHOLE)
    for label in (
        "3 replicas, checkpointed by savings",
        "3 replicas, checkpointed by transformers",
    ):
        assert (
            layouts.relative_error(layouts.run_layout("GPT-2", layouts.LAYOUTS[label]), expected)
            < EXACT
        )
    rest = layouts.train("GPT-2", layouts.WHOLE)
    assert all(torch.equal(gradient, rest[1][name]) for name, gradient in expected[1].items())


def test_bits_are_counted(layouts):
    from trainings import drift

    expected = {"a": torch.ones(3), "b": torch.zeros(2)}
    found = {"a": torch.tensor([1.0, 1.0, 1.0 + 2**-23]), "b": torch.zeros(2)}
    assert str(drift(expected, expected)) == "0 of 5"
    assert str(drift(found, {**expected, "b": torch.ones(2)})) == "3 of 5 (1e+00)"


@pytest.fixture
def sections():
    page = (BENCHMARKS / "layouts" / "README.md").read_text()
    return re.split(r"^## .*$", page, flags=re.MULTILINE)


def test_every_error_of_a_layout_is_exact_but_those_of_the_controls(layouts, sections):
    for label, layout in layouts.LAYOUTS.items():
        (row,) = rows_of(sections[0], label)
        errors = [float(cell) for cell in row if cell]
        assert len(errors) == (3 if layout.checkpointed else 7)
        assert max(errors) < EXACT if layout.reproducible else min(errors) > 0.1


def test_every_training_for_bits_has_no_other_bits(layouts, sections):
    for name, (_, run) in layouts.TRAININGS.items():
        assert f"- {name}. {run.__doc__}" in sections[1]
        ((_, *cells),) = rows_of(sections[1], name)
        counts = [int(cell.partition(" of ")[0].replace(",", "")) for cell in cells if cell]
        assert len(counts) == 3 + ("balanced" in name)
        assert not any(counts) if "bits" in name else all(counts)


def rows_of(section, label):
    """Returns the cells of each row of a table with a label."""
    found = re.findall(rf"^\| {re.escape(label)} +\|(.*)\|$", section, re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in found]
