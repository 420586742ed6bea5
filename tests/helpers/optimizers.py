"""Batches, plain training and comparisons of the tests of ``BalancedOptimizer``."""

import copy

import torch
from helpers.problems import CLASSES, assert_equal
from torch import nn

from balanced_parallel import BalancedOptimizer, DataParallelCriterion

ROWS = 11


def batches(steps):
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        yield (
            torch.randn(ROWS, 4, generator=generator),
            torch.randint(CLASSES, (ROWS,), generator=generator),
        )


def plain(net, make, steps=4, clip=None):
    """The plain program on a copy: the net and its optimizer."""
    net = copy.deepcopy(net)
    optimizer = make(net)
    clips = clip and (lambda: nn.utils.clip_grad_norm_(net.parameters(), clip))
    train(net, optimizer, steps, clips, nn.CrossEntropyLoss())
    return net, optimizer


def assert_same(net, expected, tolerance=1e-10):
    found, wanted = (
        [parameter.detach().cpu() for parameter in module.parameters()]
        for module in (net, expected)
    )
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def assert_same_state(found, expected):
    assert found["param_groups"] == expected["param_groups"]
    assert_equal(found["state"], expected["state"])


def train(model, optimizer, steps=4, clip=None, criterion=None):
    criterion = criterion or DataParallelCriterion(nn.CrossEntropyLoss())
    for x, target in batches(steps):
        optimizer.zero_grad()
        criterion(model(x), target).backward()
        if clip:
            clip()
        optimizer.step()


class ToStart(torch.optim.Optimizer):
    """SGD that pulls parameters to the values that they had when it was made, as L2-SP does."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self.state[parameter]["start"] = parameter.detach().clone()

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    pull = parameter - self.state[parameter]["start"]
                    parameter.sub_(parameter.grad + pull, alpha=group["lr"])


def sgd(*modules, lr=0.1, **settings):
    """Returns SGD of all parameters of the modules."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return torch.optim.SGD(parameters, lr, **settings)


def balanced_or_plain(model, kind, is_balanced, lr=0.1):
    """Returns an optimizer of all parameters of a model, sharded over its devices or as it is."""
    if is_balanced:
        return BalancedOptimizer(model, kind, lr=lr)
    return kind(model.parameters(), lr=lr)
