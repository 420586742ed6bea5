"""The plain program that layouts are compared with: one device, whole batches, and a loop by hand."""

import copy

import torch
from helpers.fsdp import whole
from torch import nn
from torch.testing import assert_close


def entries(value):
    """Returns what a model or a criterion takes as its arguments: the entries of a tuple, or the value alone."""
    return value if isinstance(value, tuple) else (value,)


def cut(given, rows):
    """Returns rows of a tensor, or of each tensor in a tuple."""
    return tuple(part[rows] for part in given) if isinstance(given, tuple) else given[rows]


def dense(tensor):
    """Returns the elements of all ranks, on the CPU, also of a sparse gradient."""
    tensor = whole(tensor).detach().cpu()
    return tensor.to_dense() if tensor.is_sparse else tensor


class Plain:
    """A copy of a module, which is trained on whole batches.

    Args:
        criterion: takes the entries of the output, then the targets.
        kind: the class of the optimizer, whose settings follow.
        clip: the largest norm of the gradients.
    """

    def __init__(self, module, criterion, kind=torch.optim.SGD, *, clip=None, **settings):
        self.module, self.criterion = copy.deepcopy((module, criterion))
        self.clip = clip
        self.norm = None
        parts = [part for part in (self.module, self.criterion) if isinstance(part, nn.Module)]
        self.parameters = [parameter for part in parts for parameter in part.parameters()]
        self.optimizer = kind(self.parameters, **{"lr": 0.1} | settings)

    def __call__(self, inputs, targets=()):
        """Makes an update. Returns its loss."""
        self.optimizer.zero_grad()
        loss = self.loss(inputs, targets)
        loss.backward()
        if self.clip is not None:
            self.norm = nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        return loss.detach()

    def loss(self, inputs, targets=()):
        """Returns the loss of a batch, with its graph."""
        output = self.module(*entries(inputs))
        return self.criterion(*entries(output), *entries(targets))

    def assert_same(self, module, *, gradients=True, **tolerances):
        """Compares the parameters of a module that was trained elsewhere, and their gradients."""
        for found, expected in zip(module.parameters(), self.parameters, strict=False):
            pairs = [(found, expected), (found.grad, expected.grad)]
            for one, other in pairs if gradients else pairs[:1]:
                assert (one is None) == (other is None)
                if other is not None:
                    assert whole(one).is_sparse == other.is_sparse
                    assert_close(dense(one), dense(other), **tolerances)
