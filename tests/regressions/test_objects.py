"""Inputs that are neither tensors nor containers: an object with tensors is never sent whole without a word."""

import functools

import pytest
import torch
from helpers.problems import build_net
from torch import nn

from balanced_parallel import DataParallelModel, Rows, Whole

CPUS = ["cpu"] * 3


class Graphs:
    """A batch of graphs. It can be called, as ``torch_geometric.data.Data`` can."""

    def __init__(self, x):
        self._store = {"x": x}

    def __call__(self, *names):
        return [self._store[name] for name in names]


class Slots:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class MoreSlots(Slots):
    __slots__ = ("__name",)


class Sum(nn.Module):
    def forward(self, given, function=None):
        return sum(entry.x.sum() if isinstance(entry, Slots) else entry("x")[0].sum() for entry in given)


@pytest.mark.parametrize("kind", [Graphs, Slots, MoreSlots])
def test_objects_that_hold_tensors_are_refused(kind):
    model, x = DataParallelModel(Sum(), CPUS), torch.ones(6, 4)
    with pytest.raises(TypeError, match=rf"inputs\[0\] is an object of type {kind.__name__} that holds tensors.*Rows\(list\)"):
        model(kind(x))
    outputs = model(Rows([kind(row) for row in x]))
    assert [output.item() for output in outputs] == [8, 8, 8]
    (output,) = DataParallelModel(Sum(), ["cpu"])(Whole([kind(x)]))
    assert output.item() == 24


def test_functions_go_to_every_replica():
    class Apply(nn.Module):
        def forward(self, x, function):
            return function(x)

    weight = torch.full((4,), 2.0)
    for function in (torch.relu, lambda x: x * weight, functools.partial(torch.mul, weight), weight.mul, build_net()):
        assert len(DataParallelModel(Apply(), CPUS)(torch.ones(6, 4), function).gather()) == 6
