"""State that a forward writes in each replica: equal in all of them, or an error."""

import pytest
import torch
from helpers.optimizers import sgd
from torch import nn
from torch.testing import assert_close

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, simulate


class Stateful(nn.Module):
    """Calls a function at the end of each forward, which writes state."""

    def __init__(self, write):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.shift = nn.Parameter(torch.zeros(3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(1))
        self.register_buffer("later", None)
        self.penalty = self.temperature = 0.0
        self.write = write

    def forward(self, x):
        output = self.layer(x) + self.shift - self.mean
        self.write(self, output)
        return output


def in_place(module, output):
    module.mean.lerp_(output.detach().mean(0), 0.1)


def replace(module, output):
    module.mean = module.mean + output.detach().mean(0)


def through_data(module, output):
    module.mean.data.add_(output.data.mean(0))


def fill(module, output):
    if module.later is None:
        module.later = output.detach().mean(0)


def later(module, output):
    """A warm-up: the first forward writes nothing."""
    module.temperature += 1
    if module.temperature > 1:
        in_place(module, output)


@torch.no_grad()
def initialise(module, output):
    module.shift.sub_(output.mean(0))


def train(write, devices, *, in_step, updates=4):
    net = Stateful(write)
    model, criterion = DataParallelModel(net, devices), DataParallelCriterion(nn.MSELoss())
    optimizer = sgd(net, lr=0.1)
    step = TrainStep(model, criterion, optimizer)
    for _ in range(updates):
        batch = torch.randn(7, 4), torch.randn(7, 3)
        if in_step:
            step(*batch)
            continue
        criterion(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("devices", [["cpu"] * 3, None])
@pytest.mark.parametrize("write", [in_place, replace, through_data, fill, later])
def test_a_buffer_of_the_rows_of_each_replica_is_refused(write, devices, in_step):
    """The first replica's was kept: 23 % off after five updates, silently."""
    with (
        simulate(3),
        pytest.raises(RuntimeError, match="to the tensor (mean|later) of the model in"),
    ):
        train(write, devices, in_step=in_step)


def test_a_parameter_of_the_rows_of_each_device_is_refused():
    """A data-dependent initialisation was that of the rows of the first device, silently."""
    with (
        simulate(3),
        pytest.raises(RuntimeError, match="to the tensor shift of the model in"),
    ):
        train(initialise, None, in_step=True)


def test_a_buffer_of_a_criterion_is_refused():
    class Centre(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.zeros(3))

        def forward(self, output, target):
            loss = (output - self.centre - target).square().mean()
            self.centre.lerp_(output.detach().mean(0), 0.1)
            return loss

    net = nn.Linear(4, 3)
    model, criterion = DataParallelModel(net, ["cpu"] * 3), DataParallelCriterion(Centre())
    with pytest.raises(RuntimeError, match="to the tensor centre of the model in"):
        criterion(model(torch.randn(7, 4)), torch.randn(7, 3))


def test_state_that_does_not_depend_on_the_rows_stays():
    """Counters, caches of another size in each replica, and losses in attributes."""

    def write(module, output):
        module.mean.add_(0.1)
        module.cache = torch.arange(len(output), device=output.device)
        module.penalty = output.abs().mean()
        with torch.no_grad():
            module.shift.mul_(0.5)

    with simulate(3):
        net = train(write, None, in_step=False)
        assert_close(net.mean.cpu(), torch.full((3,), 0.4))
        net.eval()
        net.write = in_place
        DataParallelModel(net)(torch.randn(7, 4))  # in evaluation each replica may have its own
