"""State that a forward advances whatever its rows.

``regressions/test_exact_problems.py`` has counters, caches and power iterations.
"""

import pytest
import torch
from helpers.steps import make_step
from torch import nn

ROWS = torch.linspace(-1, 1, 49).view(7, 7).split([4, 3], 1)


class RunningMean(nn.Module):
    """A part with a buffer that depends on the rows."""

    def __init__(self, is_recorded=True):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.is_recorded = is_recorded

    def forward(self, x):
        mean = self.mean if self.is_recorded else self.mean.data
        mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.layer(x - self.mean)


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize(
    "update", [lambda step: step(*ROWS), lambda step: (step.add(*ROWS), step.apply())]
)
def test_a_buffer_that_depends_on_the_rows_is_refused(update, is_recorded):
    """Writes by ``.data`` were not seen: the buffer advanced with each micro-batch, silently."""
    step = make_step(RunningMean(is_recorded), nn.MSELoss(), devices=1, micro_batch_size=2)
    with pytest.raises(RuntimeError, match="the buffer mean has other values after the forward of"):
        update(step)
