"""The plain program with random numbers that follow the rows: one forward of the whole batch on one device."""

import contextlib

import torch
from torch import nn

CPU = torch.device("cpu")


@contextlib.contextmanager
def drawing_by_row(seed, rows, example):
    """Runs the block on rows ``rows`` of an update. ``example(count)`` runs the same forward on a number of rows."""
    # The tests of the core have none.
    from balanced_parallel.reproducible.row_random import Forward, UpdateRandom, find_draws

    update = UpdateRandom(seed)
    shapes = {}
    try:
        with torch.no_grad():
            for count in (2, 3):
                with Forward(update, [0] * count, CPU, None, shapes).drawing():
                    example(count)
        with Forward(update, rows, CPU, find_draws(*update.forwards), shapes).drawing():
            yield
    finally:
        update.end()


def has_kernels_of_torch():
    """Returns True if no kernel that draws is replaced."""
    names = ("aten::uniform_", "aten::scaled_dot_product_attention")
    return not any("row_random.py" in torch._C._dispatch_dump(name) for name in names)


class Dropping(nn.Module):
    """A module behind dropout and noise, each with numbers of its own in each row."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.drop = nn.Dropout(0.4)

    def forward(self, inputs):
        return self.module(self.drop(inputs) + 0.1 * torch.randn_like(inputs) * torch.rand(()))
