"""Results that take the memory of an argument: torch runs these operators in place, but not under a dispatch mode."""

import pytest
import torch
from helpers.allocations import used
from helpers.slow import slow_but
from torch import nn
from torch.nn import functional as F

from balanced_parallel import memory

ROWS, STEPS, WIDTH = 8, 50, 64
EVERY_SECOND = torch.arange(0, STEPS, 2)


class Applying(nn.Module):
    """A function of a layer's results, as large as the peak of the step."""

    def __init__(self, function, *layers):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.function, self.layers = nn.Linear(WIDTH, WIDTH), function, nn.ModuleList(layers)

    def forward(self, inputs):
        return self.function(self.first(inputs), *self.layers).flatten(1)[:, :10]


FUNCTIONS = {
    "a sum of gradients": lambda: Applying(lambda h: h[:, 1:] - h[:, :-1]),
    "a sum of gradients of one operator": lambda: Applying(lambda h: torch.stack([h[:, 1], h[:, 1]], -1)),
    "a tied weight": lambda: Applying(lambda h, tied: tied(tied(h.flatten(1)) @ tied.weight), nn.Linear(3200, 400)),
    "a sum within an operator": lambda: Applying(lambda h: sum(torch.var_mean(h, 1))),
    "maximum": lambda: Applying(lambda h: h.max(1)[0]),
    "largest": lambda: Applying(lambda h: h.topk(4, 1)[0]),
    "gather": lambda: Applying(lambda h: h.gather(1, EVERY_SECOND[None, :, None].expand(ROWS, -1, WIDTH))),
    "index": lambda: Applying(lambda h: h[:, EVERY_SECOND]),
    "index_select": lambda: Applying(lambda h: h.index_select(1, EVERY_SECOND)),
    "not contiguous": lambda: Applying(lambda h, project: project(h.transpose(1, 2)), nn.Linear(STEPS, 400)),
}


@pytest.mark.parametrize(
    "name", slow_but(FUNCTIONS, "a sum of gradients", "a tied weight", "a sum within an operator", "maximum", "index")
)
@pytest.mark.usefixtures("one_trace")
def test_results_in_the_memory_of_an_argument_equal_the_allocator(name):
    def batch():
        return torch.zeros(ROWS, STEPS, WIDTH), torch.zeros(ROWS, dtype=torch.int64)

    found = used(FUNCTIONS[name], batch, torch.optim.SGD, criterion=F.cross_entropy)
    report = memory.estimate(FUNCTIONS[name](), F.cross_entropy, *batch(), optimizer=torch.optim.SGD, device_kind="cpu")
    assert abs(report.allocated[0] - found) <= 0.001 * found
