"""Compiled modules on several ranks: the results of the plain program, and a bounded number of graphs."""

import pytest
import torch
from helpers.compiled import Graphs, assert_same_run, batches, build
from helpers.optimizers import sgd
from helpers.ranks import run_ranks
from helpers.slow import slow
from torch import nn

from balanced_parallel import TrainStep, parallelize

ROWS = [12, 9, 1, 7, 2, 15, 5, 8]


def check_ragged(rank, strategy, way, micro_batch_size):
    """Trains on ragged batches, of which the ranks have unequal parts, or none. Returns the number of graphs."""
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64)
    try:
        net = build()
        graphs = Graphs()
        module = (
            torch.compile(net, backend=graphs, dynamic=True)
            if way == "torch.compile(module)"
            else net
        )
        model, criterion = parallelize(module, nn.CrossEntropyLoss(), strategy=strategy)
        if way == "model.compile()":
            model.compile(backend=graphs, dynamic=True)
        step = TrainStep(model, criterion, sgd(model), micro_batch_size=micro_batch_size)
        losses = []
        for inputs, targets in batches(ROWS):
            cut = 2 * len(inputs) // 3
            part = slice(cut) if rank == 0 else slice(cut, None)
            losses.append(step(inputs[part], targets[part]))
        assert_same_run(losses, net, ROWS)
        assert not any("_orig_mod" in name for name in step.state_dict()["model"])
        return graphs.count
    finally:
        torch.set_default_dtype(torch.float32)
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("strategy", "way", "micro_batch_size"),
    [
        ("ddp", "torch.compile(module)", 4),
        slow("fsdp", "model.compile()", 4),
        slow("ddp", "model.compile()", None),
        slow("fsdp", "torch.compile(module)", None),
    ],
)
def test_ragged_batches_take_two_graphs(strategy, way, micro_batch_size):
    """One for a single row, and one for any other number of rows."""
    counts = run_ranks(2, check_ragged, strategy, way, micro_batch_size)
    assert max(counts) == 2, counts
