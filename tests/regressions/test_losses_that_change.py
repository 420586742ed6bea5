"""Losses that change from update to update, are computed in checkpoints, or get outputs without rows: exact, or an error."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    Whole,
    parallelize,
    simulate,
)

pytestmark = pytest.mark.usefixtures("double")
LAYOUTS = [(1, 2), (3, None), (2, 2)]


def warm_up(number, output, target):
    loss = F.mse_loss(output, target)
    if number < 2:
        return loss
    mask = (target > 0.4).double()
    return loss + ((output - target).abs() * mask).sum() / mask.sum()


def alternate(number, output, target):
    return F.mse_loss(output, target) if number % 2 else F.l1_loss(output, target).sqrt()


def make_step(net, criterion, devices, rows):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = DataParallelModel(net, ["cpu"] * devices)
    return TrainStep(model, DataParallelCriterion(criterion), optimizer, micro_batch_size=rows)


@pytest.mark.parametrize(("devices", "rows"), LAYOUTS)
@pytest.mark.parametrize("loss", [warm_up, alternate])
def test_a_loss_that_was_one_mean_may_be_another_function_later(loss, devices, rows):
    torch.manual_seed(0)
    net, number = nn.Linear(4, 5), 0
    plain = copy.deepcopy(net)
    step = make_step(net, lambda *given: loss(number, *given), devices, rows)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(4):
        inputs, target = torch.randn(7, 4), torch.rand(7, 5)
        value = step(inputs, target)
        optimizer.zero_grad()
        expected = loss(number, plain(inputs), target)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close([*net.parameters()], [*plain.parameters()])


def test_rows_that_were_added_before_a_loss_changes_are_dropped_with_an_error():
    net, number = nn.Linear(4, 5), 0
    step = make_step(net, lambda *given: alternate(number, *given), 2, None)
    inputs, target = torch.randn(6, 4), torch.rand(6, 5)
    number = 1
    step(inputs, target)
    step.add(inputs, target)
    number = 2
    with pytest.raises(ValueError, match="make another TrainStep where the loss changes"):
        step(inputs, target)
    before = copy.deepcopy(net)
    expected = alternate(number, before(inputs), target)
    torch.testing.assert_close(step(inputs, target), expected.detach())


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 5), nn.BatchNorm1d(5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs):
        self.calls += 1
        return self.layer(inputs)


@pytest.mark.parametrize("rows", [None, 2])
def test_a_loss_that_changes_advances_buffers_once(rows):
    """The sums of an update of a single forward are there, and those of several forwards run again."""
    torch.manual_seed(0)
    net, number = Counting(), 1
    criterion = lambda *given: {"loss": alternate(number, *given), "mean": given[0].mean()}  # noqa: E731
    step = make_step(net, criterion, 2, rows)
    inputs, target = torch.randn(8, 4), torch.rand(8, 5)
    for number in (1, 2, 3, 4):
        expected = alternate(number, net.layer(inputs), target)
        mean = net.layer(inputs).mean()
        gradients = torch.autograd.grad(expected, [*net.layer.parameters()])
        torch.testing.assert_close(step(inputs, target), expected.detach())
        torch.testing.assert_close([each.grad for each in net.layer.parameters()], [*gradients])
        assert step.metrics()["mean"] == pytest.approx(mean.item())
        assert net.calls == number


def test_rows_can_be_added_after_a_loss_has_changed():
    net, number = nn.Linear(4, 5), 1
    step = make_step(net, lambda *given: alternate(number, *given), 2, None)
    inputs, target = torch.randn(8, 4), torch.rand(8, 5)
    step(inputs, target)
    number = 2
    with pytest.raises(ValueError, match="make another TrainStep where the loss changes"):
        step.add(inputs[:4], target[:4])
    expected = alternate(number, net(inputs), target)
    step.add(inputs[:4], target[:4])
    step.add(inputs[4:], target[4:])
    torch.testing.assert_close(step.apply(), expected.detach())


def mean_in_checkpoint(output, target):
    return checkpoint(F.mse_loss, output, target, use_reentrant=False)


def root_in_checkpoint(output, target):
    part = checkpoint(lambda *given: F.l1_loss(*given).sqrt(), output, target, use_reentrant=False)
    return part + output.square().mean()


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 5)

    def part(self, hidden, labels):
        return F.cross_entropy(hidden.tanh(), labels, ignore_index=0)

    def forward(self, inputs, labels):
        return {"loss": checkpoint(self.part, self.body(inputs), labels, use_reentrant=False)}


def assert_exact(net, criterion, inputs, targets, devices, rows):
    output = net(*inputs)
    expected = criterion(*(output if isinstance(output, tuple) else (output,)), *targets)
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in net.parameters()]
    for is_step in (False, True):
        net.zero_grad()
        step = make_step(net, criterion, devices, rows)
        for group in step.optimizer.param_groups:
            group["lr"] = 0.0
        for _ in range(2 if is_step else 0):
            torch.testing.assert_close(step(inputs, targets), expected.detach())
        if not is_step:
            loss = step.criterion(step.model(*inputs), *targets)
            loss.backward()
            torch.testing.assert_close(loss, expected)
        torch.testing.assert_close([each.grad for each in net.parameters()], gradients)


@pytest.mark.parametrize(("devices", "rows"), LAYOUTS)
def test_a_loss_in_a_checkpoint(devices, rows):
    """The mean is replaced by its sum and its count in the forward, and not in the recomputation."""
    torch.manual_seed(0)
    inputs, target = torch.randn(7, 4), torch.rand(7, 5)
    for criterion in (mean_in_checkpoint, root_in_checkpoint):
        assert_exact(nn.Linear(4, 5), criterion, (inputs,), (target,), devices, rows)
    labels = torch.randint(5, (7,))
    assert_exact(WithLoss(), lambda output: output["loss"], (inputs, labels), (), devices, rows)


class WithPrototypes(nn.Module):
    def __init__(self, *, is_parameter):
        super().__init__()
        self.head, self.prototypes = nn.Linear(4, 5), nn.Parameter(torch.randn(3, 5))
        self.is_parameter = is_parameter

    def forward(self, inputs):
        prototypes = self.prototypes if self.is_parameter else F.normalize(self.prototypes, dim=1)
        return self.head(inputs), prototypes


def with_penalty(output, prototypes, target):
    return F.mse_loss(output, target) + 0.1 * (prototypes - 0.5).square().sum()


@pytest.mark.parametrize("is_parameter", [False, True])
@pytest.mark.parametrize(("devices", "rows"), [(1, 1), (3, 1), (1, 3), (2, 3), (1, 2)])
def test_an_output_without_rows_is_not_added_once_for_each_shard(is_parameter, devices, rows):
    """Rows of as many prototypes look like rows of the batch."""
    torch.manual_seed(0)
    step = make_step(WithPrototypes(is_parameter=is_parameter), with_penalty, devices, rows)
    with pytest.raises(ValueError, match="does not add up"):
        step(torch.randn(12, 4), torch.rand(12, 5))


def test_scales_of_one_have_no_rows_either():
    net = WithPrototypes(is_parameter=False)
    nn.init.ones_(net.prototypes)
    step = make_step(net, with_penalty, 3, 1)
    with pytest.raises(ValueError, match="does not add up"):
        step(torch.randn(12, 4), torch.rand(12, 5))


def test_a_parameter_as_an_output_is_an_error():
    """It had no gradient in the second pass, which took it for a constant of the formula."""
    net = WithPrototypes(is_parameter=True)
    nn.init.zeros_(net.prototypes)
    step = make_step(net, with_penalty, 3, 1)
    with pytest.raises(ValueError, match="is a parameter of the model|does not add up"):
        step(torch.randn(6, 4), torch.rand(6, 5))


def test_outputs_with_equal_rows_are_right():
    """A layer that begins with zeros has the same value for all rows, as a mask of ones has."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 5), nn.Linear(4, 5)
            nn.init.zeros_(self.second.weight)
            nn.init.constant_(self.second.bias, 0.5)

        def forward(self, inputs):
            return self.first(inputs), self.second(inputs), torch.ones(len(inputs))

    def criterion(first, second, mask, target):
        errors = (first - target).square().mean(1) + (second - target).square().mean(1)
        return (errors * mask).sum() / mask.sum() + 0.1 * mask.sum() / mask.sum()

    torch.manual_seed(0)
    inputs, target = torch.randn(6, 4), torch.rand(6, 5)
    assert_exact(Heads(), criterion, (inputs,), (target,), 3, 1)


class Gaussian(nn.Module):
    """A mean for each row, and a learned deviation that is expanded to all rows, as policies have."""

    def __init__(self):
        super().__init__()
        self.mean, self.log_std = (
            nn.Linear(4, 5),
            nn.Parameter(torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])),
        )

    def forward(self, inputs):
        balance = self.mean.weight.square().mean()
        return self.mean(inputs), self.log_std.expand(len(inputs), 5), balance.expand(len(inputs))


def negative_log_likelihood(mean, log_std, balance, target):
    errors = ((mean - target) / log_std.exp()).square() / 2 + log_std
    return errors.sum(1).mean() + log_std.sum(1).mean() + 0.1 * balance.mean()


@pytest.mark.parametrize(("devices", "rows"), [(3, 1), (3, None), (2, 2), (1, 2)])
def test_a_value_that_is_expanded_to_all_rows_has_rows(devices, rows):
    torch.manual_seed(0)
    inputs, target = torch.randn(6, 4), torch.rand(6, 5)
    assert_exact(Gaussian(), negative_log_likelihood, (inputs,), (target,), devices, rows)


def anchors(output, target):
    return F.binary_cross_entropy_with_logits(output, target, reduction="none").sum() / target.sum()


def anchors_with_penalty(output, target):
    return F.binary_cross_entropy_with_logits(output, target, reduction="sum") / target.sum() + 0.5


@pytest.mark.parametrize("loss", [anchors, anchors_with_penalty])
@pytest.mark.parametrize(("devices", "rows"), [(2, None), (1, 2), (4, None)])
def test_a_shard_without_positives_has_its_sum(loss, devices, rows):
    """The sum of all anchors over the number of positives, as of detectors."""
    torch.manual_seed(0)
    net = nn.Linear(4, 5)
    plain = copy.deepcopy(net)
    step = make_step(net, loss, devices, rows)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(3):
        inputs, target = torch.randn(4, 4), torch.zeros(4, 5)
        target[3, number] = target[2, 1] = 1
        value = step(inputs, target)
        optimizer.zero_grad()
        expected = loss(plain(inputs), target)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close([*net.parameters()], [*plain.parameters()])


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
        model, criterion = (
            DataParallelModel(nn.Linear(4, 5)),
            DataParallelCriterion(Uncertainties()),
        )
        optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()], lr=0.1)
        return TrainStep(model, criterion, optimizer)

    inputs, target = torch.randn(6, 4), torch.rand(6, 5)
    with simulate(2):
        step = begin()
        step(inputs, target)
        state = copy.deepcopy(step.state_dict())
        expected = step(inputs, target)
        step = begin()
        step.load_state_dict(state)
        torch.testing.assert_close(step(inputs, target), expected)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@on_ranks(2)
def test_a_loop_with_no_sync_runs_in_all_strategies(rank, strategy):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 5)).double()
    inputs, target = torch.randn(8, 4).double(), torch.rand(8, 5).double()
    expected = torch.autograd.grad(F.mse_loss(net(inputs), target), [*net.parameters()])
    model, criterion = parallelize(net, nn.MSELoss(), strategy=strategy)
    first, second = slice(4 * rank, 4 * rank + 2), slice(4 * rank + 2, 4 * rank + 4)
    with model.no_sync():
        (criterion(model(inputs[first]), target[first]) / 2).backward()
    (criterion(model(inputs[second]), target[second]) / 2).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    if strategy == "fsdp":
        gradients = [gradient.full_tensor() for gradient in gradients]
    torch.testing.assert_close(gradients, [*expected])


def test_a_state_is_not_loaded_between_add_and_apply():
    """Rows of the parameters before were part of the first update behind it."""
    step = make_step(nn.Linear(4, 5), nn.MSELoss(), 2, None)
    inputs, target = torch.randn(6, 4), torch.rand(6, 5)
    step(inputs, target)
    state = step.state_dict()
    step.add(inputs, target)
    with pytest.raises(RuntimeError, match=r"expected apply\(\) before load_state_dict\(\)"):
        step.load_state_dict(state)
    step.apply()
    step.load_state_dict(state)
