"""Blocks of torch around the call of a model: its replicas see what the plain program would see.

Thread-local state of the caller, seen by a new thread: each kind must be carried.
"""

import contextvars
import threading

import pytest
import torch
from helpers.problems import assert_same_gradients, build_net, gradients
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from balanced_parallel import DataParallelCriterion, DataParallelModel, convert_sync_batchnorm, gather, simulate
from balanced_parallel.replicas.workers import ThreadState

LAYOUTS = [["sim:0", "sim:1", "sim:2"], ["sim:0", "sim:0", "cpu"]]


@pytest.mark.parametrize("devices", LAYOUTS, ids=str)
def test_flops_of_all_replicas_are_counted(devices):
    x = torch.randn(9, 4)
    with FlopCounterMode(display=False) as expected:
        loss = build_net()(x).sum()
    forward = sum(expected.get_flop_counts()["Sequential.0"].values())
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    with simulate(3):
        model = DataParallelModel(build_net(), devices)
        for _ in range(5):
            with FlopCounterMode(display=False) as found:
                outputs = model(x)
            first, others = found.get_flop_counts()["DataParallelModel.module.0"], found.get_flop_counts()["Sequential.0"]
            assert sum([*first.values(), *others.values()]) == forward
            assert found.get_total_flops() == expected.get_total_flops()
            with FlopCounterMode(display=False) as found:
                gather(outputs).sum().backward()
            assert found.get_total_flops() == backward.get_total_flops()


class Modules(TorchFunctionMode):
    """Expects one module to run at a time."""

    def __init__(self):
        super().__init__()
        self.places = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            self.places.append(str(args[0].device))
        return func(*args, **(kwargs or {}))


def test_replicas_take_turns_under_a_mode():
    with simulate(3):
        model = DataParallelModel(build_net())
        for _ in range(5):
            with Modules() as mode:
                model(torch.randn(9, 4))
            assert mode.places == ["sim:0", "sim:0", "sim:1", "sim:1", "sim:2", "sim:2"]
        with Modules() as mode:
            DataParallelModel(convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))))(
                torch.randn(9, 4)
            )
        assert mode.places == ["sim:0", "sim:1", "sim:2", "sim:0", "sim:1", "sim:2"]


@pytest.mark.parametrize("devices", LAYOUTS, ids=str)
def test_saved_tensors_of_replicas_are_offloaded(double, devices):
    x = torch.randn(300, 4)
    plain = build_net()
    plain(x).square().sum().backward()
    with simulate(3) as cluster:
        model = DataParallelModel(build_net(), devices)

        def live_of_graph(block):
            before = cluster.live
            with block:
                loss = gather([output.square().sum() for output in model(x)]).sum()
            live = [after - at_first for after, at_first in zip(cluster.live, before, strict=True)]
            loss.backward()
            return live

        kept = live_of_graph(torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
        model.zero_grad()
        offloaded = live_of_graph(torch.autograd.graph.save_on_cpu())
        assert_same_gradients([gradient.cpu() for gradient in gradients(model)], gradients(plain))
        for device in set(devices) - {"cpu"}:
            index = int(device[-1])
            assert offloaded[index] < 0.2 * kept[index]


@pytest.mark.parametrize("devices", LAYOUTS, ids=str)
def test_a_model_inside_of_activation_checkpointing(double, devices):
    x = torch.randn(9, 4)
    plain = build_net()
    plain(x).square().sum().backward()
    with simulate(3):
        model = DataParallelModel(build_net(), devices)
        criterion = DataParallelCriterion(nn.MSELoss(reduction="sum"))
        for _ in range(5):
            model.zero_grad()
            outputs = checkpoint(lambda rows: model(rows).gather(), x, use_reentrant=False)
            criterion([outputs], torch.zeros(9, 5)).backward()
            assert_same_gradients([gradient.cpu() for gradient in gradients(model)], gradients(plain))


def test_default_device_and_context_variables():
    variable = contextvars.ContextVar("variable", default=0.0)

    class Making(nn.Module):
        def forward(self, x):
            return torch.full((len(x),), variable.get()), x

    with simulate(3), torch.device("meta"):
        model = DataParallelModel(Making())
        variable.set(3.0)
        made = model(torch.ones(9, 4, device="cpu"))
        assert {output[0].device.type for output in made} == {"meta"}
    with simulate(3):
        assert gather([output[0] for output in DataParallelModel(Making())(torch.ones(9, 4))]).tolist() == [3.0] * 9


CPU = [torch.device("cpu")]


def current_state():
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        "product": (torch.ones(2, 2, device="cpu") @ torch.ones(2, 2, device="cpu")).dtype,
        "default device": torch.empty(0).device.type,
        "threads": torch.get_num_threads(),
    }


def state_in_thread(state):
    found = {}

    def work():
        with state.enter():
            found.update(current_state())
        found["after"] = current_state()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found


@pytest.mark.parametrize(
    "block",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.autocast("cpu", enabled=False),
        lambda: torch.device("meta"),
    ],
)
def test_entered_state_equals_the_state_of_the_caller(block):
    plain = current_state()
    with block():
        expected = current_state()
        found = state_in_thread(ThreadState(CPU))
    assert found.pop("after") == plain
    assert found == expected


def test_the_number_of_threads_of_an_operator_follows_the_caller():
    """OpenMP has it per thread: a thread that has run an operator keeps its number."""
    go_on, found = threading.Event(), []

    def work():
        torch.ones(100).exp()
        go_on.wait(20)
        found.append(torch.get_num_threads())
        with state.enter():
            found.append(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        state = ThreadState(CPU)
    finally:
        torch.set_num_threads(before)
    go_on.set()
    thread.join()
    assert found == [before, before + 1]


def in_thread(work):
    """Returns the result of ``work`` in another thread, with the state of this one. Nothing of it stays there."""
    state, found = ThreadState(CPU), []

    def run():
        with state.enter():
            found.append(work())
        found.append(ThreadState(CPU))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, after = found
    assert (after.saved_tensor_hooks, after.function_modes, after.dispatch_modes) == (None, (), ())
    return result


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append((threading.get_ident(), func.__name__))
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names, self.entered = [], 0

    def __enter__(self):
        self.entered += 1
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append((threading.get_ident(), func.__name__))
        return func(*args, **(kwargs or {}))


def compute():
    return threading.get_ident(), torch.ones(2, device="cpu").exp()


@pytest.mark.parametrize(("kind", "name"), [(Functions, "exp"), (Operators, "exp.default")])
def test_modes_are_carried_and_not_entered_again(kind, name):
    with kind() as outer, kind() as inner:
        assert ThreadState(CPU).needs_turns
        outer.names.clear()
        ident, _ = in_thread(compute)
    for mode in (outer, inner):
        assert (ident, name) in mode.names
        assert getattr(mode, "entered", 1) == 1
    assert not ThreadState(CPU).needs_turns


def test_the_order_of_modes_is_carried():
    order = []

    class First(Functions):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            order.append("first")
            return super().__torch_function__(func, types, args, kwargs)

    class Second(Functions):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            order.append("second")
            return super().__torch_function__(func, types, args, kwargs)

    x = torch.ones(2)
    with First(), torch.device("meta"), Second():
        state_device = in_thread(lambda: torch.empty(1).device.type)
        order.clear()
        in_thread(x.exp)
    assert state_device == "meta"
    assert order == ["second", "first"]


def test_fake_tensors_are_made_in_other_threads_too():
    with FakeTensorMode() as mode:
        _, made = in_thread(compute)
    assert made.fake_mode is mode


def test_the_default_device_needs_no_turns():
    with torch.device("meta"):
        assert not ThreadState(CPU).needs_turns
