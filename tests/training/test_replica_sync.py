"""Bytes that an update moves between the devices of one process.

TrainStep with optimizers that update in the backward.
"""

import pytest
import torch
from helpers.problems import build_net, class_targets
from helpers.steps import make_step
from helpers.traffic import traffic
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, parallelize, simulate
from balanced_parallel.savings import release_gradients_in_backward


def test_a_training_step_moves_only_the_batch_parameters_gradients_and_scalars():
    """Outputs (6 MB) stay on their devices."""
    with simulate(3) as cluster:
        net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1000)).to("sim:0")
        model, criterion = DataParallelModel(net), DataParallelCriterion(nn.CrossEntropyLoss())
        optimizer = torch.optim.Adam(net.parameters())
        size = sum(parameter.nbytes for parameter in net.parameters())
        inputs, targets = torch.randn(1500, 32), torch.randint(1000, (1500,))
        for _ in range(2):
            before = cluster.moved
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        from_host, between = traffic(cluster, before)
        assert from_host == {("cpu", f"sim:{index}"): 500 * (32 * 4 + 8) for index in range(3)}
        scalars = 64
        for index in (1, 2):
            assert size <= between.pop(("sim:0", f"sim:{index}")) <= size + scalars
            assert size <= between.pop((f"sim:{index}", "sim:0")) <= size + scalars
        assert not between


def test_micro_batches_move_parameters_and_gradients_but_no_outputs():
    with simulate(3) as cluster:
        net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1000)).to("sim:0")
        model, criterion = parallelize(net, nn.CrossEntropyLoss())
        step = TrainStep(model, criterion, torch.optim.AdamW(net.parameters()), micro_batch_size=100, max_grad_norm=1.0)
        size = sum(parameter.nbytes for parameter in net.parameters())
        before = cluster.moved
        step(torch.randn(1500, 32), torch.randint(1000, (1500,)))
        _, between = traffic(cluster, before)
        assert set(between) == {(f"sim:{a}", f"sim:{b}") for a, b in ((0, 1), (0, 2), (1, 0), (2, 0))}
        assert all(count <= 5 * (size + 64) for count in between.values())


CRITERIA = {
    "mean": lambda: nn.CrossEntropyLoss(),
    "class weights": lambda: nn.CrossEntropyLoss(torch.linspace(0.5, 2, 5)),
    "sum": lambda: nn.CrossEntropyLoss(reduction="sum"),
}


def train(released, criterion, ignored=(3, 4, 0), **settings):
    """Steps of 7 rows with two replicas. In the second no target of the first replica counts."""
    net = build_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, weight_decay=0.1)
    if released:
        release_gradients_in_backward(optimizer)
    step = make_step(net, CRITERIA[criterion](), optimizer, **settings)
    generator = torch.Generator().manual_seed(5)
    losses = [step(torch.randn(7, 4, generator=generator), class_targets(7, count)) for count in ignored]
    return losses, list(net.parameters()), optimizer.state_dict()


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("settings", [{}, {"split": (1.0, 6.0)}, {"micro_batch_size": 4}, {"precision": "bf16"}], ids=str)
def test_released_steps_equal_plain_steps(double, criterion, settings):
    expected, found = (train(released, criterion, **settings) for released in (False, True))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:no target of this batch was counted")
def test_a_batch_without_targets_changes_nothing(double):
    expected, found = (train(released, "mean", ignored=(3, 7, 0)) for released in (False, True))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, equal_nan=True)


def test_targets_on_a_device_are_counted_there(double):
    _, expected, _ = train(False, "mean", ignored=(3,))
    with simulate(2) as cluster:
        net = build_net().to(cluster.devices[0])
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1, weight_decay=0.1)
        release_gradients_in_backward(optimizer)
        inputs = torch.randn(7, 4, generator=torch.Generator().manual_seed(5))
        make_step(net, None, optimizer)(inputs.to(cluster.devices[0]), class_targets(7, 3).to(cluster.devices[0]))
        assert all(parameter.grad is None for parameter in net.parameters())
        for one, other in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-10, atol=1e-10)


def refused(match, kind=ValueError, rows=7, **settings):
    net = build_net()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    release_gradients_in_backward(optimizer)
    step = make_step(net, None, optimizer, **settings)
    with pytest.raises(kind, match=match):
        step(torch.randn(rows, 4), class_targets(rows))
    torch.testing.assert_close(before, list(net.parameters()))
    return step


def test_settings_that_need_all_gradients_are_refused():
    refused("max_grad_norm=1.0 needs the norm of all gradients", max_grad_norm=1.0)
    refused("float16 scales gradients", precision="fp16")
    step = refused("gradients of several micro-batches are accumulated", RuntimeError, micro_batch_size=2)
    with pytest.raises(RuntimeError, match="gradients of several micro-batches are accumulated"):
        step.add(torch.randn(1, 4), class_targets(1))


def test_batches_that_may_run_again_are_refused():
    net = build_net()
    optimizer = torch.optim.Adam(net.parameters())
    release_gradients_in_backward(optimizer)
    step = make_step(net, nn.CrossEntropyLoss(), optimizer, micro_batch_size="auto")
    with pytest.raises(ValueError, match="micro_batch_size='auto' runs a batch again.*leave out one of them"):
        step(torch.randn(7, 4), class_targets(7))


@pytest.mark.parametrize("minimum", [2.0, 10.0])
@pytest.mark.parametrize("ignored", [2, 7])
def test_divisors_have_their_minimum(double, minimum, ignored):
    found = []
    for released in (False, True):
        net = build_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1)
        if released:
            release_gradients_in_backward(optimizer)
        criterion = DataParallelCriterion(nn.CrossEntropyLoss(), minimum=minimum)
        step = TrainStep(DataParallelModel(net, ["cpu"] * 2), criterion, optimizer)
        found.append([step(torch.ones(7, 4), class_targets(7, ignored)), *net.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)
