"""Losses whose rows depend on each other, and updates with them that are compared with the plain program."""

import torch
import torch.nn.functional as F
from helpers.fsdp import whole
from helpers.problems import CLASSES, build_net
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    AdditiveLoss,
    DataParallelCriterion,
    DiceLoss,
)


class Towers(nn.Module):
    """Two towers and a temperature, as in CLIP."""

    def __init__(self):
        super().__init__()
        self.left = build_net()
        self.right = build_net()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, inputs):
        return self.left(inputs), self.right(inputs.flip(1)), self.scale.exp()


class PairLoss(nn.Module):
    """The contrastive loss of CLIP, with a bias of its own, and pairs of one label that do not repel."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(0.3))

    def forward(self, left, right, scale, labels):
        logits = scale * F.normalize(left, dim=1) @ F.normalize(right, dim=1).t() + self.bias * (
            labels[:, None] - labels[None]
        )
        own = torch.arange(len(left), device=left.device)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2


def correlation_statistics(output, target):
    wanted = F.one_hot(target, CLASSES).to(output)
    return {
        "rows": len(output),
        "sums": (output.sum(0), wanted.sum(0)),
        "products": (output * wanted).sum(0),
        "squares": (output.square().sum(0), wanted.square().sum(0)),
    }


def correlation_loss(total):
    """One minus Pearson's correlation of each class with its targets."""
    rows = total["rows"]
    output, wanted = total["sums"]
    covariance = total["products"] - output * wanted / rows
    first, second = total["squares"]
    product = (first - output.square() / rows) * (second - wanted.square() / rows)
    return (1 - covariance / (product + 1e-6).sqrt()).mean()


KINDS = {
    "pairs": (Towers, lambda: DataParallelCriterion(PairLoss(), whole=True)),
    "correlation": (
        build_net,
        lambda: DataParallelCriterion(AdditiveLoss(correlation_statistics, correlation_loss)),
    ),
    "dice": (build_net, lambda: DataParallelCriterion(DiceLoss())),
    "dice of all": (build_net, lambda: DataParallelCriterion(DiceLoss(), whole=True)),
}


def coupled_problem(kind, rows=11):
    """Returns a module and a criterion in float64, inputs and targets."""
    make, criterion = KINDS[kind]
    torch.manual_seed(3)
    module = make().double()
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(CLASSES, (rows,), generator=generator)
    return module, criterion().double(), inputs, targets


def gradients_of(module, criterion):
    """Returns the gradients of a model by name. Those of the criterion come last."""
    if not isinstance(criterion.module, nn.Module):
        return {}
    parts = [*module.named_parameters(), *criterion.module.named_parameters()]
    found = {name: whole(parameter.grad) for name, parameter in parts}
    return {name: None if each is None else each.clone() for name, each in found.items()}


def plain_update(kind, rows=11):
    """Returns the loss and the gradients of the plain program."""
    module, criterion, inputs, targets = coupled_problem(kind, rows)
    outputs = module(inputs)
    loss = criterion.module(*(outputs if isinstance(outputs, tuple) else (outputs,)), targets)
    loss.backward()
    return loss.detach(), gradients_of(module, criterion)


def assert_same_update(found, expected):
    """Compares losses and gradients. Missing ones of parameters that are frozen do not count."""
    assert_close(found[0], expected[0], rtol=1e-10, atol=1e-12)
    assert set(found[1]) == set(expected[1])
    for name, gradient in found[1].items():
        if gradient is not None:
            assert_close(
                gradient,
                expected[1][name],
                rtol=1e-10,
                atol=1e-12,
                msg=lambda text, name=name: f"{name}: {text}",
            )
