"""Stages of a plan: what restricts the loop comes last of what is exact."""

import functools

import pytest
import torch
from torch import nn

from balanced_parallel import DataParallelCriterion, memory, simulate


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def test_gradients_are_released_in_the_backward_if_nothing_else_is_exact_and_none_are_clipped():
    inputs, targets = torch.randn(6, 64), torch.randint(10, (6,))
    settings = {"batch_size": 6, "device_kind": "sim", "optimizer": torch.optim.SGD}
    make = functools.partial(memory.plan, small_net(), nn.CrossEntropyLoss(), inputs, targets, **settings)
    plain, clipped = make(capacity="1GiB"), make(capacity="1GiB", max_grad_norm=1.0)
    assert [any("released" in name for name in plan.untried) for plan in (plain, clipped)] == [True, False]
    capacity = plain.chosen.peak[0] - 4096
    plan = make(capacity=capacity)
    assert plan.chosen.name == "gradients released in the backward"
    assert (plan.chosen.exact, plan.chosen.micro_batches) == (True, 1)
    with simulate(1, capacity) as cluster:
        expected = update(small_net(), inputs, targets)
        *_, step = plan.apply(net := small_net(), nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, lr=0.1)
        step(inputs, targets)
        assert cluster.peak[0] == pytest.approx(plan.chosen.peak[0], rel=0.01)
        found = [parameter.detach().cpu() for parameter in net.parameters()]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
        with pytest.raises(ValueError, match=r"max_grad_norm=1.0 with a plan that releases gradients .* give max_grad_norm to"):
            plan.apply(small_net(), nn.CrossEntropyLoss(), max_grad_norm=1.0)


def update(net, inputs, targets):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    nn.functional.cross_entropy(net(inputs), targets).backward()
    optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def mean_of_counted(output, targets, mask):
    return ((output.logsumexp(1) - output.gather(1, targets[:, None])[:, 0]) * mask).sum() / mask.sum()


def test_wrapped_criterion_is_planned_and_applied_as_it_is():
    inputs, targets, mask = torch.randn(6, 64), torch.randint(10, (6,)), torch.tensor([1.0, 0, 1, 1, 1, 0])
    wrapped = DataParallelCriterion(mean_of_counted, weight=lambda output, targets, mask: mask.sum())
    make = functools.partial(memory.plan, inputs=inputs, targets=(targets, mask), batch_size=6, devices=2, device_kind="sim")
    plans = [make(small_net(), one, capacity="1GiB") for one in (wrapped, mean_of_counted)]
    assert [plan.unknown_divisor for plan in plans] == [False, True]
    assert plans[0].choices == plans[1].choices
    assert ["give weight= to plan.apply" in str(plan) for plan in plans] == [False, True]
    *_, step = plans[0].apply(small_net(), wrapped, device_ids=["cpu"] * 2, optimizer=torch.optim.SGD, lr=0.1)
    torch.testing.assert_close(step(inputs, (targets, mask)), mean_of_counted(small_net()(inputs), targets, mask).detach())


def test_unequal_devices_are_named_one_by_one():
    inputs, targets = torch.randn(8, 64), torch.randint(10, (8,))
    settings = {"device_kind": "sim", "optimizer": torch.optim.SGD, "batch_size": 900, "devices": 3}
    plan = memory.plan(small_net(), nn.CrossEntropyLoss(), inputs, targets, capacity=["500KiB", "300KiB", "300KiB"], **settings)
    assert plan.chosen.split is not None
    assert "on 3 x sim with 500.00 KiB + 300.00 KiB + 300.00 KiB" in str(plan)
    row = next(line for line in str(plan).splitlines() if line.startswith(plan.chosen.name))
    assert row.count(" + ") == 2 * 3  # rows, peak, reserved
    with simulate(3, list(plan.capacity)) as cluster:
        *_, step = plan.apply(small_net(), nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, lr=0.1)
        step(torch.randn(900, 64), torch.randint(10, (900,)))
        assert cluster.peak == pytest.approx(plan.chosen.peak, rel=0.02)
