"""Deferred gradients: ``no_sync`` reduces once, and gradients that are discarded in between are those of all replicas."""

import contextlib
import copy
import gc
import warnings
import weakref

import pytest
import torch
from helpers.problems import CLASSES, assert_same_gradients, build_net, gradients, plain_program
from torch import nn

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, TrainStep, gather, simulate

pytestmark = pytest.mark.usefixtures("double", "buckets")


def zero(optimizer, net):
    optimizer.zero_grad()


def nothing(optimizer, net):
    pass


def zero_the_net(optimizer, net):
    net.zero_grad()


def zero_by_hand(optimizer, net):
    for parameter in net.parameters():
        parameter.grad = None


def delete_by_hand(optimizer, net):
    for parameter in net.parameters():
        del parameter.grad


def zero_some(optimizer, net):
    net[0].weight.grad = None


def replace_some(optimizer, net):
    net[0].weight.grad = torch.ones_like(net[0].weight)


CHANGES = [nothing, zero, zero_the_net, zero_by_hand, delete_by_hand, zero_some, replace_some]
LAYOUTS = {"one device": ["cpu"] * 3, "three devices": ["sim:0", "sim:1", "sim:2"], "balanced": ["sim:0", "sim:1", "sim:2"]}


@pytest.mark.parametrize("between", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("begins", ["with nothing", "with gradients"])
def test_discarded_gradients_are_those_of_all_replicas(between, layout, begins):
    torch.manual_seed(2)
    x, y = torch.randn(20, 4), torch.randn(20, CLASSES)

    def run(net, optimizer, model, criterion, no_sync):
        def backward(rows):
            criterion(model(x[rows]), y[rows]).backward()

        if begins == "with gradients":
            backward(slice(0, 5))
        with no_sync():
            backward(slice(5, 7))
            backward(slice(7, 12))
        between(optimizer, net)
        backward_alone = slice(12, 13)  # too few rows for the other replicas, so that autograd sets grad
        with no_sync():
            backward(backward_alone)
        backward(slice(13, 20))
        found = gradients(net)
        optimizer.step()
        return [*found, *(parameter.detach() for parameter in net.parameters())]

    net = build_net()
    expected = run(net, torch.optim.SGD(net.parameters(), 0.1), net, nn.MSELoss(), contextlib.nullcontext)
    with simulate(3):
        devices = LAYOUTS[layout]
        net = build_net().to(devices[0])
        model, criterion = DataParallelModel(net, devices), DataParallelCriterion(nn.MSELoss())
        found = run(net, torch.optim.SGD(net.parameters(), 0.1), model, criterion, model.no_sync)
        assert_same_gradients([gradient.cpu() for gradient in found], expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [2, 6])
def test_an_update_between_deferred_gradients_equals_the_plain_program(layout, rows):
    """Reads param_groups, as a scheduler does, and reduces before the step."""
    torch.manual_seed(2)
    x, y = torch.randn(20, 4), torch.randn(20, CLASSES)

    def run(net, optimizer, model, criterion, reduce):
        for start in (0, 10):
            with model.no_sync() if reduce else contextlib.nullcontext():
                for first in range(start, start + 10, rows):
                    criterion(model(x[first : first + rows]), y[first : first + rows]).backward()
                    assert optimizer.param_groups[0]["lr"] == 0.1
            if reduce:
                model.reduce_gradients()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return [parameter.detach() for parameter in net.parameters()]

    net = build_net()
    expected = run(net, torch.optim.SGD(net.parameters(), 0.1), net, nn.MSELoss(), False)
    with simulate(3):
        devices = LAYOUTS[layout]
        net = build_net().to(devices[0])
        model, criterion = DataParallelModel(net, devices), DataParallelCriterion(nn.MSELoss())
        kind = torch.optim.SGD
        optimizer = BalancedOptimizer(model, kind, lr=0.1) if layout == "balanced" else kind(net.parameters(), 0.1)
        values = run(net, optimizer, model, criterion, True)
        assert_same_gradients([value.cpu() for value in values], expected)


def test_grad_is_that_of_the_first_replica_before_the_reduction():
    x = torch.randn(6, 4)
    with simulate(3):
        net = build_net().to("sim:0")
        model = DataParallelModel(net)
        net(x[:2].to("sim:0")).sum().backward()
        first = [gradient.clone() for gradient in gradients(net)]
        net.zero_grad()
        with model.no_sync():
            for times in (1, 2):
                gather(model(x)).sum().backward()
                assert_same_gradients(gradients(net), [times * gradient for gradient in first])
        model.zero_grad()
        model = DataParallelModel(net, split=[0, 1, 1])
        with model.no_sync():
            gather(model(x)).sum().backward()
        assert all(not gradient.any() for gradient in gradients(net))
        model.reduce_gradients()
        together = gradients(net)
        net.zero_grad()
        net(x.to("sim:0")).sum().backward()
        assert_same_gradients(together, gradients(net))


def test_deferred_gradients_do_not_keep_the_replicas_alive():
    with simulate(3):
        model = DataParallelModel(build_net())
        with model.no_sync():
            gather(model(torch.randn(6, 4)), "cpu").sum().backward()
        seen = weakref.ref(model.replicas)
        del model
        gc.collect()
        assert seen() is None


def test_no_sync_applies_to_the_backward_of_its_forward():
    batches = torch.randn(3, 4, 4)
    net = build_net()
    net(batches.flatten(0, 1)).sum().backward()
    expected = gradients(net)
    net.zero_grad()
    with simulate(2):
        model = DataParallelModel(net)
        first = gather(model(batches[0]), "cpu").sum()
        with model.no_sync():
            second = gather(model(batches[1]), "cpu").sum()
        third = gather(model(batches[2]), "cpu").sum()
        first.backward()
        assert not any(bucket.held for bucket in model.replicas.gradients.buckets)
        second.backward()
        assert all(bucket.held for bucket in model.replicas.gradients.buckets)
        third.backward()
        assert not any(bucket.held for bucket in model.replicas.gradients.buckets)
        assert_same_gradients([gradient.cpu() for gradient in gradients(net)], expected)


CPUS = ["cpu"] * 3


def test_no_sync_reduces_gradients_once(double):
    net, x, target = build_net(), torch.randn(12, 4), torch.randint(5, (12,))
    _, expected = plain_program(net, nn.CrossEntropyLoss(reduction="sum"), x, target)
    with simulate(3) as cluster:
        model, criterion = DataParallelModel(net.to("sim:0")), DataParallelCriterion(nn.CrossEntropyLoss(reduction="sum"))
        size = sum(parameter.nbytes for parameter in net.parameters())

        def run(start):
            criterion(model(x[start : start + 3]), target[start : start + 3]).backward()

        run(0)  # the copies are there
        net.zero_grad()
        before = cluster.moved
        with model.no_sync():
            for start in (0, 3, 6):
                run(start)
        assert (cluster.moved - before)["sim:1", "sim:0"] < 200
        run(9)
        assert size <= (cluster.moved - before)["sim:1", "sim:0"] < size + 200
        assert_same_gradients([gradient.cpu() for gradient in gradients(net)], expected)
        net.zero_grad()
        with model.no_sync():
            for start in (0, 3, 6, 9):
                run(start)
        model.reduce_gradients()
        assert_same_gradients([gradient.cpu() for gradient in gradients(net)], expected)


def test_create_graph_backward_reduces_deferred_gradients(double):
    net, x = build_net(), torch.randn(6, 4)
    with simulate(3):
        model = DataParallelModel(net)
        gather(model(x), "cpu").square().sum().backward()
        expected = [gradient.cpu() * 2 for gradient in gradients(net)]
        model.zero_grad()
        with model.no_sync():
            gather(model(x), "cpu").square().sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of what create_graph=True keeps
            gather(model(x), "cpu").square().sum().backward(create_graph=True)
        assert_same_gradients([gradient.detach().cpu() for gradient in gradients(net)], expected)
        model.zero_grad()


def test_step_over_micro_batches_reduces_gradients_once():
    with simulate(4) as cluster:
        net = nn.Linear(64, 512).to("sim:0")
        model, criterion = DataParallelModel(net), DataParallelCriterion(nn.CrossEntropyLoss())
        step = TrainStep(model, criterion, torch.optim.SGD(net.parameters(), 0.1), micro_batch_size=2)
        size = sum(parameter.nbytes for parameter in net.parameters())
        x, target = torch.randn(64, 64), torch.randint(512, (64,))
        step(x, target)
        before = cluster.moved
        step(x, target)
        moved = cluster.moved - before
        assert size <= moved["sim:2", "sim:0"] <= size + 8 * 16
        assert size <= moved["sim:1", "sim:2"] <= size + 8 * 16  # the parameters, from device to device
        for start in range(0, 64, 16):
            step.add(x[start : start + 16], target[start : start + 16])
        before = cluster.moved
        step.apply()
        assert (cluster.moved - before)["sim:2", "sim:0"] == size


def test_failed_accumulation_discards_deferred_gradients(double):
    net, x, target = build_net(), torch.randn(12, 4), torch.randint(5, (12,))
    model = DataParallelModel(net, CPUS)
    step = TrainStep(model, DataParallelCriterion(nn.CrossEntropyLoss()), torch.optim.SGD(net.parameters(), 0.1))
    step.add(x, target)
    with pytest.raises(IndexError):
        step.add(x, target + 100)
    _, expected = plain_program(copy.deepcopy(net), nn.CrossEntropyLoss(), x, target)
    step(x, target)
    assert_same_gradients(gradients(net), expected)
