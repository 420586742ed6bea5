"""Ranks whose backward reaches parameters without giving them a gradient. The reducer of DDP counts these as used."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.problems import assert_same_gradients, build_net, gradients
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import DataParallelCriterion, TrainStep, convert_sync_batchnorm, parallelize

UPDATES = 3  # from the second one on, gradients lie in the buckets of the reducer


def make_step(net, criterion):
    model, criterion = parallelize(net.double(), criterion)
    return TrainStep(model, criterion, torch.optim.SGD(net.parameters(), lr=0.0), micro_batch_size=2)


def batch_norm(rank):
    torch.manual_seed(0)
    net = convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5)))
    step = make_step(net, nn.CrossEntropyLoss())
    inputs, targets = torch.randn(4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    mine = slice(0, 4) if rank == 0 else slice(0, 0)
    for _ in range(UPDATES):
        step(inputs[mine], targets[mine])
    found = gradients(net)
    for gradient in found:
        other = gradient.clone()
        dist.broadcast(other, 0)
        assert torch.equal(gradient, other)
    plain = nn.Sequential(*net)
    plain[1].__class__ = nn.BatchNorm1d
    plain.zero_grad()
    for rows in (slice(0, 2), slice(2, 4)):
        (F.cross_entropy(plain(inputs[rows]), targets[rows]) / 2).backward()
    assert_same_gradients(found, gradients(plain))


def ignored_rows(rank):
    torch.manual_seed(0)
    net, plain = build_net().double(), build_net().double()
    plain.load_state_dict(net.state_dict())
    criterion = DataParallelCriterion(F.cross_entropy, weight=lambda output, target: (target != -100).sum())
    step = make_step(net, criterion)
    inputs, targets = torch.randn(8, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, -100, -100, -100, -100])
    mine = slice(0, 4) if rank == 0 else slice(4, 8)
    for _ in range(UPDATES):
        step(inputs[mine], targets[mine])
    F.cross_entropy(plain(inputs), targets).backward()
    assert_same_gradients(gradients(net), gradients(plain))


@pytest.mark.parametrize("check", [batch_norm, ignored_rows])
def test_a_rank_that_counts_nothing_takes_part_in_the_reduction(check):
    run_ranks(2, check)
