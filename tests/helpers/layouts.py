"""Ways to make the updates of one training: by hand or by a step, on devices of this process or on ranks."""

import torch
from helpers.optimizers import sgd
from helpers.plain import Plain, cut, entries
from torch import nn
from torch.testing import assert_close

from balanced_parallel import DataParallelModel, TrainStep, parallelize, simulate

# Each: the devices of one process, and the way of an update.
LAYOUTS = [(1, 2), (3, None), (2, "added"), (1, "by hand"), (3, "by hand"), ("simulated", 1)]


def make_update(model, criterion, way=None, lr=0.1, **settings):
    """Returns a function of inputs and targets that makes an update of SGD, and returns its loss.

    The way is a number of rows in a micro-batch of a step, or None for all of them, or "added": in two calls, or "by hand", or
    "asked": by hand, with gradients that ``torch.autograd.grad`` returns. Settings are those of a step.
    """
    optimizer = sgd(model, criterion, lr=lr)
    if way == "added":
        step = TrainStep(model, criterion, optimizer, micro_batch_size=2, **settings)

        def in_two_calls(inputs, targets=()):
            for rows in (slice(3), slice(3, None)):
                step.add(cut(inputs, rows), cut(targets, rows))
            return step.apply()

        return in_two_calls
    if way not in ("by hand", "asked"):
        return TrainStep(model, criterion, optimizer, micro_batch_size=way, **settings)

    def by_hand(inputs, targets=()):
        optimizer.zero_grad()
        loss = criterion(model(*entries(inputs)), *entries(targets))
        if way == "by hand":
            loss.backward()
        else:
            parameters = [*model.parameters(), *criterion.parameters()]
            trained = [each for each in parameters if each.requires_grad]
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
            for parameter, gradient in zip(trained, gradients, strict=True):
                # Ranks have zeros for a parameter that nobody uses.
                is_used = gradient is not None and gradient.any()
                parameter.grad = gradient if is_used else None
        optimizer.step()
        return loss.detach()

    return by_hand


def numbers_of(module):
    """Returns the numbers that the parts of a module count, without those of rows."""
    parts = module.named_modules()
    return {
        (name, key): value
        for name, part in parts
        for key, value in vars(part).items()
        if type(value) in (int, float, bool, tuple) and key != "rows"
    }


def assert_exact_updates(plain, model, criterion, batches, update):
    """Compares losses, parameters, gradients, buffers and numbers with those of the plain program.

    Each batch has inputs, targets, and the rows of them on which ``update`` trains the model and the criterion.
    """
    net = model.module
    for inputs, targets, rows in batches:
        found = update(cut(inputs, rows), cut(targets, rows))
        assert_close(found.cpu(), plain(inputs, targets))
    plain.assert_same(nn.ModuleList([net, criterion]))
    assert_close([*map(torch.Tensor.cpu, net.buffers())], [*plain.module.buffers()])
    # Layers of FSDP2 have more.
    assert numbers_of(plain.module).items() <= numbers_of(net).items()


def assert_exact_in_one_process(layout, net, criterion, batches):
    """Compares updates in one of ``LAYOUTS`` with those of the plain program."""
    devices, way = layout
    plain = Plain(net, criterion.module)
    with simulate(3) as cluster:
        names = cluster.devices if devices == "simulated" else ["cpu"] * devices
        model = DataParallelModel(net, names)
        update = make_update(model, criterion, way)
        whole = ((*batch, slice(None)) for batch in batches)
        assert_exact_updates(plain, model, criterion, whole, update)


def assert_exact_on_ranks(rank, strategy, way, cuts, net, criterion, batches):
    """Compares updates of two ranks with those of the plain program. The first has rows up to the cut of each update."""
    plain = Plain(net, criterion.module)
    model, criterion = parallelize(net, criterion, strategy=strategy)
    update = make_update(model, criterion, way)
    mine = (
        (*batch, slice(cut, None) if rank else slice(0, cut))
        for batch, cut in zip(batches, cuts, strict=True)
    )
    assert_exact_updates(plain, model, criterion, mine, update)
