"""State that a forward advances whatever its rows.

``regressions/test_exact_problems.py`` has counters, caches and power iterations.
"""

import pytest
import torch
from helpers.plain import Plain
from helpers.steps import make_step
from torch import nn
from torch.testing import assert_close

from balanced_parallel import simulate

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


class Momentum(nn.Module):
    """A layer that another one follows in each forward, as in MoCo."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)
        self.way = way

    def forward(self, x):
        WAYS[self.way](self.key.weight, self.query.weight.detach())
        return self.query(x) - self.key(x + 1)


def assign(key, query):
    key.data = 0.9 * key.data + 0.1 * query


WAYS = {
    "recorded": lambda key, query: key.detach().lerp_(query, 0.1),
    "data": lambda key, query: key.data.lerp_(query, 0.1),
    "other memory": assign,
}


@pytest.mark.parametrize(("devices", "limit"), [(1, 2), (["sim:0", "sim:1"], 1)])
@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_a_forward_writes_advances_once(way, devices, limit):
    """It advanced once in each micro-batch, silently."""
    plain = Plain(Momentum(way).double(), nn.MSELoss())
    with simulate(2):
        net = Momentum(way).double()
        step = make_step(net, nn.MSELoss(), devices=devices, micro_batch_size=limit)
        for _ in range(3):
            rows = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
            assert_close(step(*rows).cpu(), plain(*rows))
        for parameter, expected in zip(net.parameters(), plain.parameters, strict=True):
            assert_close(parameter.cpu(), expected)


class ActNorm(nn.Module):
    """Makes its scale of the first rows that it sees."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.is_made = False

    def forward(self, x):
        if not self.is_made:
            self.scale.data.copy_(1 / x.std(0))
            self.is_made = True
        return x * self.scale


def test_a_parameter_that_depends_on_the_rows_is_refused():
    """It was that of the first micro-batch, silently."""
    step = make_step(
        nn.Sequential(ActNorm(), nn.Linear(4, 3)), nn.MSELoss(), devices=1, micro_batch_size=4
    )
    with pytest.raises(RuntimeError, match=r"the parameter 0\.scale has other values after"):
        step(*ROWS)


def test_rows_that_are_rescaled_twice_are_those_of_the_plain_program():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.words, self.head = nn.Embedding(9, 4, max_norm=0.5), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.words(x))

    plain, net = Plain(Net().double(), nn.MSELoss()), Net().double()
    step = make_step(net, nn.MSELoss(), devices=1, micro_batch_size=2)
    for _ in range(2):
        rows = torch.randint(9, (7,)), torch.randn(7, 3, dtype=torch.float64)
        assert_close(step(*rows), plain(*rows))
    assert_close(net.words.weight, plain.parameters[0])


class Metric(nn.Module):
    """Adds up its rows in a tensor of its own, which is no buffer, as metrics of libraries do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 5)
        self.total = torch.zeros(())

    def forward(self, inputs):
        self.total = self.total + inputs.detach().sum()
        return self.layer(inputs)


def test_a_metric_of_a_model_has_the_rows_of_all_micro_batches():
    net = Metric()
    step = make_step(net, nn.MSELoss(), devices=1, micro_batch_size=2)
    batches = [(torch.randn(7, 4), torch.randn(7, 5)) for _ in range(2)]
    for batch in batches:
        step(*batch)
    assert_close(net.total, sum(inputs.sum() for inputs, _ in batches))
