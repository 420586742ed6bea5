"""State that a forward advances whatever its rows: once per update, with any micro-batches."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.optimizers import sgd
from helpers.plain import Plain
from helpers.slow import pairs
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.testing import assert_close

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, simulate

pytestmark = pytest.mark.usefixtures("double")

ROWS = 7
UPDATES = 4


class Counting(nn.Module):
    """Counts its forwards in a buffer that is written, in one that is replaced, and in a number."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.forwards = 0
        self.temperature = 2.0
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.scale = self.scale * 1.1
            self.forwards += 1
            self.temperature = max(0.5, self.temperature * 0.9)
        return (
            self.layer(x)
            * self.scale[0]
            / self.temperature
            / (1 + 0.1 * self.steps + 0.05 * self.forwards)
        )


class Annealed(nn.Module):
    """A criterion whose weight grows with each call."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("weight", torch.ones(()))

    def forward(self, output, target):
        self.calls += 1
        self.weight += 0.1
        return F.mse_loss(output, target) * self.weight * (1 + 0.05 * self.calls)


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


class Cached(nn.Module):
    """Makes a cache in its first forward, sets a flag, and notes a number of rows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.rows = 0
        self.register_buffer("cache", None)
        self.register_buffer("is_ready", torch.tensor(False))

    def forward(self, x):
        if not self.is_ready:
            self.cache = torch.arange(3.0, dtype=x.dtype)
            self.is_ready.fill_(True)
        self.rows = len(x)
        return self.layer(x) + self.cache


NETS = {
    "counters": Counting,
    "spectral norm": lambda: nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3)
    ),
    "spectral norm by hooks": lambda: nn.Sequential(
        spectral_norm(nn.Linear(4, 6)), nn.Tanh(), spectral_norm(nn.Linear(6, 3))
    ),
    "caches and flags": Cached,
}
CRITERIA = {
    "mean": lambda: DataParallelCriterion(nn.MSELoss()),
    "annealed": lambda: DataParallelCriterion(Annealed()),
    "all rows": lambda: DataParallelCriterion(
        lambda output, target: (output @ target.t()).logsumexp(1).mean(), whole=True
    ),
}


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(UPDATES):
        yield [torch.randn(ROWS, width, generator=generator) for width in (4, 3)]


def train(net, criterion, devices, method, **settings):
    model = DataParallelModel(net, devices)
    step = TrainStep(model, criterion, sgd(net, lr=0.05, momentum=0.9), **settings)
    losses = []
    for inputs, targets in batches():
        if method == "step":
            losses.append(step(inputs, targets))
            continue
        for rows in (slice(0, 2), slice(2, 7)):
            step.add(inputs[rows], targets[rows])
        losses.append(step.apply())
    return [*map(float, losses)], {name: value.cpu() for name, value in net.state_dict().items()}


def trained_plainly(net, criterion):
    plain = Plain(net, criterion, lr=0.05, momentum=0.9)
    losses = [plain(*batch).item() for batch in batches()]
    return losses, plain.module.state_dict()


SETTINGS = [{}, {"micro_batch_size": 1}, {"reproducible": True, "micro_batch_size": 2}]


@pytest.mark.parametrize(
    ("kind", "criterion", "settings", "method"),
    pairs([*NETS], [*CRITERIA], SETTINGS, ["step", "add"]),
)
def test_state_advances_once_per_update(kind, criterion, settings, method):
    torch.manual_seed(0)
    net = NETS[kind]()
    plain = CRITERIA[criterion]()
    expected = trained_plainly(net, plain.module)
    for devices in (["cpu"], ["cpu"] * 3):
        moved = copy.deepcopy(net)
        result = train(moved, copy.deepcopy(plain), devices, method, **settings)
        assert_close(result, expected)
        assert getattr(moved, "forwards", UPDATES) == UPDATES


def test_state_advances_once_on_devices_with_copies():
    torch.manual_seed(0)
    net = Counting()
    criterion = CRITERIA["annealed"]()
    expected = trained_plainly(net, criterion.module)
    with simulate(3) as cluster:
        result = train(
            net.to(cluster.devices[0]), criterion, cluster.devices, "step", micro_batch_size=1
        )
    assert_close(result, expected)


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("method", ["step", "add"])
def test_a_buffer_that_depends_on_the_rows_is_refused(method, is_recorded):
    """Writes by ``.data`` were not seen: the buffer advanced with each micro-batch, silently."""
    with pytest.raises(
        RuntimeError,
        match="the buffer mean has other values after the forward of another micro-batch",
    ):
        train(RunningMean(is_recorded), CRITERIA["mean"](), ["cpu"], method, micro_batch_size=2)


def test_statistics_of_batch_norm_are_those_of_each_micro_batch():
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    train(net, CRITERIA["mean"](), ["cpu"], "step", micro_batch_size=4)
    assert net[1].num_batches_tracked == 2 * UPDATES
