"""Losses that change between add and apply, or get outputs without rows: exact, or an error."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.steps import make_step
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    Whole,
    simulate,
)

pytestmark = pytest.mark.usefixtures("double")


def alternate(number, output, target):
    return F.mse_loss(output, target) if number % 2 else F.l1_loss(output, target).sqrt()


def test_rows_that_were_added_before_a_loss_changes_are_dropped_with_an_error():
    net = nn.Linear(4, 5)
    number = 0
    step = make_step(net, lambda *given: alternate(number, *given))
    inputs = torch.randn(6, 4)
    target = torch.rand(6, 5)
    number = 1
    step(inputs, target)
    step.add(inputs, target)
    number = 2
    with pytest.raises(ValueError, match="make another TrainStep where the loss changes"):
        step(inputs, target)
    expected = alternate(number, net(inputs), target)
    assert_close(step(inputs, target), expected.detach())


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs):
        self.calls += 1
        return self.layer(inputs)


@pytest.mark.parametrize("rows", [None, 2])
def test_a_loss_that_changes_advances_buffers_once(rows):
    """The sums of an update of a single forward are there, and those of several forwards run again."""
    net = Counting()
    number = 1
    criterion = lambda *given: {"loss": alternate(number, *given), "mean": given[0].mean()}  # noqa: E731
    step = make_step(net, criterion, micro_batch_size=rows)
    inputs = torch.randn(8, 4)
    target = torch.rand(8, 5)
    for number in (1, 2, 3, 4):
        expected = alternate(number, net.layer(inputs), target)
        mean = net.layer(inputs).mean()
        gradients = torch.autograd.grad(expected, [*net.layer.parameters()])
        assert_close(step(inputs, target), expected.detach())
        assert_close([each.grad for each in net.layer.parameters()], [*gradients])
        assert step.metrics()["mean"] == pytest.approx(mean.item())
        assert net.calls == number


class Warming(nn.Module):
    """A criterion whose second term begins in the fourth call, with a factor that grows."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("factor", torch.zeros(()))

    def forward(self, output, target):
        self.calls += 1
        self.factor += 0.1
        loss = F.mse_loss(output, target)
        if self.calls < 4:
            return loss
        return loss + self.calls * self.factor.clone() * F.l1_loss(output, target).sqrt()


@pytest.mark.parametrize(("devices", "rows"), [(1, None), (3, None), (2, 2), (2, 4)])
def test_a_criterion_that_counts_its_calls_counts_updates(devices, rows):
    """A change of the loss was computed twice, and compared with the loss of the next update."""
    net = nn.Linear(4, 5)
    criterion = Warming()
    step = make_step(net, criterion, devices=devices, micro_batch_size=rows)
    plain = Warming()
    for number, size in enumerate([7, 8, 5, 8, 6, 8, 7, 3, 8], start=1):
        inputs = torch.randn(size, 4)
        target = torch.rand(size, 5)
        expected = plain(net(inputs), target).detach()
        assert_close(step(inputs, target), expected)
        assert criterion.calls == number
        assert_close(criterion.factor, plain.factor)


def test_rows_can_be_added_after_a_loss_has_changed():
    net = nn.Linear(4, 5)
    number = 1
    step = make_step(net, lambda *given: alternate(number, *given))
    inputs = torch.randn(8, 4)
    target = torch.rand(8, 5)
    step(inputs, target)
    number = 2
    expected = alternate(number, net(inputs), target)
    step.add(inputs[:4], target[:4])
    step.add(inputs[4:], target[4:])
    assert_close(step.apply(), expected.detach())


class WithPrototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 5)
        self.prototypes = nn.Parameter(torch.zeros(3, 5))

    def forward(self, inputs):
        return self.head(inputs), self.prototypes


def with_penalty(output, prototypes, target):
    return F.mse_loss(output, target) + 0.1 * (prototypes - 0.5).square().sum()


@pytest.mark.parametrize(("devices", "rows"), [(1, 1), (3, 1), (1, 3), (2, 3), (1, 2)])
def test_a_parameter_as_an_output_is_an_error(devices, rows):
    """It had no gradient in the second pass, which took it for a constant of the formula."""
    net = WithPrototypes()
    step = make_step(net, with_penalty, devices=devices, micro_batch_size=rows)
    with pytest.raises(ValueError, match="is a parameter of the model|does not add up"):
        step(torch.randn(6, 4), torch.rand(6, 5))


def anchors(output, target):
    return F.binary_cross_entropy_with_logits(output, target, reduction="none").sum() / target.sum()


def test_a_weight_of_zero_with_a_sum_is_an_error():
    criterion = DataParallelCriterion(anchors, weight=lambda output, target: target.sum())
    model = DataParallelModel(nn.Linear(4, 5), ["cpu"] * 2)
    target = torch.zeros(4, 5)
    target[3, 0] = 1
    with pytest.raises(ValueError, match="is infinite, and its weight= is 0.*leave weight= out"):
        criterion(model(torch.randn(4, 4)), target)


@pytest.mark.parametrize("wrap", [lambda scale: scale, Whole])
def test_a_scalar_target_is_named(wrap):
    def mixup(output, target, scale):
        return scale * F.mse_loss(output, target)

    criterion = DataParallelCriterion(mixup)
    outputs = DataParallelModel(nn.Linear(4, 5), ["cpu"] * 2)(torch.randn(4, 4))
    with pytest.raises(ValueError, match=r"pass a number, as float\(scale\)"):
        criterion(outputs, torch.rand(4, 5), wrap(torch.tensor(0.3)))


class Uncertainties(nn.Module):
    def __init__(self):
        super().__init__()
        self.logs = nn.Parameter(torch.zeros(2))

    def forward(self, output, target):
        errors = torch.stack([F.mse_loss(output, target), output.square().mean()])
        return (errors * (-self.logs).exp() + self.logs).sum()


def test_the_state_of_a_criterion_is_resumed_on_devices():
    """The criterion was moved to its device after the state of its optimizer was loaded."""

    def begin():
        torch.manual_seed(0)
        net = nn.Linear(4, 5)
        criterion = DataParallelCriterion(Uncertainties())
        optimizer = torch.optim.AdamW([*net.parameters(), *criterion.parameters()], lr=0.1)
        return make_step(net, criterion, optimizer, devices=None)

    inputs = torch.randn(6, 4)
    target = torch.rand(6, 5)
    with simulate(2):
        step = begin()
        step(inputs, target)
        state = copy.deepcopy(step.state_dict())
        expected = step(inputs, target)
        step = begin()
        step.load_state_dict(state)
        assert_close(step(inputs, target), expected)


def test_a_state_is_not_loaded_between_add_and_apply():
    """Rows of the parameters before were part of the first update behind it."""
    step = make_step(nn.Linear(4, 5), nn.MSELoss())
    inputs = torch.randn(6, 4)
    target = torch.rand(6, 5)
    step(inputs, target)
    state = step.state_dict()
    step.add(inputs, target)
    with pytest.raises(RuntimeError, match=r"expected apply\(\) before load_state_dict\(\)"):
        step.load_state_dict(state)
    step.apply()
    step.load_state_dict(state)
