"""``micro_batch_size="auto"``: after an out of memory, the run is that of smaller micro-batches from the start.

Under torchrun, ranks agree, and none of them waits forever.
"""

import gc
import logging
import operator
import random

import pytest
import torch
from helpers.optimizers import balanced_or_plain
from helpers.problems import CLASSES, class_batch, class_targets
from helpers.ranks import on_ranks
from helpers.releases import released_at_once
from helpers.slow import slow
from helpers.steps import make_step, run
from torch import nn
from torch.testing import assert_close

from balanced_parallel import TrainStep, convert_sync_batchnorm, parallelize, simulate

ROWS = 11


class Counting(nn.Module):
    """Changes a buffer in place, and replaces another, in each forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))
        self.register_buffer("decay", torch.ones(6))

    def forward(self, inputs):
        self.calls += 1
        self.decay = 0.9 * self.decay
        return inputs * self.decay


def build(*more):
    torch.manual_seed(3)
    # The norm takes one row, and DDP broadcasts its statistics.
    norm = nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2), nn.Flatten()
    return nn.Sequential(
        nn.Linear(4, 6), *norm, nn.Dropout(0.3), *more, nn.Tanh(), nn.Linear(6, CLASSES)
    )


def build_counting():
    return build(Counting())


class Run:
    """A run of several steps, on simulated devices or on that of a rank."""

    def __init__(
        self, devices=None, *, rank=None, balanced=False, build=build_counting, **settings
    ):
        self.rank = rank
        net = build()
        if devices is not None:
            net.to(devices[0])
        self.model, criterion = parallelize(
            net, nn.CrossEntropyLoss(), devices, strategy="replicas" if devices else "ddp"
        )
        made = balanced_or_plain(self.model, torch.optim.AdamW, balanced)
        settings = {"micro_batch_size": "auto", "max_grad_norm": 0.5, **settings}
        self.step = TrainStep(self.model, criterion, made, **settings)
        self.losses = []
        torch.manual_seed(7)

    def batch(self, number):
        torch.manual_seed(100 + number)
        mine = slice(0 if self.rank is None else (-7, -4)[self.rank], None)
        return torch.randn(ROWS, 4)[mine], class_targets(ROWS, ignored=2)[mine]

    def train(self, number, add=False):
        inputs, targets = self.batch(number)
        torch.manual_seed(number)
        if add:
            rows = 6 if self.rank is None else 3
            self.step.add(inputs[:rows], targets[:rows])
            self.step.add(inputs[rows:], targets[rows:])
            self.losses.append(self.step.apply().item())
        else:
            self.losses.append(self.step(inputs, targets).item())
        torch.randn(1)  # the numbers go on from where the step has left them
        return self

    def result(self):
        tensors = [tensor.detach().cpu() for tensor in self.model.state_dict().values()]
        devices = range(2) if self.rank is None else [self.rank]
        return [
            torch.tensor(self.losses),
            *tensors,
            torch.get_rng_state(),
            *map(torch.sim.get_rng_state, devices),
        ]


def check_faults(rank, ranks, balanced, precision, add, faults):
    """Whatever fails on one rank, the result is that of some micro-batch size from that step on, bit for bit."""
    choose = random.Random(0)
    seen = set()
    with simulate(2) as cluster:
        place = {"devices": cluster.devices} if ranks == 1 else {"rank": rank, "build": build}

        def train(sizes, fault=None, allocation=0):
            some = Run(**place, balanced=balanced, precision=precision)
            for number, size in enumerate(sizes):
                if size != "auto":
                    some.step.micro_batch_size = size
                if number == 2 and fault == rank:
                    cluster.fail_allocation(allocation)
                some.train(number, add)
            return some

        expected = {size: train([None] * 2 + [size] * 2).result() for size in (None, 4, 3, 2, 1)}
        some = train([None] * 2)
        before = cluster.allocations
        some.train(2, add)
        count = cluster.allocations - before
        for _ in range(faults):
            fault = choose.randrange(ranks)
            allocation = 1 + int(choose.random() * count)
            some = train(["auto"] * 4, fault, allocation)
            size = some.step.micro_batch_size
            assert all(map(torch.equal, some.result(), expected[size])), (fault, allocation, count)
            seen.add(size)
    return seen


@pytest.mark.parametrize(
    ("ranks", "balanced", "precision", "add"),
    [
        (1, True, "fp16", True),
        (2, True, "fp16", True),
        slow(1, False, "fp32", False),
        slow(2, False, "bf16", False),
    ],
)
def test_any_failed_allocation_leaves_the_run_of_smaller_micro_batches(
    ranks, balanced, precision, add
):
    seen = run(ranks, check_faults, balanced, precision, add, 6 if ranks == 1 else 4)
    assert all(each == seen[0] for each in seen)
    assert len(seen[0]) > 1
    half = {3} if ranks == 1 else {4, 2}  # The rows are those of the rank that failed.
    assert seen[0] <= {None, *({2} if add else half)}


def wide():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, CLASSES)
    )


@released_at_once
@pytest.mark.parametrize(("balanced", "add"), [(True, True), slow(False, False)])
def test_training_within_a_part_of_the_memory_has_the_losses_of_all_of_it(balanced, add):
    def run(rows=600):
        torch.manual_seed(0)
        inputs, targets = class_batch(rows, ignored=rows // 12)
        some = Run(["sim:0", "sim:1"], build=wide, balanced=balanced)
        for _ in range(3):
            if add:
                some.step.add(inputs[:400], targets[:400])
                some.step.add(inputs[400:], targets[400:])
                some.losses.append(some.step.apply())
            else:
                some.losses.append(some.step(inputs, targets))
        return torch.stack(some.losses).cpu(), some.step.micro_batch_size

    with simulate(2) as cluster:
        expected, _ = run()
        peak = max(cluster.peak)
    with simulate(2) as cluster:
        run(rows=2)
        least = max(cluster.peak)
    sizes = []
    for part in (0.9, 0.5, 0.3, 0.1):
        with simulate(2, memory=int(least + part * (peak - least))):
            losses, size = run()
        assert_close(losses, expected, rtol=1e-5, atol=1e-6)
        sizes.append(size)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 1


DOES_NOT_FIT = r"one row per device does not fit: sim out of memory.* GPU 1 .* memory.fit\(step, inputs, targets\) tells "


def test_a_row_that_does_not_fit_is_an_error_that_changes_nothing(caplog):
    with simulate(2, memory=["1GiB", "16MiB"]):
        run = Run(["sim:0", "sim:1"], build=wide, micro_batch_size="auto")
        inputs = torch.randn(4, 2**12, 4)
        targets = torch.zeros(4, CLASSES, dtype=torch.long)
        before = [tensor.clone() for tensor in run.result()[1:]]
        with pytest.raises(torch.OutOfMemoryError, match=DOES_NOT_FIT):
            run.step((inputs,), targets)
        assert all(map(torch.equal, before, run.result()[1:]))
        assert run.step.micro_batch_size == 1
        assert run.step(*run.batch(0)).isfinite()
    assert not caplog.records


def test_out_of_memory_without_recovery_names_it():
    with simulate(2, memory=["1GiB", "16MiB"]):
        run = Run(["sim:0", "sim:1"], build=wide, micro_batch_size=None)
        with pytest.raises(torch.OutOfMemoryError, match="sim out of memory") as caught:
            run.step((torch.randn(4, 2**12, 4),), torch.zeros(4, CLASSES, dtype=torch.long))
    assert any(
        "TrainStep(..., micro_batch_size='auto') runs a batch again" in note
        for note in caught.value.__notes__
    )


@pytest.mark.parametrize("balanced", [False, True])
def test_an_optimizer_without_room_for_its_state_says_where(balanced):
    with simulate(1, memory="26MiB"):
        layers = nn.Linear(4, 8), nn.Linear(8, 2**18), nn.AdaptiveAvgPool1d(CLASSES)
        net = nn.Sequential(*layers).to("sim:0")
        settings = {"kind": torch.optim.AdamW, "is_balanced": balanced, "micro_batch_size": "auto"}
        step = make_step(net, devices=[0], **settings)
        with pytest.raises(torch.OutOfMemoryError, match="sim out of memory") as caught:
            step(*class_batch(2))
        (note,) = caught.value.__notes__
        assert note.startswith(
            "This was the optimizer's step, which may have changed some parameters and not others: go on from"
        )
        assert step.micro_batch_size is None


def test_what_was_tried_is_one_line_of_the_log(caplog):
    with simulate(2) as cluster:
        run = Run(cluster.devices).train(0)
        cluster.fail_allocation(60)
        with caplog.at_level(logging.WARNING, "balanced_parallel"):
            run.train(1)
            run.train(2)
    assert [record.getMessage() for record in caplog.records] == [
        "out of memory with 6 rows per device in one forward: from now on at most 3"
    ]


@on_ranks(2)
def test_batch_norm_over_all_ranks_is_refused(rank):
    model, criterion = parallelize(convert_sync_batchnorm(build()), nn.CrossEntropyLoss(), ["cpu"])
    with pytest.raises(ValueError, match="micro_batch_size='auto' with batch norm over all ranks"):
        TrainStep(model, criterion, torch.optim.AdamW(model.parameters()), micro_batch_size="auto")


def live_after(cluster, run):
    gc.collect()
    run.step.optimizer.zero_grad()
    return cluster.live


@released_at_once
def test_nothing_of_the_failed_attempt_stays_in_memory():
    with simulate(2) as cluster:
        run = Run(cluster.devices)
        undisturbed = Run(cluster.devices)
        for number in range(3):
            run.train(number)
        before = cluster.allocations
        run.train(3)
        count = cluster.allocations - before
        live = live_after(cluster, run)
        for number in (count // 8, count // 3, count // 2):
            cluster.fail_allocation(number)
            run.step.micro_batch_size = None
            run.train(4)
            assert run.step.micro_batch_size == 3
            # A buffer is not replaced then.
            assert all(map(operator.le, live_after(cluster, run), live))
        assert undisturbed is not None
