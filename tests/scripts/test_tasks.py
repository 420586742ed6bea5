"""The data of the tasks, and their comparison over the ranks."""

import importlib
import runpy

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from helpers.scripts import SCRIPT

from balanced_parallel import parallelize


@pytest.fixture
def tasks(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("tasks")


def error_of_rank(rank, words_of_last_rank):
    parallelize(torch.nn.Linear(1, 1), torch.nn.MSELoss(), ["cpu"])  # starts the process group
    tasks = runpy.run_path(str(SCRIPT.with_name("tasks.py")))
    words = torch.arange(12).view(4, 3)
    rows = tasks["Rows"](
        words,
        words if rank < dist.get_world_size() - 1 else torch.tensor(words_of_last_rank).view(4, 3),
    )
    try:
        tasks["check_same_data"](tasks["Task"]("text", torch.nn.Linear(1, 1), rows, rows, 0.1))
    except ValueError as error:
        return str(error)
    return None


def test_data_of_the_ranks_are_compared():
    assert run_ranks(3, error_of_rank, list(range(12))) == [None] * 3
    (error,) = set(run_ranks(3, error_of_rank, list(range(1, 13))))
    assert error.startswith("the data differ, expected the same on all hosts: ")
    digests = [
        part.split(" on rank ")[0]
        for part in error.partition("hosts: ")[2].partition(";")[0].split(", ")
    ]
    assert digests[0] == digests[1] != digests[2]


def test_sources_are_split_into_functions_and_classes_and_other_text_into_blocks(tasks):
    source = "import os\n\nclass One:\n    def first(self):\n        pass\n\nasync def second():\n    return 2\n"
    starts = [["import", "os"], ["class", "One"], ["def", "first"], ["async", "def"]]
    assert [row[:2] for row in tasks.split_text(source)] == starts
    assert [len(row) for row in tasks.split_text("word " * 150)] == [65, 65, 20]
    assert max(len(row) for row in tasks.split_text("def f():\n" + "    x\n" * 300)) == 129


def test_rows_of_text_have_lengths_and_images_have_none(tasks):
    lengths = torch.arange(1, 101) ** 2 // 80 + 1
    inputs = (torch.arange(126) < lengths[:, None]).long()
    rows = tasks.Rows(inputs, inputs.masked_fill(inputs == 0, tasks.IGNORED))
    assert rows.lengths == lengths.tolist()
    words, targets = tasks.join([rows[0], rows[5]])
    assert words.shape == targets.shape == (2, rows.lengths[5])
    images = tasks.Rows(torch.zeros(5, 1, 8, 8), torch.zeros(5, dtype=torch.long))
    assert images.lengths is None
    assert tasks.Task("images", torch.nn.Linear(1, 1), images, images, 0.1).cut is None
