"""Gradients of sharded parameters: read, written, clipped, changed by hooks."""

import copy

import pytest
import torch
from helpers.optimizers import ROWS, assert_same, batches, plain, train
from helpers.problems import build_net
from torch import nn

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, TrainStep, gather, simulate

pytestmark = pytest.mark.usefixtures("double", "buckets")

CLIPS = {
    "the model's parameters": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "the groups": lambda model, optimizer: nn.utils.clip_grad_norm_(
        [parameter for group in optimizer.param_groups for parameter in group["params"]], 0.1
    ),
}


@pytest.mark.parametrize("name", CLIPS)
def test_clip_grad_norm_equals_the_plain_program(name):
    net = build_net()
    expected, _ = plain(net, lambda net: torch.optim.SGD(net.parameters(), lr=1.0), clip=0.1)
    with simulate(3):
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=1.0)
        train(model, optimizer, clip=lambda: CLIPS[name](model, optimizer))
        assert_same(net, expected)


def test_grad_can_be_read_written_and_cleared():
    net, (x, target) = build_net(), next(batches(1))
    nn.functional.cross_entropy(net(x), target).backward()
    expected = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    with simulate(3):
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=1.0)
        criterion = DataParallelCriterion(nn.CrossEntropyLoss())
        criterion(model(x), target).backward()
        for parameter, gradient in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad.cpu(), gradient)
            assert parameter.grad is parameter.grad
        criterion(model(x), target).backward()  # adds up
        torch.testing.assert_close(net[0].weight.grad.cpu(), expected[0] * 2)
        before = net[0].weight.detach().cpu()
        net[0].weight.grad = torch.ones_like(net[0].weight)
        optimizer.step()
        torch.testing.assert_close(net[0].weight.detach().cpu(), before - 1)
        assert not optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in net.parameters())
        criterion(model(x), target).backward()
        model.zero_grad()
        before = net[0].weight.detach().cpu()
        optimizer.step()
        assert net[0].weight.cpu().equal(before)


def test_gradients_from_outside_the_replicas_are_added():
    """A penalty on the parameters themselves, and a batch so small that the module runs alone."""
    net = build_net()
    expected = copy.deepcopy(net)
    optimizer = torch.optim.Adam(expected.parameters(), lr=0.1)
    (x, target) = next(batches(1))

    def penalty(net):
        return sum(parameter.pow(2).sum() for parameter in net.parameters())

    for rows in (ROWS, 1):
        optimizer.zero_grad()
        (nn.functional.cross_entropy(expected(x[:rows]), target[:rows]) + penalty(expected)).backward()
        optimizer.step()
    with simulate(3):
        model = DataParallelModel(net)
        split = DataParallelCriterion(nn.CrossEntropyLoss())
        balanced = BalancedOptimizer(model, torch.optim.Adam, lr=0.1)
        for rows in (ROWS, 1):
            balanced.zero_grad()
            (split(model(x[:rows]), target[:rows]) + penalty(net)).backward()
            balanced.step()
        assert_same(net, expected)


def test_autograd_grad_returns_whole_gradients():
    net, (x, _) = build_net(), next(batches(1))
    expected = torch.autograd.grad(net(x).pow(2).sum(), list(net.parameters()))
    with simulate(3):
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=1.0)
        found = torch.autograd.grad(gather(model(x)).pow(2).sum(), list(net.parameters()))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other)
        assert model.replicas.gradients.is_sharded
        assert all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"])


@pytest.mark.parametrize("balanced", [False, True])
def test_parameter_hooks_can_change_gradients(balanced):
    net = build_net()
    expected = copy.deepcopy(net)
    expected[0].weight.register_hook(lambda gradient: gradient * 2)
    reference = torch.optim.SGD(expected.parameters(), lr=1.0)
    for x, target in batches(2):
        reference.zero_grad()
        nn.functional.cross_entropy(expected(x), target).backward()
        reference.step()
    calls = []
    net[0].weight.register_hook(lambda gradient: gradient * 2)
    net[2].bias.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.shape))
    with simulate(3):
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=1.0) if balanced else torch.optim.SGD(net.parameters(), lr=1.0)
        step = TrainStep(model, DataParallelCriterion(nn.CrossEntropyLoss()), optimizer, micro_batch_size=2)
        for x, target in batches(2):
            step(x, target)
        assert_same(net, expected)
        assert calls
