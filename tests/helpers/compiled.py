"""A module to compile, ragged batches, and the plain program that a compiled one is compared with."""

import torch
import torch.nn.functional as F
from helpers.fsdp import whole
from helpers.optimizers import sgd
from helpers.problems import assert_equal
from torch import nn

ROWS = [7, 5, 9, 1, 3, 12, 2, 8, 4]


class Net(nn.Module):
    """A class of its own: in torch 2.13, ``compile()`` of a module of torch has no effect."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(13, 17)
        self.last = nn.Linear(17, 5)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, inputs):
        self.total.add_(1)
        self.last_rows = inputs.size(0)
        return self.last(torch.tanh(self.first(inputs)))


def build():
    torch.manual_seed(0)
    return Net()


def batches(rows=ROWS):
    """Returns ragged batches with ignored labels."""
    generator = torch.Generator().manual_seed(1)
    for count in rows:
        targets = torch.randint(5, (count,), generator=generator)
        targets[1::4] = -100
        yield torch.randn(count, 13, generator=generator, dtype=torch.get_default_dtype()), targets


def plain_run(rows=ROWS, lr=0.1):
    """Returns the losses of the plain program, and its module."""
    net = build()
    losses = []
    optimizer = sgd(net, lr=lr)
    for inputs, targets in batches(rows):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, net


def assert_same_run(losses, net, rows=ROWS):
    """Compares the losses of a training and the weights that it ends with."""
    expected, plain = plain_run(rows)
    assert_equal(torch.stack([loss.cpu() for loss in losses]), torch.stack(expected))
    values = {name: whole(value) for name, value in net.named_parameters()}
    found, weights = (
        [value.detach().cpu() for value in values]
        for values in (values.values(), plain.parameters())
    )
    assert_equal(found, weights)


class Graphs:
    """A backend of ``torch.compile`` that counts graphs and runs them as they are."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph
