"""Blocks of torch around the call of a model: its replicas see what the plain program would see.

Thread-local state of the caller, seen by a new thread: each kind must be carried.
"""

import contextlib
import contextvars

import pytest
import torch
from helpers.problems import assert_same_gradients, build_net, gradients
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from balanced_parallel import (
    DataParallelModel,
    convert_sync_batchnorm,
    gather,
    simulate,
)

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
            first = found.get_flop_counts()["DataParallelModel.module.0"]
            others = found.get_flop_counts()["Sequential.0"]
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
            DataParallelModel(
                convert_sync_batchnorm(
                    nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
                )
            )(torch.randn(9, 4))
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

        kept = live_of_graph(
            torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        )
        model.zero_grad()
        offloaded = live_of_graph(torch.autograd.graph.save_on_cpu())
        assert_same_gradients(gradients(model), gradients(plain))
        for device in set(devices) - {"cpu"}:
            index = int(device[-1])
            assert offloaded[index] < 0.2 * kept[index]


def test_context_variables_reach_the_replicas():
    variable = contextvars.ContextVar("variable", default=0.0)

    class Reads(nn.Module):
        def forward(self, x):
            return x * variable.get()

    with simulate(3):
        model = DataParallelModel(Reads())
        variable.set(3.0)
        assert model(torch.ones(9)).gather().tolist() == [3.0] * 9


class Asks(nn.Module):
    """Returns the state of torch in the thread of the replica."""

    def forward(self, x):
        return {
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "dtype": torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
            "product": (torch.ones(2, 2, device="cpu") @ torch.ones(2, 2, device="cpu")).dtype,
            "default device": torch.empty(0).device.type,
            "threads": torch.get_num_threads(),
        }


@contextlib.contextmanager
def one_thread_more():
    """Changes what OpenMP has per thread: a thread that has run an operator keeps its number."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


BLOCKS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast(
        "cpu", torch.float16
    ),  # threads of torch's own would compute in bfloat16 (pytorch#125186)
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "default device": lambda: torch.device("meta"),
    "threads": one_thread_more,
}


@pytest.mark.parametrize("devices", [["cpu"] * 3, None], ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_around_a_call_reach_the_replicas_and_stay_there_no_longer(block, devices):
    with simulate(3):
        model = DataParallelModel(Asks(), devices)
        x = torch.zeros(3, 2)
        plain = Asks()(None)
        assert [*model(x)] == [plain] * 3
        with BLOCKS[block]():
            expected = Asks()(None)
            assert [*model(x)] == [expected] * 3
        assert (expected == plain) == (block == "no autocast")
        assert [*model(x)] == [plain] * 3
