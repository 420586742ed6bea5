"""Optimizers that read their step counts, in a trace."""

import pytest
import torch
from helpers.allocations import used
from torch import nn
from torch.nn import functional as F

from balanced_parallel import memory


@pytest.mark.parametrize("name", ["NAdam", "RAdam", "Adafactor", "Adagrad", "Adadelta", "Adamax", "RMSprop"])
def test_optimizers_that_read_step_counts_equal_the_allocator(name):
    def build():
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    kind = getattr(torch.optim, name)
    found = used(build, lambda: (torch.zeros(32, 64), torch.zeros(32).long()), kind)
    report = memory.estimate(
        build(), F.cross_entropy, torch.zeros(32, 64), torch.zeros(32).long(), optimizer=kind, device_kind="cpu"
    )
    assert abs(report.peak[0] - found) <= 0.001 * found
