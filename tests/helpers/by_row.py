"""The plain program with random numbers that follow the rows: one forward of the whole batch on one device."""

import contextlib

import torch
from torch import nn

from balanced_parallel.runtime.row_random import BatchRandom, UpdateRandom, find_draws

CPU = torch.device("cpu")


@contextlib.contextmanager
def drawing_by_row(seed, rows, example, part="model"):
    """Runs the block on rows ``rows`` of an update. ``example(count)`` runs the same forward on a number of rows."""
    update = UpdateRandom(seed)
    try:
        with torch.no_grad():
            for count in (2, 3):
                with BatchRandom(update, 0, None).drawing(part, [0] * count, CPU):
                    example(count)
        draws = {part: find_draws(update.forwards)}
        with BatchRandom(update, 0, draws).drawing(part, rows, CPU):
            yield
    finally:
        update.end()


class Dropping(nn.Module):
    """A module behind dropout and noise, each with numbers of its own in each row."""

    def __init__(self, module):
        super().__init__()
        self.module, self.drop = module, nn.Dropout(0.4)

    def forward(self, inputs):
        return self.module(self.drop(inputs) + 0.1 * torch.randn_like(inputs) * torch.rand(()))
