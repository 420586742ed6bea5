"""Whole parameters of ranks: checkpoints, averages of shards, and what is refused."""

import copy
import itertools
from pkgutil import resolve_name

import pytest
import torch
from helpers.problems import build_net
from helpers.ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from balanced_parallel import (
    BalancedOptimizer,
    Checkpoints,
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    parallelize,
    simulate,
)
from balanced_parallel.optim import balanced

ROWS = 11


def build_square():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))


def train(step, numbers, part=slice(None)):
    for number in numbers:
        x, target = torch.randn(2, ROWS, 5, generator=torch.Generator().manual_seed(number))
        step(x[part], target[part])


def make_step(model, criterion, optimizer):
    return TrainStep(model, criterion, optimizer, scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))


SETTINGS = {"lr": 0.05, "precondition_frequency": 2}


def resume(rank, folder):
    torch.set_default_dtype(torch.float64)
    results = []
    for strategy in ("ddp", "fsdp"):
        model, criterion = parallelize(build_square(), nn.MSELoss(), ["cpu"], strategy=strategy)
        step = make_step(model, criterion, BalancedOptimizer(model, resolve_name("pytorch_optimizer.SOAP"), **SETTINGS))
        assert Checkpoints(folder, step=step).load_latest() == 3
        train(step, [3, 4], slice(0, 7) if rank == 0 else slice(7, ROWS))
        checkpoints = Checkpoints(f"{folder} {strategy}", step=step)
        checkpoints.save(5)
        checkpoints.wait()
        whole = [parameter.full_tensor() if strategy == "fsdp" else parameter for parameter in model.parameters()]
        results.append([parameter.detach() for parameter in whole])
    return results


@pytest.mark.slow  # test_whole_parameters loads states in the same layout
@pytest.mark.usefixtures("double")
def test_checkpoints_of_whole_parameters_move_between_layouts(tmp_path):
    net, folder = build_square(), str(tmp_path / "run")
    expected = copy.deepcopy(net)
    plain = DataParallelModel(expected, ["cpu"])
    plain_optimizer = resolve_name("pytorch_optimizer.SOAP")(expected.parameters(), **SETTINGS)
    reference = make_step(plain, DataParallelCriterion(nn.MSELoss()), plain_optimizer)
    train(reference, range(5))

    def replicas(net, folder, number):
        model = DataParallelModel(net)
        optimizer = BalancedOptimizer(model, resolve_name("pytorch_optimizer.SOAP"), **SETTINGS)
        step = make_step(model, DataParallelCriterion(nn.MSELoss()), optimizer)
        checkpoints = Checkpoints(folder, step=step)
        if number:
            assert checkpoints.load_latest() == number
        return step, checkpoints

    with simulate(3):
        step, checkpoints = replicas(net, folder, 0)
        train(step, range(3))
        checkpoints.save(3)
        checkpoints.wait()
    for parameters in itertools.chain.from_iterable(run_ranks(2, resume, folder)):
        torch.testing.assert_close(parameters, [*expected.parameters()], rtol=1e-10, atol=1e-10)
    train(reference, [5])
    for strategy in ("ddp", "fsdp"):
        with simulate(2):
            other = build_square()
            step, checkpoints = replicas(other, f"{folder} {strategy}", 5)
            train(step, [5])
            found = [parameter.cpu() for parameter in other.parameters()]
            torch.testing.assert_close(found, [*expected.parameters()], rtol=1e-10, atol=1e-10)


def check_averages(rank):
    torch.set_default_dtype(torch.float64)
    net, plain = build_net(), build_net()
    average = get_ema_multi_avg_fn(0.9)
    averaged, expected = (AveragedModel(each, multi_avg_fn=average, use_buffers=True) for each in (net, plain))
    model, criterion = parallelize(net, nn.CrossEntropyLoss(), ["cpu"], strategy="fsdp")
    parallelize(averaged.module, device_ids=["cpu"], strategy="fsdp")
    step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.randint(5, (6,))
    for _ in range(3):
        step(x.split([4, 2])[rank], y.split([4, 2])[rank])
        averaged.update_parameters(model.module)
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
        expected.update_parameters(plain)
    state = get_model_state_dict(averaged, options=StateDictOptions(full_state_dict=True))
    torch.testing.assert_close(dict(state) if rank == 0 else {}, dict(expected.state_dict()) if rank == 0 else {})
    torch.testing.assert_close(averaged(x), expected(x))
    assert next(averaged.parameters()).to_local().numel() < next(plain.parameters()).numel()


def test_averages_of_shards_equal_those_of_the_plain_program():
    run_ranks(2, check_averages)


def gathered_shapes(rank):
    """Returns the shapes that a step of Adafactor gathers, with a frozen layer."""
    net = nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 5)).requires_grad_(False)
    net[1].requires_grad_(True)
    model, criterion = parallelize(net, nn.CrossEntropyLoss(), ["cpu"], strategy="fsdp")
    step = TrainStep(model, criterion, BalancedOptimizer(model, torch.optim.Adafactor, lr=0.1))
    shapes, whole = [], balanced._whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balanced, "_whole", lambda tensor: shapes.append(tuple(tensor.shape)) or whole(tensor))
        step(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    return shapes


def test_frozen_shards_are_not_gathered():
    for shapes in run_ranks(2, gathered_shapes):
        assert shapes == [(5, 32), (5, 32), (5,), (5,)]  # values and gradients


def check_refusals(rank):
    net = nn.Sequential(nn.Linear(4, 4, bias=False))
    model, criterion = parallelize(net, nn.MSELoss(), ["cpu"], strategy="fsdp")
    with pytest.raises(TypeError, match="Muon over shards of strategy='fsdp' differs by percents"):
        TrainStep(model, criterion, torch.optim.Muon(model.parameters()))
    model, _ = parallelize(build_net(), nn.MSELoss(), ["cpu"])
    with pytest.raises(ValueError, match="shard='elements' with ranks of DDP, expected 'parameters' or None"):
        BalancedOptimizer(model, torch.optim.SGD, shard="elements", lr=0.1)
    with pytest.raises(TypeError, match="Prodigy with shard='parameters' differs from Prodigy over the whole model"):
        BalancedOptimizer(model, resolve_name("pytorch_optimizer.Prodigy"))


def test_inexact_optimizers_of_ranks_raise_an_error():
    run_ranks(2, check_refusals)
