"""Evaluation without a graph: modes are put back, replicas follow, and training goes on.

The mean of many losses: exact, without a graph, without waiting.
"""

import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import class_targets
from helpers.ranks import run_ranks
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, gather, parallelize, simulate
from balanced_parallel.savings import RunningLoss, inference


def make_net():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 5))
    net[1].eval()  # frozen
    return net


def test_modes_are_put_back_after_an_error_too():
    net, other = make_net(), nn.Dropout()

    def fail():
        with inference(net, other):
            assert not any(module.training for module in [*net.modules(), other])
            assert not net(torch.ones(2, 4)).requires_grad
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [module.training for module in net.modules()] == [True, True, False, True, True]
    assert other.training
    assert not torch.is_inference_mode_enabled()

    @inference(net)
    def evaluate():
        return net(torch.ones(2, 4))

    assert evaluate().is_inference()
    assert evaluate().is_inference()
    assert net.training


def test_evaluation_between_steps_leaves_training_as_it_is(double):
    """Replicas are made in the evaluation, and trained afterwards."""
    inputs, targets = torch.randn(7, 4), class_targets(7, 2)
    plain = make_net().requires_grad_()
    plain[2].p = 0.0
    loss = F.cross_entropy(plain(inputs), targets)
    loss.backward()
    with simulate(3) as cluster:
        net = make_net()
        net[2].p = 0.0
        model, criterion = DataParallelModel(net), DataParallelCriterion(nn.CrossEntropyLoss())
        for _ in range(2):
            with inference(model, criterion):
                outputs = model(inputs)
                assert all(output.is_inference() for output in outputs)
                torch.testing.assert_close(gather(outputs, "cpu"), plain.eval()(inputs).detach(), rtol=1e-10, atol=1e-10)
                assert not criterion(outputs, targets).requires_grad
            model.zero_grad()
            found = criterion(model(inputs), targets)
            found.backward()
            torch.testing.assert_close(found.detach().cpu(), loss.detach(), rtol=1e-10, atol=1e-10)
            for one, other in zip(net.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-10, atol=1e-10)
        assert [module.training for module in net.modules()] == [True, True, False, True, True]
        assert max(cluster.live) > 0


def test_activations_are_not_kept():
    layers, width, peaks = 12, 64, []
    for evaluates in (False, True):
        with simulate(2) as cluster:
            model = DataParallelModel(nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]))
            inputs = torch.randn(2048, width)
            if evaluates:
                with inference(model):
                    model(inputs)
            else:
                model(inputs)
        peaks.append(max(cluster.peak))
    size = 1024 * width * 4
    assert peaks[0] >= layers * size
    assert peaks[1] <= 4 * size + 2 * layers * (width + 1) * width * 4


def test_mean_is_weighted():
    running = RunningLoss()
    assert math.isnan(running.compute())
    running.update(torch.tensor(1.0), weight=3)
    running.update(5.0)
    running.update(torch.tensor([8.0]), torch.tensor(4))
    running.update(torch.tensor(torch.nan), weight=0)
    assert running.compute() == (3 + 5 + 32) / 8
    running.update(2.0, 2)
    assert running.compute() == 44 / 10
    running.reset()
    running.update(7.0)
    assert running.compute() == 7.0


def test_many_small_losses_are_summed_in_float64():
    running = RunningLoss()
    with simulate(1):
        loss = torch.tensor(0.1, device="sim:0")
        for _ in range(1000):
            running.update(loss)
        assert running.compute() == pytest.approx(float(loss), rel=1e-12)


class Hook:
    """A hook of a graph, which lives as long as it."""

    def __call__(self, *gradients): ...


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_no_graph_is_kept(device):
    with simulate(1):
        layer = nn.Linear(3, 1).to(device)
        running, graphs = RunningLoss(), []
        for _ in range(3):
            loss = layer(torch.ones(2, 3, device=device)).mean()
            hook = Hook()
            loss.grad_fn.register_hook(hook)
            graphs.append(weakref.ref(hook))
            running.update(loss, loss)
        assert graphs[-1]() is not None
        del loss, hook
        gc.collect()
        assert [graph() for graph in graphs] == [None] * 3


def test_updates_wait_for_no_device_and_keep_no_memory():
    with simulate(2) as cluster:
        running = RunningLoss()
        layers = [nn.Linear(3, 1).to(device) for device in cluster.devices]
        inputs = [torch.ones(2, 3).pin_memory().to(device, non_blocking=True) for device in cluster.devices]
        counts = [torch.full((), 2, device=device) for device in cluster.devices]
        none = torch.zeros((), device=cluster.devices[1])
        losses, live = [], []
        for step in range(4):
            with cluster.forbidding_waits():
                there = [layer(some).mean() for layer, some in zip(layers, inputs, strict=True)]
                running.update(there[0], weight=3)
                running.update(there[1], counts[1])
                running.update(there[1], counts[0])  # from another device
                running.update(there[1] / none, none)  # nothing counts
                running.update(1.5, counts[1])
            losses.append([loss.item() for loss in there])
            del there
            live.append(cluster.live)
            layers[0].bias.data += step
        assert live[1:] == live[1:2] * 3
        expected = sum(3 * one + 4 * other + 3 for one, other in losses) / (4 * 9)
        before = len(cluster.waits)
        assert running.compute() == pytest.approx(expected, rel=1e-6)
        assert len(cluster.waits) - before == 2  # one for each device


def test_arguments_that_are_not_scalars_are_refused():
    with pytest.raises(ValueError, match=r"the loss has shape \(2,\), expected a scalar"):
        RunningLoss().update(torch.zeros(2))
    with pytest.raises(ValueError, match=r"the weight has shape \(3,\), expected a scalar"):
        RunningLoss().update(torch.zeros(()), torch.ones(3))


def check_ranks(rank):
    parallelize(nn.Linear(2, 2), nn.MSELoss())  # starts the process group
    running = RunningLoss()
    for number in range(3 if rank == 0 else 0):  # one rank has no loss at all
        running.update(torch.tensor(float(number)), weight=number + 1)
    resumed = RunningLoss()
    resumed.load_state_dict(running.state_dict())
    return running.compute(), resumed.compute(), running.state_dict()


def test_mean_is_over_all_ranks_and_so_is_its_state():
    state = {"total": 8.0, "weight": 6.0}
    assert run_ranks(2, check_ranks) == [(8 / 6, 8 / 6, state)] * 2
    resumed = RunningLoss()
    resumed.load_state_dict(state)
    assert resumed.compute() == 8 / 6
