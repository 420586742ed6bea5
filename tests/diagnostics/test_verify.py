"""``verify``: equality with the plain program, errors, and the text of a report."""

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from helpers.loops import Calls
from helpers.problems import build_net, class_targets
from helpers.verification import CPUS, check, contrastive_loss
from torch import nn

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    convert_sync_batchnorm,
    simulate,
    verify,
)
from balanced_parallel.diagnostics.verify import VerificationReport

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_an_exact_program_is_reported_as_equal(micro_batch_size):
    net = build_net()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    inputs = torch.randn(7, 4)
    targets = class_targets(7, 2)
    before = torch.get_rng_state()
    report = verify(
        net,
        nn.CrossEntropyLoss(),
        inputs,
        targets,
        device_ids=CPUS,
        micro_batch_size=micro_batch_size,
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert (report.equal, report.step) == (True, 2)
    assert set(report.gradient_errors) == {name for name, _ in net.named_parameters()}
    assert max(report.loss_error, *report.gradient_errors.values()) <= 1e-10
    assert (report.first_difference, report.reasons) == (None, ())
    assert report.micro_batches == (3 if micro_batch_size else 1)
    assert "equal within 1e-10: replicas on cpu, cpu, cpu; micro-batches: " in str(report)
    assert all(torch.equal(state[name], tensor) for name, tensor in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_the_default_tolerance_follows_the_dtype():
    torch.set_default_dtype(torch.float32)
    report = check(build_net())
    assert report.tolerance == 1e-4
    assert report.equal
    assert check(build_net(), tolerance=0.0).tolerance == 0.0


def test_a_gradient_that_is_zero_but_for_rounding_is_equal():
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
    ]
    net = convert_sync_batchnorm(
        nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 14 * 14, 10))
    )
    batch = torch.randn(37, 3, 32, 32), torch.randint(10, (37,))
    report = verify(net, nn.CrossEntropyLoss(), *batch, device_ids=CPUS)
    assert report.equal, report  # the errors of 0.bias and 3.bias were 1e-3


def test_the_table_has_the_ten_largest_errors():
    report = check(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)), nn.Linear(4, 5)),
        DataParallelCriterion(contrastive_loss, weight="rows"),
    )
    lines = str(report).splitlines()
    assert sum("<-" in line for line in lines) == 1 + 10  # the loss, and ten gradients
    assert "... and 10 more" in lines
    assert len(report.gradient_errors) == 20


EQUAL = VerificationReport(("cpu",), 2, 1e-10, 1.5, 1.5, 0.0, {"weight": 1e-16}, None, ())


def test_the_table_of_a_report():
    assert "equal within 1e-10: replicas on cpu; micro-batches: 2\n" in str(EQUAL)
    different = dataclasses.replace(EQUAL, loss_error=0.1)
    following = "no known reason: compare in float64, then see docs/troubleshooting.md"
    assert following in str(different)
    assert following not in str(EQUAL)
    assert following not in str(dataclasses.replace(different, reasons=("dropout: 1",)))
    report = dataclasses.replace(EQUAL, state_errors={"norm.rows": 0.6})
    assert not report.equal
    lines = str(report).splitlines()
    assert lines[0].startswith("DIFFERENT")
    assert ["state", "norm.rows", "6.0e-01", "<-"] in [line.split() for line in lines]


def draw(net, x):
    """Draws for each row, for its elements, and for weights."""
    hidden = F.dropout(net[0](x), 0.3) + 0.1 * torch.randn_like(x[:, :1])
    return F.linear(hidden, F.dropout(net[2].weight, 0.5), net[2].bias)


def noisy_loss(output, target):
    return F.cross_entropy(output + torch.randn_like(output), target)


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_random_numbers_by_row_are_compared_with_those_of_one_device(micro_batch_size):
    program = (
        Calls(draw),
        DataParallelCriterion(noisy_loss, weight="rows"),
        torch.randn(11, 4),
        class_targets(11),
    )
    settings = {"device_ids": CPUS, "micro_batch_size": micro_batch_size}
    before = torch.get_rng_state()
    report = verify(*program, **settings, reproducible=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert report.equal, report
    assert max(report.gradient_errors.values()) < 1e-12
    assert report.micro_batches == (1 if micro_batch_size is None else 2)
    assert not verify(*program, **settings).equal


def test_a_coupled_loss_with_dropout_is_equal_by_row():
    net = nn.Sequential(build_net(), nn.Dropout())
    assert check(
        net,
        DataParallelCriterion(contrastive_loss, whole=True),
        micro_batch_size=2,
        reproducible=True,
    ).equal


def test_a_single_device_is_split_unless_it_is_given():
    """The report said equal of any weight=, since one replica was compared with itself."""
    x = torch.randn(7, 4)
    target = class_targets(7, 4)

    def loss(output, target):
        return F.cross_entropy(output, target)

    criterion = DataParallelCriterion(loss, weight="rows")
    for model in (build_net(), DataParallelModel(build_net(), ["cpu"], split=[1])):
        report = verify(model, criterion, x, target)
        assert not report.equal
        assert report.devices == ("cpu", "cpu", "cpu")
    with simulate(2):
        assert verify(build_net(), criterion, x, target).devices == ("sim:0", "sim:1")
    settings = {"device_ids": ["cpu"]}
    assert verify(build_net(), criterion, x, target, **settings).equal
    assert not verify(build_net(), criterion, x, target, micro_batch_size=2, **settings).equal


def test_a_batch_that_is_not_split_is_a_warning():
    text = "nothing was split: one forward had all rows, expected several rows and devices, or micro_batch_size="
    assert check(build_net(), device_ids=["cpu"]).warnings == (text,)
    report = verify(build_net(), nn.CrossEntropyLoss(), torch.randn(1, 4), class_targets(1))
    assert report.warnings == (text,)
    assert f"warning: {text}" in str(report)
    assert check(build_net(), device_ids=["cpu"], micro_batch_size=3).warnings == ()
    assert check(build_net(), device_ids=None).warnings == ()


class AddsToGradient(torch.autograd.Function):
    """Gives an auxiliary loss the gradient one, as libraries of mixtures of experts do."""

    @staticmethod
    def forward(ctx, output, loss):
        return output.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.new_ones(())


def route(net, x, injects):
    features = net[0](x)
    output = net[1:](features)
    return AddsToGradient.apply(output, features.pow(2).mean()) if injects else (output, features)


def with_auxiliary_loss(output, features, target):
    return F.cross_entropy(output, target) + features.pow(2).mean()


class Balanced(nn.Module):
    """A mixture of experts, whose loss is injected in the backward."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.expert = nn.Linear(4, 4)

    def forward(self, x):
        shares = self.gate(x).softmax(-1)
        return AddsToGradient.apply(self.expert(x) * shares[:, :1], shares.mean(0).pow(2).sum())


def nested():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(Balanced()), nn.Linear(4, 5))


@pytest.mark.parametrize("make", [nested, lambda: Calls(functools.partial(route, injects=True))])
def test_the_function_that_changes_gradients_in_the_backward_is_named(make):
    report = check(make())
    assert report.loss_error <= 1e-10
    assert report.reasons == (
        "loss and outputs equal, gradients not: a hook or an autograd function changes gradients, as AddsToGradient "
        "(docs/limits.md)",
    )


def test_a_loss_of_features_is_equal():
    assert check(Calls(functools.partial(route, injects=False)), with_auxiliary_loss).equal
