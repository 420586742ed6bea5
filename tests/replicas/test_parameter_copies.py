"""Copies of parameters on other devices, refreshed where the parameters have changed."""

import gc

import pytest
import torch
from helpers.problems import build_net
from helpers.replicas import assert_follows, settled, write_unseen
from torch import nn

from balanced_parallel import DataParallelModel, gather, simulate

pytestmark = pytest.mark.usefixtures("buckets")


def test_only_changed_parameters_are_copied():
    with simulate(3) as cluster:
        net = build_net()
        model, x = settled(net)
        size = sum(parameter.nbytes for parameter in net.parameters())

        def moved_out():
            before = cluster.moved
            gather(model(x)).sum().backward()
            return (cluster.moved - before)["sim:0", "sim:1"]

        still = moved_out()
        assert still < size
        with torch.no_grad():
            net[0].weight.mul_(2)
        assert moved_out() == still + net[0].weight.nbytes
        torch.optim.SGD(net.parameters(), 0.1).step()
        assert moved_out() == still + size
        assert moved_out() == still


def test_refresh_replicas_copies_untracked_writes():
    with simulate(3):
        net = build_net()
        model, x = settled(net)
        for parameter in net.parameters():
            write_unseen(parameter, 3)
        model.refresh_replicas()
        assert_follows(model, net, x)


def test_replicas_on_one_device_share_parameters():
    with simulate(1) as cluster:
        net = nn.Linear(512, 512).to("sim:0")
        size = cluster.live[0]
        model = DataParallelModel(net, [0, 0, 0])
        model(torch.ones(3, 512))
        gc.collect()
        assert cluster.live[0] < 1.1 * size


@pytest.mark.parametrize("fused", [False, True])
def test_a_refresh_without_memory_is_made_again(fused):
    """A change that was seen, but not copied to every device, is not forgotten."""
    with simulate(3) as cluster:
        net = build_net().to("sim:0")
        model, x = DataParallelModel(net), torch.randn(6, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        failures = 0
        for number in range(1, 12):
            gather(model(x)).sum().backward()
            if fused:
                for parameter in net.parameters():
                    parameter.data.sub_(parameter.grad)  # without a version
            else:
                optimizer.step()
            optimizer.zero_grad()
            cluster.fail_allocation(number)
            try:
                found = gather(model(x), "cpu")
            except torch.OutOfMemoryError:
                failures += 1
                found = gather(model(x), "cpu")
            torch.testing.assert_close(found, net(x.to("sim:0")).cpu())
        assert failures > 3
