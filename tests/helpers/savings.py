"""Training with a saving of memory, compared with the same training without it."""

import contextlib
import functools

import torch
from helpers.optimizers import sgd
from helpers.problems import CLASSES, assert_same_gradients, gradients
from helpers.steps import run
from torch import nn

from balanced_parallel import TrainStep, parallelize, savings, simulate

ROWS = [7, 1, 5]  # One number for each update. A replica and a rank have none of the single row.
WIDTH = 12


class Block(nn.Module):
    """A residual block with random numbers and a buffer that it writes to."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 24)
        self.second = nn.Linear(24, WIDTH)
        self.norm = nn.LayerNorm(24)
        self.activation = nn.LeakyReLU(0.1)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, *, scale):
        self.calls += 1
        return x + scale * self.drop(self.second(self.activation(self.norm(self.first(x)))))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.output = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.output(x)


def convolutions():
    layers = [
        nn.Unflatten(1, (3, 2, 2)),
        nn.Conv2d(3, 6, 2, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.2),
    ]
    layers += [nn.Conv2d(6, 4, 2), nn.ELU(), nn.Flatten(), nn.Linear(16, CLASSES)]
    return nn.Sequential(*layers)


def encoder():
    layers = [nn.TransformerEncoderLayer(4, 2, 8, 0.1, batch_first=True) for _ in range(2)]
    return nn.Sequential(
        nn.Unflatten(1, (3, 4)), nn.Sequential(*layers), nn.Flatten(), nn.Linear(WIDTH, CLASSES)
    )


NETS = {"residual": Residual, "convolutions": convolutions, "encoder": encoder}


def batch(rows, ignored=2):
    numbers = torch.Generator().manual_seed(rows)
    targets = torch.randint(CLASSES, (rows,), generator=numbers)
    targets[:ignored] = -100 if rows > ignored else targets[:ignored]
    return torch.randn(rows, WIDTH, generator=numbers), targets


def train(rank, world_size, name, saving, simulated=False):
    """Returns losses and gradients of all updates, then buffers. ``saving(net)`` changes the network, or returns a context."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    net = NETS[name]()
    with simulate(2) if simulated else contextlib.nullcontext():
        context = saving(net) or contextlib.nullcontext
        model, criterion = parallelize(
            net,
            nn.CrossEntropyLoss(),
            None if world_size > 1 else ["sim:0", "sim:1"] if simulated else ["cpu"] * 2,
        )
        optimizer = sgd(net)
        step = TrainStep(
            model, criterion, optimizer, micro_batch_size=None if name == "convolutions" else 3
        )
        found = []
        torch.manual_seed(5)
        for rows in ROWS:
            inputs, targets = batch(rows)
            mine = slice(rank, None, world_size)
            with context():
                loss = step(inputs[mine], targets[mine])
            found += [loss.cpu(), *gradients(net)]
        return [*found, *(buffer.cpu() for buffer in net.buffers()), torch.rand(3)]


def nothing(net):
    """No saving."""


def checkpoint_all_blocks(net):
    """A saving. Ranks import it from here, without what a test imports."""
    savings.checkpoint_activations(net)


def checkpoint_selectively(net):
    savings.checkpoint_activations(net, selective=True)


@functools.cache
def without_saving(ranks, name, simulated):
    """Returns what each rank finds without a saving. Most tests compare with the same."""
    return run(ranks, train, name, nothing, simulated)


def assert_unchanged(ranks, name, saving, simulated=False):
    """Trains with and without a saving, in one process with two replicas or on several ranks."""
    found = run(ranks, train, name, saving, simulated)
    expected = without_saving(ranks, name, simulated)
    for with_it, without in zip(found, expected, strict=True):
        assert_same_gradients(with_it, without)
