"""Rows of natural length in train.py: the split of a text, and the words of each device."""

import importlib
from argparse import Namespace

import pytest
import torch
from helpers.scripts import SCRIPT


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("tasks"), importlib.import_module("packing")


def test_sources_are_split_into_functions_and_classes_and_other_text_into_blocks(scripts):
    tasks, _ = scripts
    source = "import os\n\nclass One:\n    def first(self):\n        pass\n\nasync def second():\n    return 2\n"
    assert [row[:2] for row in tasks.split_text(source)] == [
        ["import", "os"],
        ["class", "One"],
        ["def", "first"],
        ["async", "def"],
    ]
    assert [len(row) for row in tasks.split_text("word " * 150)] == [65, 65, 20]
    assert max(len(row) for row in tasks.split_text("def f():\n" + "    x\n" * 300)) == 129


def test_packing_by_cost_pads_less_and_loads_devices_evenly(scripts):
    tasks, packing = scripts
    lengths = torch.arange(1, 101) ** 2 // 80 + 1
    inputs = (torch.arange(126) < lengths[:, None]).long()
    rows = tasks.Rows(inputs, inputs.masked_fill(inputs == 0, tasks.IGNORED))
    assert rows.lengths == tasks.count_words(inputs).tolist() == lengths.tolist()
    flags = {"batch_size": 50, "seed": 0}
    (cost,) = packing.describe_packing(Namespace(pack="cost", **flags), rows, 4)
    (equal,) = packing.describe_packing(Namespace(pack="rows", **flags), rows, 4)
    assert equal == "packed by rows: 66% of a batch is padding, hottest device / mean 1.04"
    assert cost == "packed by cost: 30% of a batch is padding, hottest device / mean 1.04"
    images = tasks.Rows(torch.zeros(5, 1, 8, 8), torch.zeros(5, dtype=torch.long))
    assert packing.describe_packing(Namespace(pack="cost", **flags), images, 4) == []
    assert packing.make_cut(Namespace(pack="cost"), images) is None
