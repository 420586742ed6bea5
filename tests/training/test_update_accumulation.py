"""Accumulation: the weight of a batch, the divisor of its gradients, batches that count nothing.

Micro-batches that fit the devices.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import (
    Calls,
    assert_equal,
    assert_same_gradients,
    build_net,
    class_batch,
    class_targets,
    gradients,
    plain_program,
)
from helpers.steps import make_step
from helpers.updates import values_of
from torch import nn

from balanced_parallel import DataParallelCriterion


def two_means(output, target):
    return F.cross_entropy(output, target).sqrt() + F.cross_entropy(2 * output, target)


def mean_inside(output, target):
    return F.cross_entropy(output, target)


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), mean_inside, two_means])
def test_zero_weight_skips_the_update(criterion, rows):
    net = build_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = make_step(net, criterion, optimizer, scheduler=scheduler, precision="fp16")
    for number in range(2):
        before = values_of(net)
        state = str(optimizer.state_dict())
        scale = step.precision.scaler and step.precision.scaler.state_dict()
        with pytest.warns(UserWarning, match="nothing is updated, and its loss is nan") as caught:
            loss = step(torch.randn(rows, 4), torch.full((rows,), -100))
        assert loss.isnan()
        assert caught[0].filename == __file__
        assert all(map(torch.equal, before, net.parameters()))
        assert str(optimizer.state_dict()) == state
        assert number == 0 or step.precision.scaler.state_dict() == scale
        assert scheduler.get_last_lr() == [0.1 * 0.5**number]
        step(*class_batch(3))


def test_float16_gradients_do_not_overflow_in_accumulation():
    """With a scale of 2**16, gradients of the sum of many terms would be past 65504: the window is divided as it accumulates."""
    net = build_net()
    x, target = class_batch(512)
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(net(x), target)
    (loss * 2.0**16).backward()
    assert all(gradient.isfinite().all() for gradient in gradients(net))
    step = make_step(net, precision="fp16", micro_batch_size=32)
    step(x, target)
    assert step.precision.scaler.get_scale() == 2.0**16


def test_float16_divisor_of_a_window_is_near_the_weight_of_the_one_before():
    """Nobody knows after the first row of a run that 500 will follow: the first update may overflow, and is skipped then."""
    net = build_net()
    x, target = class_batch(512)
    loss, expected = plain_program(net, nn.CrossEntropyLoss(), x, target)
    step = make_step(net, precision="fp16")
    for number in range(2):
        for rows in (slice(0, 1), slice(1, 12), slice(12, 500), slice(500, 512)):
            step.add(x[rows], target[rows])
        torch.testing.assert_close(step.apply(), loss, rtol=1e-2, atol=0)
        assert step.precision.scaler.get_scale() == 2.0**15, number  # one overflow, in the first
    assert_same_gradients(gradients(net), expected, 5e-3)


def weighted_by_hand(criterion):
    return DataParallelCriterion(
        criterion, weight=lambda output, target: (target != criterion.ignore_index).sum()
    )


# Each ends with how often labels are compared with the one to be ignored, and gradients rescaled.
COUNTED = [
    (nn.CrossEntropyLoss(ignore_index=2), 2, 1, 0),
    (functools.partial(F.cross_entropy, ignore_index=2, label_smoothing=0.1), 2, 1, 0),
    (nn.CrossEntropyLoss(torch.linspace(0.5, 2.0, 5), ignore_index=2), 2, 6, 1),
    (weighted_by_hand(nn.CrossEntropyLoss(ignore_index=2)), 2, 6, 0),
    (nn.MSELoss(), None, 0, 0),
    (nn.MSELoss(), 1, 0, 1),  # 11 rows are 2, 2, 2, 2, 2 and 1, and the first does not show it
    (nn.MSELoss(reduction="sum"), 1, 0, 0),
]


@pytest.mark.parametrize(("criterion", "micro_batch_size", "comparisons", "rescalings"), COUNTED)
def test_targets_are_counted_once_and_gradients_rescaled_only_if_the_weight_was_not_predicted(
    double, criterion, micro_batch_size, comparisons, rescalings
):
    net = build_net()
    x = torch.randn(11, 4)
    criterion = criterion.double() if isinstance(criterion, nn.Module) else criterion
    step = make_step(net, criterion, lr=0.0, micro_batch_size=micro_batch_size)
    plain = step.criterion.module
    target = torch.rand(11, 5) if isinstance(plain, nn.MSELoss) else class_targets(11)
    loss, expected = plain_program(net, plain, x, target)
    for _ in range(2):
        with (
            Calls(torch.ops.aten.ne.Scalar) as compared,
            Calls(torch.ops.aten._foreach_mul_.Scalar) as rescaled,
        ):
            found = step(x, target)
        assert_equal(found, loss)
        assert_same_gradients(gradients(net), expected)
        # It would be once for each micro-batch and each replica.
        assert (compared.seen, rescaled.seen) == (comparisons, rescalings)
    step.add(x[:7], target[:7])
    step.add(x[7:], target[7:])
    assert_equal(step.apply(), loss)
    assert_same_gradients(gradients(net), expected)


def test_gradients_of_a_parameter_that_the_optimizer_alone_has_are_those_of_one_update():
    """Gradients of a failed update are dropped: a loop by hand that follows would count them."""
    net = build_net()
    scale = nn.Parameter(torch.ones(()))
    criterion = DataParallelCriterion(
        lambda output, target: F.cross_entropy(output * scale, target),
        weight=lambda output, target: len(target),
    )
    step = make_step(net, criterion, torch.optim.SGD([*net.parameters(), scale], lr=0.0))
    step.add(*class_batch(4))
    with pytest.raises((ValueError, IndexError)):
        step.add(torch.randn(3, 4), torch.full((3,), 99))
    assert [each.grad for each in (scale, *net.parameters())] == [None] * 5
    batch = class_batch(4)
    step(*batch)
    first = scale.grad.clone()
    step(*batch)
    assert_equal(scale.grad, first)
