"""Batches and comparisons of training loops that differ in their devices."""

import torch
from helpers.problems import CLASSES, assert_equal
from torch import nn

ROWS = 7
SIMULATED = ["sim:0", "sim:1", "sim:2"]


def random_batches(steps, rows=ROWS):
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        yield (
            torch.randn(rows, 4, generator=generator),
            torch.randn(rows, CLASSES, generator=generator),
        )


def values_of(*modules):
    return [
        parameter.detach().cpu().clone() for module in modules for parameter in module.parameters()
    ]


def assert_same_on_devices(trained):
    """Compares what ``trained(devices)`` returns for one device and for three simulated ones."""
    from balanced_parallel import simulate  # The tests of the engine alone have none.

    expected = trained(["cpu"])
    with simulate(3):
        assert_equal(trained(SIMULATED), expected)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, x, y):
        return (x @ self.weight - y).square().mean()
