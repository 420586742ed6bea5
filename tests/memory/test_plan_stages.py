"""Stages of a plan: what restricts the loop comes last of what is exact."""

import functools

import pytest
import torch
from torch import nn

from balanced_parallel import DataParallelCriterion, memory, simulate


def wide_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def test_gradients_are_released_in_the_backward_if_nothing_else_is_exact_and_none_are_clipped():
    inputs, targets = torch.randn(6, 64), torch.randint(10, (6,))
    make = functools.partial(memory.plan, wide_net(), nn.CrossEntropyLoss(), inputs, targets, batch_size=6, device_kind="sim")
    plain = make(capacity="1GiB")
    capacity = plain.chosen.peak[0] - 4096
    plan = make(capacity=capacity)
    assert plan.chosen.name == "gradients released in the backward"
    assert (plan.chosen.exact, plan.chosen.micro_batches) == (True, 1)
    with simulate(1, capacity) as cluster:
        expected = update(wide_net(), inputs, targets)
        _, _, _, step = plan.apply(net := wide_net(), nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, lr=0.1)
        step(inputs, targets)
        found = [parameter.detach().cpu() for parameter in net.parameters()]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    with simulate(1, capacity) as cluster:
        *_, step = plan.apply(wide_net(), nn.CrossEntropyLoss())
        for _ in range(2):
            step(inputs, targets)
        assert cluster.peak[0] == pytest.approx(plan.chosen.peak[0], rel=0.01)
        with pytest.raises(ValueError, match=r"max_grad_norm=1.0 with a plan that releases gradients .* give max_grad_norm to"):
            plan.apply(wide_net(), nn.CrossEntropyLoss(), max_grad_norm=1.0)
    assert not any(choice.released for choice in make(capacity=capacity, max_grad_norm=1.0).choices)


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
    plans = [make(wide_net(), one, capacity="1GiB") for one in (wrapped, mean_of_counted)]
    assert [plan.unknown_divisor for plan in plans] == [False, True]
    assert plans[0].choices == plans[1].choices
    assert ["give weight= to plan.apply" in str(plan) for plan in plans] == [False, True]
    *_, step = plans[0].apply(wide_net(), wrapped, device_ids=["cpu"] * 2, optimizer=torch.optim.SGD, lr=0.1)
    torch.testing.assert_close(step(inputs, (targets, mask)), mean_of_counted(wide_net()(inputs), targets, mask).detach())


def test_unequal_devices_are_named_one_by_one():
    inputs, targets = torch.randn(8, 64), torch.randint(10, (8,))
    make = functools.partial(memory.plan, wide_net(), nn.CrossEntropyLoss(), inputs, targets, device_kind="sim")
    plan = make(batch_size=4096, capacity=["3MiB", "2MiB", "2MiB"], devices=3)
    assert plan.chosen.split is not None
    assert "on 3 x sim with 3.00 MiB + 2.00 MiB + 2.00 MiB" in str(plan)
    row = next(line for line in str(plan).splitlines() if line.startswith(plan.chosen.name))
    assert row.count(" + ") == 2 * 3  # rows, peak, reserved
