"""Gradients of inputs over ranks: those of the loss over all rows, once, as on one device."""

import pytest
import torch
import torch.nn.functional as F
from helpers.fsdp import whole_gradients
from helpers.problems import assert_equal, assert_same_gradients, gradients
from helpers.ranks import on_ranks
from helpers.slow import pairs
from torch import nn

from balanced_parallel import AdditiveLoss, DataParallelCriterion, parallelize
from balanced_parallel.batch.outputs import PerReplica

SIZES = [[2, 4], [6, 0], [0, 6]]


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()


class Root(AdditiveLoss):
    """A function of a sum over the rows."""

    def statistics(self, output, target):
        return (output - target).pow(2).sum(0)

    def finish(self, statistics):
        return statistics.sqrt().sum()


def saliency(models, loss, x, y):
    """The gradient at the inputs is asked for, then all of them are accumulated."""
    value = loss(models[0](x), y)
    (slope,) = torch.autograd.grad(value, x, retain_graph=True)
    value.backward()
    return [slope, x.grad]


def attack(models, loss, x, y):
    """The gradient at a perturbation, which is not an input itself, and that at the inputs that are made of it."""
    shift = torch.zeros_like(x, requires_grad=True)
    moved = x.detach() + shift
    moved.retain_grad()
    loss(models[0](moved), y).backward()
    return [shift.grad, moved.grad]


def chain(models, loss, x, y):
    loss(models[1](models[0](x)), y).backward()
    return [x.grad]


def targets(models, loss, x, y):
    """The inputs are the targets too."""
    loss(models[0](x), x).backward()
    return [x.grad]


def each_row(models, loss, x, y):
    """A sum of outputs is no loss of all ranks: each row has a gradient of its own. Its norm is trained."""
    output = models[0](x)
    total = (output[0] if isinstance(output, PerReplica) else output).sum()
    (slope,) = torch.autograd.grad(total, x, retain_graph=True)
    (loss(output, y)).backward()
    return [slope, x.grad]


def forces(models, loss, x, y):
    """Energies and their derivatives are trained."""
    energies = models[0](x)
    (slope,) = torch.autograd.grad(loss(energies, y), x, create_graph=True)
    slopes = [slope] if isinstance(energies, PerReplica) else slope
    (loss(energies, y) + loss(slopes, y)).backward()
    return [slope.detach(), x.grad]


def curvature(models, loss, x, y):
    """Products of the Hessian at the inputs and a vector, by two backwards."""
    (slope,) = torch.autograd.grad(loss(models[0](x), y), x, create_graph=True)
    return list(torch.autograd.grad(slope.pow(3).sum(), x))


def unrolled(models, loss, x, y):
    """Inputs move along their gradient, and the movement is trained."""
    (slope,) = torch.autograd.grad(loss(models[0](x), y), x, create_graph=True)
    loss(models[0](x.detach() - slope), y).backward()
    return []


FIRST = [saliency, attack, chain, targets, each_row]
SECOND = [forces, curvature, unrolled]
PLAIN = {
    "mean": F.mse_loss,
    "root": lambda output, target: (output - target).pow(2).sum(0).sqrt().sum(),
}
LOSSES = {
    "mean": lambda: DataParallelCriterion(nn.MSELoss()),
    "root": lambda: DataParallelCriterion(Root()),
    "whole": lambda: DataParallelCriterion(PLAIN["root"], whole=True),
}


# FSDP2 has no second derivatives.
CASES = [
    *pairs(FIRST, ["ddp", "fsdp"], [*LOSSES], SIZES),
    *pairs(SECOND, ["ddp"], [*LOSSES], SIZES),
]


@pytest.mark.parametrize(("way", "strategy", "name", "sizes"), CASES)
@on_ranks(2)
def test_gradients_of_inputs_are_those_of_the_loss_of_all_rows(rank, way, strategy, name, sizes):
    x, y = torch.randn(2, 6, 4).double().unbind()
    plain = [build(), build(1)]
    expected = way(plain, PLAIN["root" if name == "whole" else name], x.clone().requires_grad_(), y)
    models = [parallelize(build(seed), None, ["cpu"], strategy=strategy) for seed in (0, 1)]
    parts = [tensor.split(sizes)[rank] for tensor in (x, y)]
    results = way(models, LOSSES[name](), parts[0].clone().requires_grad_(), parts[1])
    for result, value in zip(results, expected, strict=True):
        assert_equal(result, value.split(sizes)[rank])
    found = [each for model in models for each in whole_gradients(model.module)]
    assert_same_gradients(found, gradients(*plain))


class Forces(nn.Sequential):
    """Returns the derivative of an energy at the inputs."""

    def forward(self, x):
        return torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)[0]


class Penalised(nn.Sequential):
    """Returns outputs, and the norms of the derivatives at points between the rows and zero."""

    def forward(self, x):
        mixed = (0.5 * x).detach().requires_grad_()
        (slopes,) = torch.autograd.grad(super().forward(mixed).sum(), mixed, create_graph=True)
        return super().forward(x), slopes.norm(dim=1)


def wasserstein(output, norms, y):
    return (output * y).mean() + 10 * (norms - 1).square().mean()


GRADIENTS_IN_FORWARD = {"forces": (Forces, F.mse_loss), "penalty": (Penalised, wasserstein)}


@pytest.mark.parametrize("name", GRADIENTS_IN_FORWARD)
@on_ranks(2)
def test_a_rank_without_rows_runs_a_forward_that_asks_for_gradients(rank, name):
    """The row that it runs had no graph: "element 0 of tensors does not require grad"."""
    build_model, loss = GRADIENTS_IN_FORWARD[name]
    x, y = torch.randn(2, 5, 4).double().unbind()
    plain = build_model(*build())
    model, criterion = parallelize(build_model(*build()), loss, ["cpu"], strategy="ddp")
    for sizes in ([5, 0], [2, 3], [0, 5]):
        plain.zero_grad()
        model.zero_grad()
        output = plain(x.clone().requires_grad_())
        expected = loss(*(output if isinstance(output, tuple) else [output]), y)
        expected.backward()
        part = x.split(sizes)[rank].clone().requires_grad_()
        value = criterion(model(part), y.split(sizes)[rank])
        value.backward()
        assert_equal(value, expected)
        assert_same_gradients(gradients(model.module), gradients(plain))


@on_ranks(2)
def test_second_derivatives_at_inputs_are_refused_with_shards(rank):
    """The backward read weights that FSDP2 had freed: "setStorage: sizes [4, 8], strides"."""
    model, criterion = parallelize(build(), F.mse_loss, ["cpu"], strategy="fsdp")
    x = torch.randn(3, 4).double().requires_grad_()
    output = model(x)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*strategy='ddp'"):
        torch.autograd.grad(output[0].sum(), x, create_graph=True)
    (slope,) = torch.autograd.grad(model(x)[0].sum(), x)
    criterion(model(x), slope).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
