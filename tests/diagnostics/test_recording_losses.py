"""Losses that are sums, means over something other than rows, or whose rows depend on each other.

Relative errors, and the first module whose output differs.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from helpers.loops import Calls
from helpers.problems import build_net, class_targets
from helpers.verification import CPUS, check, contrastive_loss, flat_loss, time_major
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, verify
from balanced_parallel.diagnostics.recording import relative_error

pytestmark = pytest.mark.usefixtures("double")

REASON = (
    "the loss differs, and outputs do not: its rows depend on each other, or weight= or "
    "reduction= is not that of the loss: give DataParallelCriterion neither for a loss of torch, reduction='sum' for a sum, "
    "weight='rows' for a mean over rows, weight=, a function (output, *targets) -> scalar that returns the divisor, for another "
    "mean, and whole=True or AdditiveLoss(statistics, finish) for any other loss"
)


def reasons_of(criterion, rows=9, targets=None, weight=None, **settings):
    targets = class_targets(rows) if targets is None else targets
    if weight is not None:
        criterion = DataParallelCriterion(criterion, weight=weight)
    return verify(
        build_net(), criterion, torch.randn(rows, 4), targets, device_ids=CPUS, **settings
    ).reasons


@pytest.mark.parametrize("rows", [2, 3, 9])
@pytest.mark.parametrize(
    "criterion", [contrastive_loss, lambda output, target: contrastive_loss(output, target)]
)
def test_a_loss_that_couples_rows_is_reported_as_a_reason(criterion, rows):
    """Without ``weight=`` it is refused, as a step does."""
    assert reasons_of(criterion, rows, weight="rows") == (REASON,)
    with pytest.raises((TypeError, ValueError), match=r"depend on each other.*whole=True"):
        reasons_of(criterion, rows)


# Losses that are sums, or means over something other than rows


def plain_mean(output, target):
    return F.cross_entropy(output, target)


def sum_plus_mean(output, target):
    return F.cross_entropy(output, target) + output.pow(2).sum()


def variational_loss(output, target):
    cross = F.binary_cross_entropy_with_logits(output, target, reduction="sum")
    return cross + 0.5 * torch.sum(output.pow(2))


def mean_of_few(output, target):
    counted = target > 1
    return (
        F.cross_entropy(output[counted], target[counted], reduction="sum")
        * counted.sum().clamp(min=1).reciprocal()
    )


def count_of_few(output, target):
    return (target > 1).sum()


def wrong_count(output, target):
    return (target + 1).sum()


@pytest.mark.parametrize(
    ("criterion", "wrong", "right"),
    [
        (variational_loss, [{"weight": "rows"}], {}),
        (mean_of_few, [{"weight": "rows"}], {}),
        (mean_of_few, [], {"weight": count_of_few}),
        (plain_mean, [{"weight": wrong_count}], {"weight": "rows"}),
        (sum_plus_mean, [{"weight": "rows"}], {}),
        (nn.CrossEntropyLoss(), [{"weight": wrong_count}], {}),
        (functools.partial(F.cross_entropy), [{"weight": wrong_count}], {}),
    ],
)
def test_a_loss_needs_its_own_settings(criterion, wrong, right):
    targets = torch.rand(9, 5) if criterion is variational_loss else class_targets(9)
    for settings in wrong:
        assert reasons_of(DataParallelCriterion(criterion, **settings), targets=targets) == (
            REASON,
        )
    assert reasons_of(DataParallelCriterion(criterion, **right), targets=targets) == ()


def test_a_weight_that_does_not_add_up_is_named():
    (reason,) = reasons_of(
        plain_mean, rows=8, weight=lambda output, target: 1
    )  # right for two equal parts
    assert reason.startswith(
        "weight= does not add up: it returned 1 for 8 rows, 1 for the first of them and 1 for the others"
    )


def test_reasons_are_found_with_rows_in_dimension_1():
    net, inputs, targets = time_major()

    def total(output, target):
        return flat_loss(output, target) * target.numel()

    losses = DataParallelCriterion(total, dim=1, weight="rows")
    report = verify(DataParallelModel(net, CPUS, dim=1), losses, inputs, targets)
    assert report.first_difference is None
    assert report.reasons == (REASON,)


def test_errors_of_a_criterion_on_parts_are_a_reason():
    def picky(output, target):
        if len(output) < 3:
            raise ZeroDivisionError("too few rows")
        return contrastive_loss(output, target)

    assert reasons_of(picky, weight="rows") == (REASON,)


# Reasons that would be false


def test_a_wrong_mean_has_no_reason_in_half_precision():
    """The errors of parts are within the tolerance, and the report says to compare in float64."""
    inputs = torch.randn(64, 4)
    targets = torch.tensor([0, 0, 0, 2] * 8 + [2, 3, 2, 0] * 8)
    wrong = DataParallelCriterion(mean_of_few, weight="rows")
    report = verify(build_net().bfloat16(), wrong, inputs.bfloat16(), targets, device_ids=CPUS)
    assert not report.equal
    assert report.reasons == ()
    assert "no known reason: compare in float64" in str(report)
    assert verify(build_net(), wrong, inputs, targets, device_ids=CPUS).reasons == (REASON,)


def test_a_coupled_loss_is_never_told_to_be_whole():
    report = check(
        nn.Sequential(build_net(), nn.Dropout()),
        DataParallelCriterion(contrastive_loss, whole=True),
    )
    assert report.reasons == (
        "random numbers: the model draws them, in 1 (Dropout), or between it and 0 (Sequential): compare with "
        "reproducible=True, or in eval mode",
    )


class JsdCrossEntropy(nn.Module):
    """The loss of AugMix in timm: clean rows first, then as many rows of each of two augmentations."""

    def forward(self, output, target):
        parts = [
            part.softmax(1) for part in output.view(3, -1, output.size(1))
        ]  # raises an error for other numbers of rows
        mixture = torch.stack(parts).mean(0).log()
        divergence = sum(F.kl_div(mixture, part, reduction="batchmean") for part in parts) / 3
        return (
            F.cross_entropy(output[: len(output) // 3], target[: len(output) // 3])
            + 12 * divergence
        )


class Splits(JsdCrossEntropy):
    """The same, with a name that says nothing."""


def test_a_loss_of_several_splits_is_refused_or_named():
    with pytest.raises(
        TypeError,
        match="JsdCrossEntropy appears to be a loss whose rows depend on each other.*whole=True",
    ):
        DataParallelCriterion(JsdCrossEntropy())(
            DataParallelModel(build_net(), CPUS)(torch.randn(9, 4)), class_targets(9)
        )
    program = torch.randn(18, 4), class_targets(6).repeat(3)
    for loss, settings in (
        (JsdCrossEntropy(), {"weight": "rows"}),
        (Splits(), {"weight": "rows"}),
    ):
        report = verify(
            build_net(), DataParallelCriterion(loss, **settings), *program, device_ids=CPUS
        )
        assert not report.equal
        assert report.reasons == (REASON,)
    assert verify(
        build_net(), DataParallelCriterion(JsdCrossEntropy(), whole=True), *program, device_ids=CPUS
    ).equal


# Outputs that are tuples


def two_losses(scores, norms, target):
    return F.cross_entropy(scores, target) + norms.mean()


def of_a_pair(output, *targets):
    return len(output[0])  # of the first output, if the tuple were one argument


@pytest.mark.parametrize(("rows", "equal"), [(7, False), (6, True)])
def test_a_weight_that_takes_the_tuple_for_one_argument_is_named(rows, equal):
    model = DataParallelModel(Calls(lambda net, x: (net(x), net(x).pow(2).mean(1))), CPUS)
    batch = torch.randn(rows, 4), class_targets(rows)
    report = verify(model, DataParallelCriterion(two_losses, weight=of_a_pair), *batch)
    reason = (
        f"weight= does not add up: it returned 5 for {rows} rows, 5 for the first of them and 5 for the others, expected the "
        "number of terms that the mean divides by; the output is a tuple, whose 2 entries fill its first 2 arguments"
    )
    assert report.equal == equal  # equal replicas hide it
    assert reason in (report.warnings if equal else report.reasons)
    right = DataParallelCriterion(two_losses, weight=lambda scores, norms, target: len(norms))
    report = verify(model, right, *batch)
    assert report.equal
    assert not report.warnings


def test_the_relative_error_of_one_nan_is_infinite():
    one = torch.tensor([1.0, 2.0])
    nan = torch.tensor([1.0, torch.nan])
    assert relative_error(nan, one) == relative_error(one, nan) == float("inf")
    assert relative_error(nan, nan) == 0.0
    assert relative_error(torch.tensor([1.0, 3.0]), one) == 0.5


def test_the_first_difference_is_found_with_rows_in_dimension_1():
    net, inputs, targets = time_major()
    net.output = nn.Sequential(nn.Dropout(0.5), net.output)
    report = verify(DataParallelModel(net, CPUS, dim=1), flat_loss, inputs, targets)
    assert report.first_difference.startswith("output.0 (Dropout): relative error")


def test_gradients_of_buffers_are_compared():
    model = Calls(lambda net, x: net(x) * net.scale)
    model.net.register_buffer("scale", torch.ones(5, requires_grad=True))
    report = check(model)
    assert report.equal
    assert "net.scale" in report.gradient_errors


class Shifted(nn.Module):
    """Adds the mean of the rows before its second layer, so that this layer has other inputs in each replica."""

    def __init__(self, second):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = second

    def forward(self, x):
        hidden = self.first(x)
        return self.second(hidden + hidden.mean(0))


def test_the_last_layer_with_an_equal_output_is_named():
    report = check(
        nn.Sequential(nn.Identity(), nn.Sequential(Shifted(nn.Sequential(nn.Linear(5, 5)))))
    )
    assert report.first_difference.startswith("1.0.second.0 (Linear): relative error")
    assert report.first_difference.endswith("; equal up to 1.0.first (Linear)")


@pytest.mark.parametrize("after", [nn.Identity(), nn.ReLU(inplace=True)])
def test_a_layer_whose_output_is_overwritten_is_the_cause(after):
    report = check(nn.Sequential(nn.Linear(4, 5), Calls(lambda _, x: x - x.mean(0)), after))
    assert report.first_difference.startswith("1 (Calls): relative error")


def test_a_difference_before_the_first_layer():
    changing = Calls(lambda net, x: net(x * torch.ones_like(x).sum() / 28))
    assert check(changing).first_difference.endswith("; equal up to the inputs")
