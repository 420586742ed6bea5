"""Files, functions and calls of the package that one update passes through, after warm-up. A detour on this path is seen here."""

import collections
import itertools
import sys
import threading
from pathlib import Path

import pytest
import torch
from helpers.optimizers import sgd
from helpers.problems import build_net
from helpers.ranks import run_ranks
from torch import nn

import balanced_parallel
from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    parallelize,
    simulate,
)

PACKAGE = str(Path(balanced_parallel.__file__).parent)
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}


def count(update):
    """Returns the numbers of files, functions and calls of the fifth update.

    Comprehensions are functions before Python 3.12. They are not counted, so that all versions have the same numbers.
    """
    for _ in range(4):
        update()
    calls = collections.Counter()

    def note(frame, event, argument):
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(PACKAGE)
            and code.co_name not in COMPREHENSIONS
        ):
            calls[code.co_filename, code.co_qualname] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        update()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return len({file for file, _ in calls}), len(calls), sum(calls.values())


def make_update(model, criterion, micro_batches):
    optimizer = sgd(model)
    step = TrainStep(model, criterion, optimizer, micro_batch_size=2, max_grad_norm=1.0)
    rows = 2 * micro_batches * len(model.devices)
    inputs = torch.randn(rows, 4)
    targets = torch.randint(5, (rows,))
    return lambda: step(inputs, targets)


def assert_within(numbers, budget):
    assert all(itertools.starmap(int.__le__, zip(numbers, budget, strict=True))), numbers


@pytest.mark.parametrize(
    ("devices", "micro_batches", "budget"), [(1, 4, (15, 78, 243)), (2, 2, (18, 91, 257))]
)
def test_update_of_replicas(devices, micro_batches, budget):
    model = DataParallelModel(build_net(), ["cpu"] * devices)
    assert_within(
        count(make_update(model, DataParallelCriterion(nn.CrossEntropyLoss()), micro_batches)),
        budget,
    )


def test_update_of_simulated_devices():
    with simulate(2):
        numbers = count(
            make_update(
                DataParallelModel(build_net()), DataParallelCriterion(nn.CrossEntropyLoss()), 2
            )
        )
    assert_within(numbers, (24, 144, 390))


def count_on_rank(rank, strategy):
    torch.manual_seed(rank)
    model, criterion = parallelize(
        build_net(), nn.CrossEntropyLoss(), device_ids=["cpu"], strategy=strategy
    )
    return count(make_update(model, criterion, 2))


@pytest.mark.parametrize(
    ("strategy", "budget"), [("ddp", (19, 131, 205)), ("fsdp", (19, 143, 275))]
)
def test_update_of_ranks(strategy, budget):
    for numbers in run_ranks(2, count_on_rank, strategy):
        assert_within(numbers, budget)
