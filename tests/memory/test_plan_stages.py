"""Stages of a plan: what restricts the loop comes last of what is exact."""

import functools

import pytest
import torch
from torch import nn

from balanced_parallel import memory, simulate


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
