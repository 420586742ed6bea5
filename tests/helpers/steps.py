"""Steps of the tests of ``TrainStep``, in one process or on several ranks."""

import torch
from helpers.optimizers import sgd
from helpers.problems import class_targets
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep


def make_step(net, criterion=None, optimizer=None, *, devices=2, lr=0.1, split=None, **settings):
    """Returns a step of some replicas on the CPU, or on devices. The optimizer is a plain SGD if none is given."""
    if not isinstance(criterion, DataParallelCriterion):
        criterion = DataParallelCriterion(criterion or nn.CrossEntropyLoss())
    optimizer = sgd(net, lr=lr) if optimizer is None else optimizer
    devices = ["cpu"] * devices if isinstance(devices, int) else list(devices)
    return TrainStep(DataParallelModel(net, devices, split=split), criterion, optimizer, **settings)


def still_step(net, criterion, devices=3, **settings):
    """Returns a step of a wrapped criterion that does not change the parameters."""
    optimizer = sgd(net, criterion, lr=0.0)
    return TrainStep(DataParallelModel(net, ["cpu"] * devices), criterion, optimizer, **settings)


def batch(number):
    """Returns a batch of seven rows, of which the first label is ignored."""
    torch.manual_seed(number)
    return torch.randn(7, 4), class_targets(7, ignored=1)


def rows_of(rank, ranks):
    """Returns which rows of a batch are those of a rank: all, three of the first of two, and four of the second."""
    return slice(None) if ranks == 1 else [slice(0, 3), slice(3, 7)][rank]


def tolerance_of(precision):
    return (
        2e-2
        if precision == "fp16"
        else 1e-5
        if torch.get_default_dtype() == torch.float32
        else 1e-10
    )


def run(ranks, check, *arguments):
    """Runs a check in this process, or on several ranks. Its arguments are its rank, the number of ranks and ``arguments``."""
    if ranks > 1:
        return run_ranks(ranks, check, ranks, *arguments)
    before = torch.get_default_dtype()
    try:
        return [check(0, 1, *arguments)]
    finally:
        torch.set_default_dtype(before)
