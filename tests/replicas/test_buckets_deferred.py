"""Deferred gradients: reads and writes of ``parameter.grad`` equal the plain program, and ``no_sync`` reduces once."""

import contextlib
import copy
import gc
import warnings
import weakref

import pytest
import torch
from helpers.problems import CLASSES, assert_same_gradients, build_net, gradients, plain_program
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, gather, simulate
from balanced_parallel.runtime.torch_private import get_gradient

pytestmark = pytest.mark.usefixtures("double", "buckets")


def zero(optimizer, net):
    optimizer.zero_grad()


def zero_in_place(optimizer, net):
    optimizer.zero_grad(set_to_none=False)


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


def double_some(optimizer, net):
    net[0].weight.grad *= 2


def replace_some(optimizer, net):
    net[0].weight.grad = torch.ones_like(net[0].weight)


def clip(optimizer, net):
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)


def step_without_a_reduction(optimizer, net):
    optimizer.step()
    optimizer.zero_grad()


CHANGES = [zero, zero_in_place, zero_the_net, zero_by_hand, delete_by_hand, zero_some, double_some, replace_some, clip]
LAYOUTS = {"one device": ["cpu"] * 3, "three devices": ["sim:0", "sim:1", "sim:2"]}


@pytest.mark.parametrize("between", [*CHANGES, step_without_a_reduction], ids=lambda change: change.__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("begins", ["with nothing", "with gradients"])
def test_reads_and_writes_of_deferred_grad_equal_the_plain_program(between, layout, begins):
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
        with no_sync():
            backward(slice(12, 13))
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


def test_grad_is_the_attribute_of_torch_if_nothing_is_deferred():
    def is_torchs_own():
        return "grad" not in vars(nn.Parameter)

    def backward(model):
        gather(model(torch.randn(6, 4)), "cpu").sum().backward()

    with simulate(3):
        model, other = DataParallelModel(build_net()), DataParallelModel(build_net())
        for end in (model.reduce_gradients, model.zero_grad, lambda: backward(model)):
            with model.no_sync(), other.no_sync():
                backward(model)
                assert not is_torchs_own()
                backward(other)
            end()
            assert not is_torchs_own()
            other.reduce_gradients()
            assert is_torchs_own()


def test_deferred_gradients_do_not_keep_the_replicas_alive():
    with simulate(3):
        model = DataParallelModel(build_net())
        with model.no_sync():
            gather(model(torch.randn(6, 4)), "cpu").sum().backward()
        parameter, seen = model.module[0].weight, weakref.ref(model.replicas)
        del model
        gc.collect()
        assert seen() is None
        assert parameter.grad is None


def test_no_sync_applies_to_the_backward_of_its_forward():
    with simulate(2):
        net = build_net()
        model = DataParallelModel(net)
        first = gather(model(torch.randn(4, 4)), "cpu").sum()
        with model.no_sync():
            second = gather(model(torch.randn(4, 4)), "cpu").sum()
        third = gather(model(torch.randn(4, 4)), "cpu").sum()
        first.backward()
        assert all(get_gradient(parameter) is not None for parameter in net.parameters())
        before = [get_gradient(parameter).clone() for parameter in net.parameters()]
        second.backward()
        assert all(get_gradient(one).equal(then) for one, then in zip(net.parameters(), before, strict=True))
        third.backward()
        assert not any(get_gradient(one).equal(then) for one, then in zip(net.parameters(), before, strict=True))
        assert "grad" not in vars(nn.Parameter)  # nothing is left with the replicas


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
        assert size <= moved["sim:0", "sim:2"] <= size + 8 * 16
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
