"""Small models, losses and batches that several tests share, and the plain program that they are compared with."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 5


def build_net(outputs=CLASSES):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


def class_targets(rows, ignored=0):
    """Class indices, the first ``ignored`` of them to be left out of the loss."""
    targets = torch.randint(CLASSES, (rows,), generator=torch.Generator().manual_seed(2))
    targets[:ignored] = -100
    return targets


def _weights():
    return torch.linspace(0.5, 2.0, CLASSES)


def _log_softmax_nll(**settings):
    return lambda output, target: F.nll_loss(output.log_softmax(1), target, **settings)


# Each: a name, a function that makes the criterion (the default dtype is set by then), and the kind of targets it takes.
LOSSES = {
    "CrossEntropyLoss": (lambda: nn.CrossEntropyLoss(), "classes"),
    "CrossEntropyLoss, weight": (lambda: nn.CrossEntropyLoss(weight=_weights()), "classes"),
    "CrossEntropyLoss, smoothing": (lambda: nn.CrossEntropyLoss(label_smoothing=0.2), "classes"),
    "CrossEntropyLoss, weight, smoothing": (lambda: nn.CrossEntropyLoss(_weights(), label_smoothing=0.2), "classes"),
    "CrossEntropyLoss, sum": (lambda: nn.CrossEntropyLoss(reduction="sum"), "classes"),
    "CrossEntropyLoss, probabilities": (lambda: nn.CrossEntropyLoss(weight=_weights()), "probabilities"),
    "cross_entropy": (lambda: F.cross_entropy, "classes"),
    "cross_entropy, partial": (lambda: functools.partial(F.cross_entropy, weight=_weights(), label_smoothing=0.1), "classes"),
    "cross_entropy, partial sum": (lambda: functools.partial(F.cross_entropy, reduction="sum"), "classes"),
    "NLLLoss": (lambda: nn.NLLLoss(), "classes"),
    "NLLLoss, weight": (lambda: nn.NLLLoss(_weights(), ignore_index=-100), "classes"),
    "nll_loss": (lambda: F.nll_loss, "classes"),
    "BCELoss": (lambda: nn.BCELoss(), "unit"),
    "BCELoss, weight": (lambda: nn.BCELoss(weight=_weights()), "unit"),
    "binary_cross_entropy": (lambda: F.binary_cross_entropy, "unit"),
    "BCEWithLogitsLoss": (lambda: nn.BCEWithLogitsLoss(pos_weight=_weights()), "probabilities"),
    "BCEWithLogitsLoss, sum": (lambda: nn.BCEWithLogitsLoss(reduction="sum"), "probabilities"),
    "binary_cross_entropy_with_logits": (lambda: F.binary_cross_entropy_with_logits, "probabilities"),
    "MSELoss": (lambda: nn.MSELoss(), "probabilities"),
    "MSELoss, sum": (lambda: nn.MSELoss(reduction="sum"), "probabilities"),
    "mse_loss": (lambda: F.mse_loss, "probabilities"),
    "L1Loss": (lambda: nn.L1Loss(), "probabilities"),
    "l1_loss": (lambda: F.l1_loss, "probabilities"),
    "SmoothL1Loss": (lambda: nn.SmoothL1Loss(beta=0.3), "probabilities"),
    "smooth_l1_loss": (lambda: F.smooth_l1_loss, "probabilities"),
    "HuberLoss": (lambda: nn.HuberLoss(delta=0.3), "probabilities"),
    "huber_loss": (lambda: F.huber_loss, "probabilities"),
}


class OnTop(nn.Module):
    """The net with what a loss wants its outputs to be: log-probabilities, or numbers between 0 and 1."""

    def __init__(self, name):
        super().__init__()
        self.net = build_net()
        self.name = name

    def forward(self, inputs):
        outputs = self.net(inputs)
        if "nll" in self.name.lower():
            return outputs.log_softmax(1)
        if self.name in ("BCELoss", "BCELoss, weight", "binary_cross_entropy"):
            return outputs.sigmoid()
        return outputs


def make_targets(kind, rows, ignored=0):
    if kind == "classes":
        return class_targets(rows, ignored)
    return torch.rand(rows, CLASSES, generator=torch.Generator().manual_seed(3))


def gradients(module):
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in module.parameters()]


def plain_program(module, criterion, inputs, targets):
    """Loss and gradients of the whole batch on one device."""
    module.zero_grad()
    loss = criterion(module(inputs), targets)
    loss.backward()
    found = gradients(module)
    module.zero_grad()
    return loss.detach(), found


def assert_same_gradients(found, expected, tolerance=1e-10):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
