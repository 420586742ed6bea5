"""Copies between devices in one step: how many, and how many of them wait for each other."""

import pytest
import torch
from torch import nn

from balanced_parallel import BalancedOptimizer, DataParallelModel, simulate


def longest_chain(copies):
    """A device takes part in one copy at a time."""
    busy = {}
    for ends in copies:
        for device in ends:
            busy[device] = 1 + max(busy.get(end, 0) for end in ends) if device == ends[0] else busy[ends[0]]
    return max(busy.values(), default=0)


class Copies:
    """Copies between devices since the last look."""

    def __init__(self, cluster):
        self.cluster, self.seen = cluster, 0

    def take(self):
        found = self.cluster.copies[self.seen :]
        self.seen += len(found)
        return [ends for ends in found if "cpu" not in ends]


def build():
    return nn.Sequential(nn.Linear(4, 30), nn.BatchNorm1d(30), nn.Linear(30, 30), nn.BatchNorm1d(30), nn.Linear(30, 3))


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_gradients_and_parameters_of_a_bucket_go_in_rounds(count):
    with simulate(count) as cluster:
        model = DataParallelModel(build())
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=0.1)
        losses = [output.sum() for output in model(torch.randn(2 * count, 4))]
        copies = Copies(cluster)
        copies.take()
        torch.autograd.backward(losses)
        gradients = copies.take()
        optimizer.step()
        parameters = copies.take()
        rounds = count if count % 2 else count - 1
        for found in (gradients, parameters):
            assert len(found) == len(set(found)) == count * (count - 1)
            assert longest_chain(found) == 2 * rounds  # each pair in both directions
        model(torch.randn(2 * count, 4))
        assert len(copies.take()) == 2 * (count - 1)  # buffers of two dtypes, no parameters


@pytest.mark.parametrize("count", [2, 4, 8])
def test_without_owners_each_device_sends_and_receives_once(count):
    with simulate(count) as cluster:
        model = DataParallelModel(build())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.autograd.backward([output.sum() for output in model(torch.randn(2 * count, 4))])
        copies = Copies(cluster)
        for _ in range(2):
            optimizer.step()
            copies.take()
            losses = [output.sum() for output in model(torch.randn(2 * count, 4))]
            assert len(copies.take()) == 3 * (count - 1)  # parameters, and buffers of two dtypes
            torch.autograd.backward(losses)
            assert sorted(copies.take()) == sorted((f"sim:{index}", "sim:0") for index in range(1, count))


@pytest.mark.parametrize("balanced", [False, True])
def test_a_large_parameter_is_not_packed(balanced):
    size = 2**20
    with simulate(4) as cluster:
        model = DataParallelModel(nn.Linear(size // 4, 1, bias=False).to("sim:0"))
        kind = torch.optim.SGD
        optimizer = BalancedOptimizer(model, kind, lr=0.1) if balanced else kind(model.parameters(), lr=0.1)
        for _ in range(2):
            losses = [output.sum() for output in model(torch.ones(4, size // 4))]
            cluster.reset_peak()
            torch.autograd.backward(losses)
            del losses
            # parameter, inputs and gradient; the sum and what was received take the place of the inputs
            assert max(cluster.peak) <= (3 if balanced else 4) * size + 4096
            cluster.reset_peak()
            optimizer.step()
            assert max(cluster.peak) <= (1.25 if balanced else 2) * size + 4096
            optimizer.zero_grad()


def test_the_first_copies_need_no_other_memory():
    with simulate(3) as cluster:
        model = DataParallelModel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)]).to("sim:0"))
        model.replicas.prepare(model.module, model.devices)
        size = sum(-(-parameter.nbytes // 512) * 512 for parameter in model.parameters())
        assert cluster.peak == [size] * 3


def test_gradients_that_some_replicas_do_not_have():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.rarely, self.never = (nn.Parameter(torch.ones(5)) for _ in range(3))

        def forward(self, inputs):
            return inputs * self.always * (self.rarely if inputs[0, 0] == 2 else 1)

    inputs = torch.arange(4.0).unsqueeze(1).expand(4, 5)
    for balanced in (False, True):
        with simulate(4):
            model = DataParallelModel(Sometimes())
            optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=0.1) if balanced else None
            for rows in (4, 3):  # on fewer devices than there are owners
                torch.autograd.backward([output.sum() for output in model(inputs[:rows])])
                assert model.module.always.grad.tolist() == [float(sum(range(rows)))] * 5
                assert model.module.rarely.grad.tolist() == [2.0] * 5
                assert model.module.never.grad is None
                model.zero_grad()
            del optimizer
