"""Writes by optimizers and through ``.data`` that torch's version counter does not record."""

import contextlib
import copy
import gc
import io
import warnings

import pytest
import torch
from helpers.problems import CLASSES, build_net
from helpers.updates import Head, assert_equal, random_batches, values_of
from torch import nn

from balanced_parallel import BalancedOptimizer, DataParallelCriterion, DataParallelModel, TrainStep, gather, simulate


class Fused(torch.optim.AdamW):
    """Writes as fused kernels do: no version counter moves."""

    def step(self, closure=None):
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.param_groups[0]["params"])):
            return super().step(closure)


def fused_optimizer(parameters, device):
    return Fused(parameters, 0.05) if device.startswith("sim") else torch.optim.AdamW(parameters, 0.05, fused=True)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("devices", [["cpu"], ["sim:0", "sim:1"], ["cpu", "sim:0", "sim:1"]], ids=str)
@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_fused_optimizer_trains_all_replicas(devices, micro_batch_size, scaled):
    def trained(devices):
        net, head = build_net(), Head()
        model = DataParallelModel(net, devices)
        criterion = DataParallelCriterion(head, weight=lambda x, y: x.size(0))
        criterion.to(devices[0])
        optimizer = fused_optimizer([*net.parameters(), *head.parameters()], devices[0])
        # the first steps change nothing
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: float(number > 2))
        scaler = torch.amp.GradScaler("cpu" if devices[0] == "cpu" else "sim", init_scale=64.0, enabled=scaled)
        step = TrainStep(model, criterion, optimizer, micro_batch_size=micro_batch_size, scheduler=scheduler)
        for number, (x, y) in enumerate(random_batches(8)):
            if number % 2:
                step(x, y)
            else:
                optimizer.zero_grad()
                scaler.scale(criterion(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
        return values_of(net, head)

    torch.manual_seed(3)
    expected = trained(["cpu"])
    with simulate(2):
        torch.manual_seed(3)
        assert_equal(trained(devices), expected)


@pytest.mark.usefixtures("double")
def test_optimizer_step_copies_only_its_parameters():
    with simulate(2) as cluster:
        net, other = nn.Linear(64, 64).to("sim:0"), nn.Linear(64, 64).to("sim:0")
        net.bias.requires_grad_(False)
        model, x = DataParallelModel(net), torch.randn(4, 64)
        mine, theirs = Fused(net.parameters(), 0.1), Fused(other.parameters(), 0.1)

        def moved_by_a_forward():
            before = cluster.moved
            loss = gather(model(x)).sum() + other(x.to("sim:0")).sum()
            moved = (cluster.moved - before)["sim:0", "sim:1"]
            loss.backward()
            return moved

        still = [moved_by_a_forward() for _ in range(4)][-1]
        theirs.step()
        assert moved_by_a_forward() == still
        mine.step()
        assert moved_by_a_forward() == still + net.weight.nbytes
        assert moved_by_a_forward() == still


@pytest.mark.usefixtures("double")
def test_reading_data_copies_the_parameter_while_the_result_lives():
    with simulate(2) as cluster:
        net = nn.Linear(64, 64).to("sim:0")
        model, x = DataParallelModel(net), torch.randn(4, 64)

        def moved_by_a_forward():
            before = cluster.moved
            model(x)
            return (cluster.moved - before)["sim:0", "sim:1"]

        still = [moved_by_a_forward() for _ in range(4)][-1]
        held = net.weight.data
        assert [moved_by_a_forward() for _ in range(3)] == [still + net.weight.nbytes] * 3
        del held
        assert moved_by_a_forward() == still + net.weight.nbytes
        assert moved_by_a_forward() == still
        net.to("sim:0")
        assert moved_by_a_forward() == still


@pytest.mark.usefixtures("double")
def test_parameters_keep_their_class_and_serialization():
    with simulate(3):
        net = build_net().to("sim:0")
        model = DataParallelModel(net)
        optimizer = torch.optim.AdamW(net.parameters())
        gather(model(torch.randn(5, 4))).sum().backward()
        optimizer.step()
        kept = net[0].weight.data
        assert all(type(parameter) is nn.Parameter and not vars(parameter) for parameter in net.parameters())
        assert type(kept) is torch.Tensor
        assert type(net[0].weight.detach()) is torch.Tensor
        assert all(type(parameter) is nn.Parameter for parameter in copy.deepcopy(model).parameters())
        net.to("cpu")
        assert net[0].weight.data.device.type == "cpu"
        for saved in (net.state_dict(), net[0].weight, list(net.parameters())):
            file = io.BytesIO()
            torch.save(saved, file)
            assert b"balanced_parallel" not in file.getvalue()
            file.seek(0)
            torch.load(file, weights_only=True)
        net.half()
        assert net[0].weight.dtype == torch.float16
    file = io.BytesIO()
    torch.save(net, file)
    assert b"balanced_parallel" not in file.getvalue()


@pytest.mark.usefixtures("double")
def test_records_are_removed_with_the_replicas():
    from balanced_parallel.replicas.untracked_writes import _listening

    gc.collect()
    before = len(_listening)
    with simulate(2):
        net = nn.Linear(2, 2)
        model = DataParallelModel(net)
        model(torch.randn(4, 2))
        assert len(_listening) == before + 1
        del model
        gc.collect()
    assert len(_listening) == before


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("balanced", [False, True])
def test_an_optimizer_that_writes_through_data_trains_all_replicas(micro_batch_size, balanced):
    class Old(torch.optim.Optimizer):  # as many were written, and still are
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self):
            for parameter in self.param_groups[0]["params"]:
                parameter.data.sub_(parameter.grad)

    losses = {}
    for devices in (None, 3):
        with simulate(devices) if devices else contextlib.nullcontext():
            net = build_net()
            model = DataParallelModel(net, None if devices else ["cpu"])
            optimizer = BalancedOptimizer(model, torch.optim.SGD, lr=1.0) if balanced else Old(net.parameters())
            step = TrainStep(model, DataParallelCriterion(nn.MSELoss()), optimizer, micro_batch_size=micro_batch_size)
            torch.manual_seed(2)
            x = torch.randn(12, 4)
            y = torch.randn(12, CLASSES)
            losses[devices] = []
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(5):
                    losses[devices].append(float(step(x, y)))
                    if balanced:
                        for parameter in net.parameters():
                            parameter.data.clamp_(-0.2, 0.2)
            assert not caught
    torch.testing.assert_close(losses[None], losses[3])
