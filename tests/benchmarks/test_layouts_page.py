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
    "name", ["MLP", slow("mixed"), slow("VAE"), slow("DDPM"), slow("BERT eager"), slow("BERT sdpa"), slow("GPT-2")]
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
    for label in ("3 replicas, checkpointed by savings", "3 replicas, checkpointed by transformers"):
        assert layouts.relative_error(layouts.run_layout("GPT-2", layouts.LAYOUTS[label]), expected) < EXACT
    rest = layouts.train("GPT-2", layouts.WHOLE)
    assert all(torch.equal(gradient, rest[1][name]) for name, gradient in expected[1].items())


def test_every_number_of_the_page_is_exact_but_those_of_the_controls(layouts):
    page = (BENCHMARKS / "layouts" / "README.md").read_text()
    for label, layout in layouts.LAYOUTS.items():
        (row,) = re.findall(rf"^\| {re.escape(label)} +\|(.*)\|$", page, re.MULTILINE)
        errors = [float(cell) for cell in row.split("|") if cell.strip()]
        assert len(errors) == (3 if layout.checkpointed else 7)
        assert all(error < EXACT if layout.reproducible else error > 0.1 for error in errors)
    for peer, (_, run) in layouts.PEERS.items():
        assert f"- {peer}. {run.__doc__}" in page
        (row,) = re.findall(rf"^\| {re.escape(peer)} +\|(.*)\|$", page, re.MULTILINE)
        off, on = ([float(cell) for cell in row.split("|")[start::2]] for start in (1, 2))
        assert len(off) == len(on) == 3
        assert max(off) < EXACT
        assert max(on) < EXACT if "reproducible" in peer else min(on) > 0.1
