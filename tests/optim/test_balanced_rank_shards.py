"""Shards of ranks: their averages, what is gathered for whole parameters, and what is refused."""

import itertools

import pytest
import torch
from helpers.fsdp import whole
from helpers.optimizers import ToStart, sgd
from helpers.problems import build_net
from helpers.ranks import on_ranks
from helpers.slow import slow_but
from helpers.steps import parallel_step
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close

from balanced_parallel import BalancedOptimizer, TrainStep, parallelize
from balanced_parallel.optim import balanced

KINDS = ["SGD", "Adafactor"]


@on_ranks(2)
def test_averages_of_shards_equal_those_of_the_plain_program(rank):
    torch.set_default_dtype(torch.float64)
    net = build_net()
    plain = build_net()
    average = get_ema_multi_avg_fn(0.9)
    averaged, expected = (
        AveragedModel(each, multi_avg_fn=average, use_buffers=True) for each in (net, plain)
    )
    parallelize(averaged.module, device_ids=["cpu"], strategy="fsdp")
    step = parallel_step(net, devices=["cpu"], strategy="fsdp")
    optimizer = sgd(plain)
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    y = torch.randint(5, (6,))
    for _ in range(3):
        step(x.split([4, 2])[rank], y.split([4, 2])[rank])
        averaged.update_parameters(step.model.module)
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
        expected.update_parameters(plain)
    state = get_model_state_dict(averaged, options=StateDictOptions(full_state_dict=True))
    assert_close(dict(state) if rank == 0 else {}, dict(expected.state_dict()) if rank == 0 else {})
    assert_close(averaged(x), expected(x))
    assert next(averaged.parameters()).to_local().numel() < next(plain.parameters()).numel()


def update_by_hand(model, criterion, optimizer, batches):
    """Lines of an old loop that read, change and clear gradients. Returns the norms before clipping."""
    norms = []
    for number, (x, y) in enumerate(batches):
        criterion(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        criterion(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.5 + parameter.detach() * 0.01
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        model.zero_grad(set_to_none=number % 2 == 0)
    return [float(whole(norm)) for norm in norms]


@pytest.mark.parametrize(
    ("strategy", "kind"),
    slow_but([*itertools.product(["ddp", "fsdp"], KINDS)], ("ddp", "Adafactor"), ("fsdp", "SGD")),
)
@on_ranks(2)
def test_old_loops_of_ranks_equal_the_plain_program(rank, strategy, kind):
    torch.set_default_dtype(torch.float64)
    kind = getattr(torch.optim, kind)
    plain = build_net()
    net = build_net()
    generator = torch.Generator().manual_seed(3)
    batches = [
        (torch.randn(7, 4, generator=generator), torch.randint(5, (7,), generator=generator))
        for _ in range(3)
    ]
    expected = update_by_hand(
        plain, nn.CrossEntropyLoss(), kind(plain.parameters(), lr=0.1), batches
    )
    model, criterion = parallelize(net, nn.CrossEntropyLoss(), ["cpu"], strategy=strategy)
    rows = [[5, 2], [0, 7], [2, 5]]
    parts = [
        (x.split(size)[rank], y.split(size)[rank])
        for (x, y), size in zip(batches, rows, strict=True)
    ]
    optimizer = BalancedOptimizer(model, kind, lr=0.1)
    assert_close(update_by_hand(model, criterion, optimizer, parts), expected)
    for parameter, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert_close(balanced._whole(parameter), other)


@on_ranks(2)
def test_frozen_shards_are_not_gathered(rank):
    net = nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 5)).requires_grad_(False)
    net[1].requires_grad_(True)
    step = parallel_step(
        net, devices=["cpu"], strategy="fsdp", kind=torch.optim.Adafactor, is_balanced=True
    )
    shapes = []
    whole = balanced._whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            balanced, "_whole", lambda tensor: shapes.append(tuple(tensor.shape)) or whole(tensor)
        )
        step(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    assert shapes == [(5, 32), (5, 32), (5,), (5,)]  # values and gradients


class Together(ToStart):
    """An optimizer with smaller updates the more parameters it has."""

    def step(self):
        for group in self.param_groups:
            group["lr"] = 0.1 / len(group["params"])
        super().step()


@on_ranks(2)
def test_inexact_optimizers_of_ranks_raise_an_error(rank):
    net = nn.Sequential(nn.Linear(4, 4, bias=False))
    model, criterion = parallelize(net, nn.MSELoss(), ["cpu"], strategy="fsdp")
    with pytest.raises(TypeError, match="Muon over shards of strategy='fsdp' differs by percents"):
        TrainStep(model, criterion, torch.optim.Muon(model.parameters()))
    model, _ = parallelize(build_net(), nn.MSELoss(), ["cpu"])
    with pytest.raises(
        ValueError, match="shard='elements' with ranks of DDP, expected 'parameters' or None"
    ):
        BalancedOptimizer(model, torch.optim.SGD, shard="elements", lr=0.1)
    with pytest.raises(
        TypeError,
        match="Together with shard='parameters' differs from Together over the whole model",
    ):
        BalancedOptimizer(model, Together)
