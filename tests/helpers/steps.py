"""Steps of the tests of ``TrainStep``, in one process or on several ranks."""

import torch
from helpers.optimizers import balanced_or_plain, sgd
from helpers.problems import build_net, class_batch, class_targets
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, parallelize


def make_step(
    net,
    criterion=None,
    optimizer=None,
    *,
    devices=2,
    kind=torch.optim.SGD,
    is_balanced=False,
    lr=0.1,
    split=None,
    **settings,
):
    """Returns a step of some replicas on the CPU, or on devices. The optimizer is a plain SGD if none is given.

    Without devices, the model is on all that are there.
    """
    if not isinstance(criterion, DataParallelCriterion):
        criterion = DataParallelCriterion(criterion or nn.CrossEntropyLoss())
    devices = ["cpu"] * devices if isinstance(devices, int) else devices and list(devices)
    model = DataParallelModel(net, devices, split=split)
    if optimizer is None:
        optimizer = balanced_or_plain(model, kind, is_balanced, lr)
    return TrainStep(model, criterion, optimizer, **settings)


def parallel_step(
    net,
    criterion=None,
    devices=None,
    *,
    strategy="auto",
    weight=None,
    kind=torch.optim.SGD,
    is_balanced=False,
    lr=0.1,
    **settings,
):
    """Returns a step of a module that ``parallelize`` has wrapped: of replicas, or of this rank."""
    criterion = criterion or nn.CrossEntropyLoss()
    model, criterion = parallelize(net, criterion, devices, strategy=strategy, weight=weight)
    return TrainStep(model, criterion, balanced_or_plain(model, kind, is_balanced, lr), **settings)


def still_step(net, criterion, devices=3, **settings):
    """Returns a step of a wrapped criterion that does not change the parameters."""
    optimizer = sgd(net, criterion, lr=0.0)
    return TrainStep(DataParallelModel(net, ["cpu"] * devices), criterion, optimizer, **settings)


def train_over(sampler, rows):
    """Returns the losses of updates whose rows a sampler chooses, in one process or on a rank."""
    step = parallel_step(build_net().double(), devices=["cpu"], lr=0.5)
    inputs = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0)).double()
    targets = class_targets(rows, ignored=6)
    losses = []
    for chosen in sampler:
        losses.append(step(inputs[chosen], targets[chosen]).item())
        sampler.advance()
    return losses


def batch(number):
    """Returns a batch of seven rows, of which the first label is ignored."""
    torch.manual_seed(number)
    return class_batch(7, ignored=1)


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
