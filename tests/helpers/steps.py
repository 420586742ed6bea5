"""Steps of the tests of ``TrainStep``, in one process or on several ranks."""

import torch
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep

CPUS = ["cpu"] * 2


def make_step(net, criterion=None, optimizer=None, split=None, **settings):
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    model = DataParallelModel(net, CPUS, split=split)
    return TrainStep(model, DataParallelCriterion(criterion or nn.CrossEntropyLoss()), optimizer, **settings)


def still_step(net, criterion, devices=3, **settings):
    """Returns a step of a wrapped criterion that does not change the parameters."""
    optimizer = torch.optim.SGD([*net.parameters(), *criterion.parameters()], lr=0.0)
    return TrainStep(DataParallelModel(net, ["cpu"] * devices), criterion, optimizer, **settings)


def tolerance_of(precision):
    return 2e-2 if precision == "fp16" else 1e-5 if torch.get_default_dtype() == torch.float32 else 1e-10


def run(ranks, check, *arguments):
    """Runs a check in this process, or on several ranks. Its arguments are its rank, the number of ranks and ``arguments``."""
    if ranks > 1:
        return run_ranks(ranks, check, ranks, *arguments)
    before = torch.get_default_dtype()
    try:
        return [check(0, 1, *arguments)]
    finally:
        torch.set_default_dtype(before)
