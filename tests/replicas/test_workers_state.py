"""Blocks of torch around the call of a model: its replicas see what the plain program would see."""

import contextvars

import pytest
import torch
from helpers.problems import assert_same_gradients, build_net, gradients
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from balanced_parallel import DataParallelCriterion, DataParallelModel, convert_sync_batchnorm, gather, simulate

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
