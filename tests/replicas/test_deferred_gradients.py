"""Gradients that stay with the replicas over some backwards are the parameters' own to whoever looks."""

import contextlib
import gc
import weakref

import pytest
import torch
from helpers.problems import CLASSES, assert_same_gradients, build_net, gradients
from torch import nn

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, gather, simulate
from balanced_parallel.runtime.tensors import get_gradient

pytestmark = pytest.mark.usefixtures("double", "buckets")


def zero(optimizer, net):
    optimizer.zero_grad()


def zero_in_place(optimizer, net):
    optimizer.zero_grad(set_to_none=False)


def zero_the_net(optimizer, net):
    net.zero_grad()


def zero_by_hand(optimizer, net):
    for parameter in net.parameters():
        parameter.grad = None


def delete_by_hand(optimizer, net):
    for parameter in net.parameters():
        del parameter.grad


def zero_some(optimizer, net):
    net[0].weight.grad = None


def double_some(optimizer, net):
    net[0].weight.grad *= 2


def replace_some(optimizer, net):
    net[0].weight.grad = torch.ones_like(net[0].weight)


def clip(optimizer, net):
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)


def step_without_a_reduction(optimizer, net):
    optimizer.step()
    optimizer.zero_grad()


CHANGES = [zero, zero_in_place, zero_the_net, zero_by_hand, delete_by_hand, zero_some, double_some, replace_some, clip]
LAYOUTS = {"one device": ["cpu"] * 3, "three devices": ["sim:0", "sim:1", "sim:2"], "balanced": ["sim:0", "sim:1", "sim:2"]}


@pytest.mark.parametrize("between", [*CHANGES, step_without_a_reduction], ids=lambda change: change.__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("begins", ["with nothing", "with gradients"])
def test_what_is_held_is_seen_discarded_and_changed_as_in_the_plain_program(between, layout, begins):
    torch.manual_seed(2)
    x, y = torch.randn(20, 4), torch.randn(20, CLASSES)

    def run(net, optimizer, model, criterion, no_sync):
        def backward(rows):
            criterion(model(x[rows]), y[rows]).backward()

        if begins == "with gradients":
            backward(slice(0, 5))
        with no_sync():
            backward(slice(5, 7))
            backward(slice(7, 12))
        between(optimizer, net)
        with no_sync():
            backward(slice(12, 13))
        backward(slice(13, 20))
        found = gradients(net)
        optimizer.step()
        return [*found, *(parameter.detach() for parameter in net.parameters())]

    net = build_net()
    expected = run(net, torch.optim.SGD(net.parameters(), 0.1), net, nn.MSELoss(), contextlib.nullcontext)
    with simulate(3):
        devices = LAYOUTS[layout]
        net = build_net().to(devices[0])
        model, criterion = DataParallelModel(net, devices), DataParallelCriterion(nn.MSELoss())
        kind = torch.optim.SGD
        optimizer = BalancedOptimizer(model, kind, lr=0.1) if layout == "balanced" else kind(net.parameters(), 0.1)
        found = run(net, optimizer, model, criterion, model.no_sync)
        assert_same_gradients([gradient.cpu() for gradient in found], expected)


def test_between_windows_the_attribute_is_torchs_own():
    def is_torchs_own():
        return "grad" not in vars(nn.Parameter)

    def backward(model):
        gather(model(torch.randn(6, 4)), "cpu").sum().backward()

    with simulate(3):
        model, other = DataParallelModel(build_net()), DataParallelModel(build_net())
        for end in (model.reduce_gradients, model.zero_grad, lambda: backward(model)):
            with model.no_sync(), other.no_sync():
                backward(model)
                assert not is_torchs_own()
                backward(other)
            end()
            assert not is_torchs_own()
            other.reduce_gradients()
            assert is_torchs_own()


def test_what_is_held_does_not_keep_the_replicas_alive():
    with simulate(3):
        model = DataParallelModel(build_net())
        with model.no_sync():
            gather(model(torch.randn(6, 4)), "cpu").sum().backward()
        parameter, seen = model.module[0].weight, weakref.ref(model.replicas)
        del model
        gc.collect()
        assert seen() is None
        assert parameter.grad is None


def test_each_backward_follows_its_own_forward():
    with simulate(2):
        net = build_net()
        model = DataParallelModel(net)
        first = gather(model(torch.randn(4, 4)), "cpu").sum()
        with model.no_sync():
            second = gather(model(torch.randn(4, 4)), "cpu").sum()
        third = gather(model(torch.randn(4, 4)), "cpu").sum()
        first.backward()
        assert all(get_gradient(parameter) is not None for parameter in net.parameters())
        before = [get_gradient(parameter).clone() for parameter in net.parameters()]
        second.backward()
        assert all(get_gradient(one).equal(then) for one, then in zip(net.parameters(), before, strict=True))
        third.backward()
        assert not any(get_gradient(one).equal(then) for one, then in zip(net.parameters(), before, strict=True))
        assert "grad" not in vars(nn.Parameter)  # nothing is left with the replicas
