"""Ways to make the updates of one training: by hand or by a step, on devices of this process or on ranks."""

import torch
from helpers.optimizers import sgd
from helpers.plain import Plain, cut, entries
from torch import nn
from torch.testing import assert_close

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, simulate

# Each: the devices of one process, and the rows of a micro-batch, or None for all of them, or "by hand".
LAYOUTS = [(1, 2), (3, None), (2, 2), (1, "by hand"), (3, "by hand"), ("simulated", 1)]


def make_update(model, criterion, rows=None, lr=0.1):
    """Returns a function of inputs and targets that makes an update of SGD, and returns its loss."""
    optimizer = sgd(model, criterion, lr=lr)
    if rows != "by hand":
        return TrainStep(model, criterion, optimizer, micro_batch_size=rows)

    def by_hand(inputs, targets=()):
        optimizer.zero_grad()
        loss = criterion(model(*entries(inputs)), *entries(targets))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return by_hand


def numbers_of(module):
    """Returns the numbers that the parts of a module count."""
    parts = module.named_modules()
    return {
        (name, key): value
        for name, part in parts
        for key, value in vars(part).items()
        if type(value) in (int, float)
    }


def assert_exact_updates(plain, model, criterion, batches, update, rows=slice(None)):
    """Compares losses, parameters, gradients, buffers and numbers with those of the plain program.

    ``update`` trains the model and the criterion on ``rows`` of each batch.
    """
    net = model.module
    for inputs, targets in batches:
        found = update(cut(inputs, rows), cut(targets, rows))
        assert_close(found.cpu(), plain(inputs, targets))
    plain.assert_same(nn.ModuleList([net, criterion]))
    assert_close([*map(torch.Tensor.cpu, net.buffers())], [*plain.module.buffers()])
    assert numbers_of(net) == numbers_of(plain.module)


def assert_exact_in_one_process(layout, net, loss, batches, **settings):
    """Compares updates in one of ``LAYOUTS`` with those of the plain program. Settings are those of the criterion."""
    devices, rows = layout
    plain = Plain(net, loss)
    with simulate(3) as cluster:
        names = cluster.devices if devices == "simulated" else ["cpu"] * devices
        model = DataParallelModel(net, names)
        criterion = DataParallelCriterion(loss, **settings)
        update = make_update(model, criterion, rows)
        assert_exact_updates(plain, model, criterion, batches, update)
