"""``BalancedOptimizer`` under torchrun."""

import copy

import pytest
import torch
from helpers.optimizers import ROWS, assert_same, assert_same_state, batches, plain, train, train_plain
from helpers.problems import build_net
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import BalancedOptimizer, DataParallelModel, TrainStep, parallelize, simulate

pytestmark = pytest.mark.usefixtures("double", "buckets")


def _train_on_ranks(rank, saved):
    torch.set_default_dtype(torch.float64)
    net = build_net()
    model, criterion = parallelize(net, nn.CrossEntropyLoss(), ["cpu"])
    optimizer = BalancedOptimizer(model, torch.optim.Adam, lr=0.1)
    step = TrainStep(model, criterion, optimizer)
    if saved is not None:
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
    for x, target in batches(2):
        mine = slice(0, 7) if rank == 0 else slice(7, ROWS)
        step(x[mine], target[mine])
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "mine": len(optimizer.state)}


def test_checkpoints_move_between_ranks_and_replicas():
    start = build_net()
    expected, reference = plain(start, lambda net: torch.optim.Adam(net.parameters(), lr=0.1), 2)
    first = run_ranks(2, _train_on_ranks, None)
    for found in first:
        torch.testing.assert_close(found["net"], dict(expected.state_dict()), rtol=1e-10, atol=1e-10)
        assert_same_state(found["optimizer"], reference.state_dict())
        assert 0 < found["mine"] < 4  # its part alone
    train_plain(expected, reference)
    saved = copy.deepcopy(first[0])  # tensors that go to another process are shared with it
    for found in run_ranks(2, _train_on_ranks, {"net": first[0]["net"], "optimizer": first[0]["optimizer"]}):
        torch.testing.assert_close(found["net"], dict(expected.state_dict()), rtol=1e-10, atol=1e-10)
    with simulate(3):
        net = build_net()
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.Adam, lr=0.1)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, 2)
        assert_same(net, expected)
