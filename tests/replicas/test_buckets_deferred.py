"""Deferred gradients: ``no_sync`` reduces once, and gradients that are discarded in between are those of all replicas."""

import contextlib
import gc
import weakref

import pytest
import torch
from helpers.optimizers import balanced_or_plain, sgd
from helpers.problems import (
    CLASSES,
    assert_same_gradients,
    build_net,
    gradients,
)
from helpers.updates import SIMULATED, values_of
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, gather, simulate

pytestmark = pytest.mark.usefixtures("double", "buckets")


CHANGES = {
    "nothing": lambda optimizer, net: None,
    "zero": lambda optimizer, net: optimizer.zero_grad(),
    "zero the net": lambda optimizer, net: net.zero_grad(),
    "zero by hand": lambda optimizer, net: [
        setattr(parameter, "grad", None) for parameter in net.parameters()
    ],
    "delete by hand": lambda optimizer, net: [
        delattr(parameter, "grad") for parameter in net.parameters()
    ],
    "zero some": lambda optimizer, net: setattr(net[0].weight, "grad", None),
    "replace some": lambda optimizer, net: setattr(
        net[0].weight, "grad", torch.ones_like(net[0].weight)
    ),
}
OF_SHARDS = {
    "nothing": CHANGES["nothing"],
    "zero": CHANGES["zero"],
    "zero in place": lambda optimizer, net: optimizer.zero_grad(set_to_none=False),
    "step": lambda optimizer, net: optimizer.step(),
}
LAYOUTS = {"one device": ["cpu"] * 3, "three devices": SIMULATED, "balanced": SIMULATED}
CASES = [
    *[("three devices", change, True) for change in CHANGES],
    *[("balanced", change, change != "step") for change in OF_SHARDS],
    ("one device", "zero", True),
    ("three devices", "zero by hand", False),
]


def make_program(layout):
    """Returns a net, its model, its criterion and its optimizer."""
    net = build_net().to(LAYOUTS[layout][0])
    model = DataParallelModel(net, LAYOUTS[layout])
    optimizer = balanced_or_plain(model, torch.optim.SGD, layout == "balanced")
    return net, model, DataParallelCriterion(nn.MSELoss()), optimizer


@pytest.mark.parametrize(("layout", "between", "begins"), CASES)
def test_discarded_gradients_are_those_of_all_replicas(layout, between, begins):
    """Gradients that are there before the window are discarded with those of the window."""
    torch.manual_seed(2)
    x = torch.randn(20, 4)
    y = torch.randn(20, CLASSES)

    def run(net, model, criterion, optimizer, no_sync):
        def backward(rows):
            criterion(model(x[rows]), y[rows]).backward()

        if begins:
            backward(slice(0, 5))
        with no_sync():
            backward(slice(5, 7))
            backward(slice(7, 12))
        (OF_SHARDS if layout == "balanced" else CHANGES)[between](optimizer, net)
        # One row is too few for the other replicas, so that autograd sets grad.
        with no_sync():
            backward(slice(12, 13))
        backward(slice(13, 20))
        found = gradients(net, optimizer=optimizer)
        optimizer.step()
        return [*found, *values_of(net)]

    net = build_net()
    expected = run(net, net, nn.MSELoss(), sgd(net), contextlib.nullcontext)
    with simulate(3):
        net, model, criterion, optimizer = make_program(layout)
        found = run(net, model, criterion, optimizer, model.no_sync)
        assert_same_gradients(found, expected)


class AfterTheFirst(nn.Module):
    """A net whose first replica uses no parameters."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        output = self.net(x)
        return output if x.device.index else torch.zeros_like(output, requires_grad=True)


def test_grad_is_that_of_the_first_replica_before_the_reduction():
    x = torch.randn(6, 4)
    with simulate(3):
        net = build_net().to("sim:0")
        model = DataParallelModel(net)
        net(x[:2].to("sim:0")).sum().backward()
        first = [gradient.clone() for gradient in gradients(net)]
        net.zero_grad()
        with model.no_sync():
            for times in (1, 2):
                gather(model(x)).sum().backward()
                assert_same_gradients(gradients(net), [times * gradient for gradient in first])
        model.zero_grad()
        model = DataParallelModel(AfterTheFirst(net))
        with model.no_sync():
            gather(model(x)).sum().backward()
        assert all(not gradient.any() for gradient in gradients(net))
        model.reduce_gradients()
        together = gradients(net)
        net.zero_grad()
        net(x[2:].to("sim:0")).sum().backward()
        assert_same_gradients(together, gradients(net))


def test_deferred_gradients_do_not_keep_the_replicas_alive():
    with simulate(3):
        model = DataParallelModel(build_net())
        with model.no_sync():
            gather(model(torch.randn(6, 4)), "cpu").sum().backward()
        seen = weakref.ref(model.replicas)
        del model
        gc.collect()
        assert seen() is None
