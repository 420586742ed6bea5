"""Updates of ranks with whole parameters or shards: loss and gradients of the plain program, and one decision of all ranks."""

import warnings

import pytest
import torch
from helpers.fsdp import whole, whole_gradients
from helpers.optimizers import sgd
from helpers.problems import (
    assert_equal,
    assert_same_gradients,
    build_net,
    class_targets,
    gradients,
)
from helpers.ranks import on_ranks, run_ranks
from helpers.slow import slow
from helpers.steps import parallel_step
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    DataParallelModel,
    TrainStep,
    convert_sync_batchnorm,
    parallelize,
    simulate,
)
from balanced_parallel.runtime.collectives import gather_objects

STRATEGIES = ["ddp", "fsdp"]


class Partly(nn.Module):
    """One layer is never used, one only where a rank has enough rows, and a buffer counts the forwards."""

    def __init__(self):
        super().__init__()
        self.net = build_net()
        self.never = nn.Linear(2, 2)
        self.sometimes = nn.Linear(5, 5)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, inputs):
        self.forwards += 1
        outputs = self.net(inputs)
        return outputs + self.sometimes(outputs) if len(inputs) > 2 else outputs


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_uneven_accumulation_and_a_rank_without_rows_equal_the_plain_program(rank, strategy):
    """Windows of different lengths on each rank, three in a row: one rank has no rows at all in the second."""
    torch.set_default_dtype(torch.float64)
    # Each window has the rows of the micro-batches of each rank.
    windows = [[[3, 1], [4]], [[], [2, 2, 3]], [[1], [1, 1]]]
    plain = Partly()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.5)
    model, criterion = parallelize(Partly(), nn.CrossEntropyLoss(), strategy=strategy)
    step = TrainStep(
        model,
        criterion,
        torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5),
        max_grad_norm=0.3,
    )
    for number, window in enumerate(windows):
        sizes = [size for mine in window for size in mine]
        torch.manual_seed(number)
        inputs = torch.randn(sum(sizes), 4)
        targets = class_targets(sum(sizes), ignored=1)
        optimizer.zero_grad()
        total = sum(
            nn.functional.cross_entropy(plain(some), labels, reduction="sum")
            for some, labels in zip(inputs.split(sizes), targets.split(sizes), strict=True)
        )
        loss = total / (targets != -100).sum()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        assert norm > 0.3
        optimizer.step()

        start = sum(len(mine) for mine in window[:rank])
        forwards = model.module.forwards.item()
        for piece in range(start, start + len(window[rank])):
            step.add(inputs.split(sizes)[piece], targets.split(sizes)[piece])
        assert_equal(step.apply(), loss)
        assert_close(step.grad_norm, norm, rtol=1e-10, atol=0.0)
        assert model.module.forwards.item() == forwards + 1  # once per update, on all ranks
        assert_same_gradients(whole_gradients(model.module), gradients(plain))
        assert model.module.never.weight.grad is None
        for one, other in zip(model.module.parameters(), plain.parameters(), strict=True):
            assert_close(whole(one), other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_zero_weight_on_all_ranks_skips_the_update(rank, strategy):
    step = parallel_step(build_net(), strategy=strategy, kind=torch.optim.AdamW)
    before = [whole(parameter).detach().clone() for parameter in step.model.parameters()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert step(torch.randn(3, 4), torch.full((3,), -100)).isnan()
        assert step(torch.randn(0, 4), torch.zeros(0, dtype=torch.long)).isnan()
    assert sum("nothing is updated" in str(warning.message) for warning in caught) == 2
    assert all(
        torch.equal(one, whole(other))
        for one, other in zip(before, step.model.parameters(), strict=True)
    )
    assert not step.optimizer.state


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_gradient_scaler_is_equal_on_all_ranks(rank, strategy):
    """One decision for all ranks to skip a step, and one scale, though only one rank overflows, or has rows at all."""
    model, criterion = parallelize(build_net(), nn.MSELoss(), precision="fp16", strategy=strategy)
    optimizer = sgd(model)
    step = TrainStep(model, criterion, optimizer, precision="fp16", micro_batch_size=2)
    step(torch.randn(3 * rank, 4), torch.rand(3 * rank, 5))
    assert all(gradient.abs().max() < 10 for gradient in whole_gradients(model))  # unscaled on both
    scaler = step.precision.scaler
    scale = scaler.get_scale()
    before = [whole(parameter).detach().clone() for parameter in model.parameters()]
    step(torch.randn(2, 4), torch.full((2, 5), torch.inf if rank == 0 else 1.0))
    assert scaler.get_scale() == scale / 2
    assert all(map(torch.equal, before, map(whole, model.parameters())))
    step(torch.randn(2 * rank, 4), torch.rand(2 * rank, 5))
    after = [whole(parameter) for parameter in model.parameters()]
    assert not torch.equal(before[0], after[0])
    first, second = gather_objects([scaler.get_scale(), after[0].sum().item()])
    assert first == second


def build_with_batch_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5)).double()


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_rank_that_counts_nothing_takes_part_in_batch_norm(rank, strategy):
    plain = build_with_batch_norm()
    net = convert_sync_batchnorm(build_with_batch_norm())
    step = parallel_step(net, strategy=strategy, lr=0.0, micro_batch_size=2)
    torch.manual_seed(1)
    inputs = torch.randn(4, 4, dtype=torch.float64)
    targets = torch.tensor([0, 1, 2, 3])
    mine = slice(0, 4) if rank == 0 else slice(0, 0)
    for _ in range(3):  # gradients are in the buckets of the reducer from the second one on
        step(inputs[mine], targets[mine])
        plain.zero_grad()
        for rows in (slice(0, 2), slice(2, 4)):
            (nn.functional.cross_entropy(plain(inputs[rows]), targets[rows]) / 2).backward()
        assert_same_gradients(whole_gradients(net), gradients(plain))
        assert_close(net[1].running_mean, plain[1].running_mean)


@on_ranks(2)
def test_replicas_of_one_process_are_refused_where_ranks_are_running(rank):
    model, criterion = parallelize(build_net(), nn.MSELoss())
    with pytest.raises(TypeError, match=r"2 ranks are running.*use parallelize"):
        TrainStep(DataParallelModel(build_net(), ["cpu"]), criterion, sgd(model))


def waits_of_a_step(rank, strategy, place, precision, weights=None, rows=(5, 3)):
    with simulate(2) as cluster:
        # FSDP2 casts parameters itself
        settings = {"precision": precision} if strategy == "fsdp" else {}
        model, criterion = parallelize(
            build_net().float(), nn.CrossEntropyLoss(weights), strategy=strategy, **settings
        )
        optimizer = torch.optim.AdamW(model.parameters())
        step = TrainStep(
            model, criterion, optimizer, micro_batch_size=2, max_grad_norm=0.1, precision=precision
        )
        inputs = torch.randn(rows[rank], 4, dtype=torch.float32).pin_memory()
        targets = class_targets(rows[rank], ignored=1).pin_memory()
        if place == "device":
            inputs = inputs.to(cluster.devices[rank])
            targets = targets.to(cluster.devices[rank])
        for _ in range(2):  # the row that runs without rows is moved once
            step(inputs, targets)
        before = len(cluster.waits)
        for _ in range(2):
            loss = step(inputs, targets)
        waits = [str(wait) for wait in cluster.waits[before:]]
        assert loss.isfinite()
        return waits


WEIGHTS = torch.linspace(0.5, 2.0, 5)


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize(
    ("strategy", "precision", "weights"),
    [
        ("ddp", "fp32", None),
        slow("ddp", "fp32", WEIGHTS),
        slow("ddp", "fp16", None),
        ("ddp", "fp16", WEIGHTS),
        slow("fsdp", "fp32", None),
        ("fsdp", "bf16", None),
    ],
)
def test_ranks_wait_for_no_device_but_for_the_scaler(strategy, precision, weights, place):
    for waits in run_ranks(2, waits_of_a_step, strategy, place, precision, weights):
        assert ["item" in wait and "optimizers.py" in wait for wait in waits] == [True, True] * (
            precision == "fp16"
        )


def test_a_rank_with_fewer_rows_than_micro_batches_waits_for_no_device():
    assert run_ranks(2, waits_of_a_step, "fsdp", "host", "fp32", None, (7, 2)) == [[], []]
