"""Equal shards of parameters."""

import gc

import pytest
import torch
from helpers.optimizers import assert_same, plain, train
from helpers.problems import CLASSES
from torch import nn

from balanced_parallel import BalancedOptimizer, DataParallelModel, gather, simulate

pytestmark = pytest.mark.usefixtures("double", "buckets")


def test_shards_of_a_large_parameter_have_equal_bytes():
    with simulate(4) as cluster:
        net = nn.Sequential(nn.Linear(64, 1000), nn.Linear(1000, 10)).float()
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.Adam, lr=0.1)
        for _ in range(2):
            gather(model(torch.ones(8, 64, dtype=torch.float32))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        assert max(cluster.live) <= 1.02 * sum(cluster.live) / 4


def test_channels_last_parameters_equal_the_plain_program():
    net = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 8, 2), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(8, CLASSES))
    net = net.to(memory_format=torch.channels_last)
    expected, _ = plain(net, lambda net: torch.optim.Adam(net.parameters(), lr=0.1))
    with simulate(3):
        model = DataParallelModel(net)
        train(model, BalancedOptimizer(model, torch.optim.Adam, lr=0.1))
        assert_same(net, expected)
