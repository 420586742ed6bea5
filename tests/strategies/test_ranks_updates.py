"""Updates of ranks with whole parameters or shards: loss and gradients of the plain program, and one decision of all ranks."""

import copy
import itertools
import warnings

import pytest
import torch
from helpers.fsdp import whole, whole_gradients
from helpers.optimizers import sgd
from helpers.problems import (
    build_net,
    class_targets,
)
from helpers.ranks import on_ranks, run_ranks
from helpers.slow import slow, slow_but
from helpers.steps import parallel_step
from torch import nn

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    parallelize,
    simulate,
)
from balanced_parallel.runtime.collectives import gather_objects

STRATEGIES = ["ddp", "fsdp"]


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


class Counter(nn.Module):
    """Makes a buffer in its first forward, which counts forwards."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.seen += 1
        return self.layer(x) * self.seen


class Shifted(Counter):
    """Makes a buffer of the first rows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x):
        if self.mean is None:
            self.mean = x.mean(0)
        return self.layer(x - self.mean)


@pytest.mark.parametrize(
    ("build_net", "strategy", "by_hand"),
    slow_but(
        [*itertools.product([Counter, Shifted], ["ddp", "fsdp"], [False, True])],
        (Counter, "ddp", True),
        (Counter, "ddp", False),
        (Shifted, "ddp", False),
        (Shifted, "fsdp", False),
    ),
)
@on_ranks(2)
def test_a_rank_without_rows_gets_the_buffers_that_a_forward_of_others_has_made(
    rank, build_net, strategy, by_hand
):
    """The broadcast of the buffer was of one rank alone, or each rank counted its own forwards."""
    plain = build_net()
    step = parallel_step(copy.deepcopy(plain), nn.MSELoss(), ["cpu"], strategy=strategy, lr=0.0)
    for sizes in ([0, 6], [6, 0], [2, 4]):
        x, y = torch.randn(6, 4), torch.randn(6, 3)
        expected = nn.functional.mse_loss(plain(x), y)
        rows = x.split(sizes)[rank], y.split(sizes)[rank]
        if by_hand:
            loss = step.criterion(step.model(rows[0]), rows[1])
            loss.backward()
        else:
            loss = step(*rows)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(
            dict(step.model.module.named_buffers()), dict(plain.named_buffers())
        )
    assert "seen" not in step.model.module.state_dict()


class Queue(nn.Linear):
    """Keeps the latest outputs, in a buffer that it writes to, or in another one."""

    def __init__(self, is_written):
        super().__init__(4, 3)
        self.is_written = is_written
        self.register_buffer("latest", torch.zeros(2, 3))

    def forward(self, x):
        output = super().forward(x)
        latest = output[:2].detach()
        if self.is_written:
            self.latest[: len(latest)] = latest
        elif len(latest):
            self.latest = latest.clone()
        return output


@pytest.mark.parametrize(
    ("strategy", "is_written"), [("ddp", True), ("ddp", False), ("fsdp", True)]
)
@pytest.mark.parametrize("by_hand", [False, True])
@on_ranks(2)
def test_a_buffer_of_the_rows_of_a_rank_is_an_error(rank, strategy, is_written, by_hand):
    """A queue of keys had those of the first rank alone, without a word."""
    step = parallel_step(Queue(is_written), nn.MSELoss(), ["cpu"], strategy=strategy, lr=0.0)
    rows = torch.randn(2, 4) + rank, torch.randn(2, 3)
    error = pytest.raises(RuntimeError, match=r"buffer latest on another rank.*SumOverRows")
    with error:
        if by_hand:
            step.criterion(step.model(rows[0]), rows[1]).backward()
        else:
            step(*rows)


class Counting(nn.MSELoss):
    """Counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, output, target):
        self.calls += 1
        return super().forward(output, target)


@on_ranks(2)
def test_a_criterion_that_counts_comes_after_a_forward_by_hand(rank):
    """The numbers of the criterion were not read before that forward, which has no backward."""
    rows = 3 * rank
    model = parallelize(nn.Linear(4, 2), device_ids=["cpu"], strategy="ddp")
    model(torch.randn(rows, 4))
    criterion = DataParallelCriterion(Counting())
    step = TrainStep(model, criterion, sgd(model))
    step(torch.randn(rows, 4), torch.randn(rows, 2))
    assert criterion.module.calls == 1
