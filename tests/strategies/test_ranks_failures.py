"""Failures of one rank in an update: all ranks raise an error, and the step that is repeated has the undisturbed numbers.

An error is injected at each call of an operator, which allocates or exchanges, by the line of the package that makes it.
"""

import functools
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from helpers.fsdp import whole
from helpers.ranks import on_ranks, run_ranks
from helpers.slow import slow, slow_but
from helpers.steps import parallel_step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import balanced_parallel
from balanced_parallel import (
    BalancedOptimizer,
    DataParallelCriterion,
    DiceLoss,
    TrainStep,
    parallelize,
)
from balanced_parallel.batch.rows import Batch
from balanced_parallel.strategies.ranks import GradientRecord, RankModel, RankUpdate
from balanced_parallel.training.optimizers import ParameterUpdate
from balanced_parallel.training.settings import Settings
from balanced_parallel.training.update import Arithmetic, Forwards

PACKAGE = str(Path(balanced_parallel.__file__).parent)
UPDATES = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.out = nn.Linear(7, 5)
        self.register_buffer("scale", torch.ones(7))  # DDP broadcasts it

    def forward(self, rows):
        for block in self.blocks:
            rows = torch.tanh(block(rows)) * self.scale
        return self.out(rows)


def own_loss(output, values):
    return nn.functional.mse_loss(output, values)


def two_losses(output, values):
    return {
        "first": nn.functional.mse_loss(output, values),
        "second": nn.functional.l1_loss(output, values),
    }


CRITERIA = {
    "known": nn.MSELoss,
    "own": lambda: own_loss,
    "several": lambda: two_losses,
    "dice": DiceLoss,
}


class Injector(TorchDispatchMode):
    """Raises an error in place of an operator, and notes the lines of the package that call operators.

    Those are left out behind which nobody can be told: in the reducer, in a block of FSDP2, and between sums of the statistics of
    a loss.
    """

    def __init__(self, place=None, error=ValueError):
        super().__init__()
        self.place = place
        self.error = error
        self.places = []
        self.is_on = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.is_on:
            place = self._caller(function)
            if place is not None and place not in self.places:
                self.places.append(place)
                if place == self.place:
                    self.is_on = False
                    raise self.error("injected")
        return function(*args, **(kwargs or {}))

    def _caller(self, function):
        lines = []
        frame = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(PACKAGE):
                lines.append(
                    f"{code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno} {code.co_name}"
                )
            frame = frame.f_back
        in_block = any(
            "strategies/fsdp" in line and line.split()[-1] in ("_call", "run_backward")
            for line in lines
        )
        is_exchange = "c10d" in str(function)
        in_reducer = lines[0].endswith(" rebuild_buckets") or (
            is_exchange and any(line.endswith(" run_backward") for line in lines)
        )
        in_sums = lines[0].endswith((" _sum_over_ranks", " sum_over_ranks"))
        if in_block or in_reducer or in_sums:
            return None
        return (str(function) if is_exchange else "", *lines[:3])


def batch(number, rank):
    generator = torch.Generator().manual_seed(number)
    rows = slice(0, 4) if rank == 0 else slice(4, 10)
    inputs = torch.randn(10, 7, generator=generator)
    return inputs[rows], torch.rand(10, 5, generator=generator)[rows]


def train(rank, strategy, loss, reproducible, update, injector, monkeypatch):
    """Returns the losses and weights of some updates, and the errors on the way. A step that fails is repeated."""
    torch.manual_seed(0)
    step = parallel_step(
        Net(),
        CRITERIA[loss](),
        devices=["cpu"],
        strategy=strategy,
        micro_batch_size=2,
        reproducible=reproducible,
        max_grad_norm=1.0,
    )
    values = []
    errors = []
    begin = Forwards.updating
    check = Settings.check
    run = ParameterUpdate.run
    share = RankModel.share_buffers

    def begun(self, work):
        injector.is_on = True
        return begin(self, work)

    def shared(*args, **settings):
        # Ranks of FSDP2 go on to their clipping, and those with another loss learn its kind in the first update.
        injector.is_on = injector.is_on and strategy == "ddp" and (update > 0 or loss == "known")
        return share(*args, **settings)

    def agreed(*args, **kwargs):
        # The clipping of FSDP2 is a collective of torch, and the reducer of DDP has some after the first update.
        injector.is_on = strategy == "ddp" and update > 0
        return check(*args, **kwargs)

    def ended(*args):
        injector.is_on = False
        return run(*args)

    def attempt(number):
        try:
            values.append(step(*batch(number, rank)))
        except Exception as error:  # noqa: BLE001 - of any kind
            errors.append(f"{type(error).__name__}: {error}")

    for number in range(UPDATES):
        if number == update and injector is None:
            attempt(number)
        elif number == update:
            with monkeypatch.context() as patch, injector:
                patch.setattr(Forwards, "updating", begun)
                patch.setattr(RankModel, "share_buffers", shared)
                patch.setattr(Settings, "check", agreed)
                patch.setattr(ParameterUpdate, "run", ended)
                attempt(number)
            injector.is_on = False
        try:
            if len(values) == number:
                values.append(step(*batch(number, rank)))
        except ValueError as error:
            return [], [*errors, str(error)]  # One rank alone has made the update, or not.
    weights = [whole(each).detach().clone() for each in step.model.parameters()]
    return [*values, *weights], errors


def check_failures(rank, strategy, loss, reproducible, update, error, every):
    """Returns the places in which an error was injected on the last rank: some of all."""
    monkeypatch = pytest.MonkeyPatch()
    injector = Injector() if rank == 1 else None
    expected, _ = train(rank, strategy, loss, reproducible, update, injector, monkeypatch)
    places = [injector and injector.places[::every]]
    dist.broadcast_object_list(places, src=1)
    tolerance = 0 if reproducible == "bits" else 1e-6
    for place in places[0]:
        injector = Injector(place, error) if rank == 1 else None
        found, errors = train(rank, strategy, loss, reproducible, update, injector, monkeypatch)
        if not found:
            assert "the ranks differ" in errors[-1], (place, errors)
            assert "failed with" in errors[-1], (place, errors)
            continue
        # No rank has one if a comparison of a loss with parts of it is left out.
        counts = [0, 0]
        dist.all_gather_object(counts, len(errors))
        assert counts in ([1, 1], [0, 0]), (place, errors)
        assert all(re.search("injected|1 of 2 ranks", error) for error in errors), (place, errors)
        for tensor, undisturbed in zip(found, expected, strict=True):
            assert torch.allclose(tensor, undisturbed, rtol=tolerance, atol=tolerance), place
    return places[0]


TABLE = [
    ("ddp", "known", False, 1, ValueError, 3),
    ("fsdp", "known", False, 1, ValueError, 3),
    slow("ddp", "known", False, 1, ValueError, 1),
    slow("fsdp", "known", False, 1, ValueError, 1),
    slow("ddp", "known", "bits", 1, ValueError, 1),
    slow("ddp", "several", True, 1, torch.OutOfMemoryError, 1),
    slow("fsdp", "own", False, 1, ValueError, 1),
]


@pytest.mark.parametrize(("strategy", "loss", "reproducible", "update", "error", "every"), TABLE)
def test_a_failure_of_one_rank_is_told_wherever_it_is_and_the_step_is_repeated(
    strategy, loss, reproducible, update, error, every
):
    settings = strategy, loss, reproducible, update, error, every
    places, _ = run_ranks(2, check_failures, *settings)
    assert len(places) * every > 8


def check_failed_plan(rank, strategy):
    """Rank 1 fails before it has told the number of its micro-batches, in the second of three updates."""
    torch.manual_seed(0)
    step = parallel_step(
        Net(),
        two_losses,
        devices=["cpu"],
        strategy=strategy,
        weight={"first": count, "second": count},
        micro_batch_size=2,
    )
    losses = []
    errors = []
    for number in range(3):
        with pytest.MonkeyPatch.context() as patch:
            if number == 1 and rank == 1:
                patch.setattr(Batch, "plan", fail)
            if number == 1:
                with pytest.raises(Exception, match="no plan") as caught:
                    step(*batch(number, rank))
                errors.append(type(caught.value).__name__)
        losses.append(step(*batch(number, rank)))
    return torch.stack(losses), errors


def count(values):
    return torch.tensor(values.numel())


def fail(*arguments):
    raise ValueError("no plan")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_fails_before_it_has_a_plan_for_a_loss_whose_divisors_are_asked(strategy):
    (losses, errors), (others, errors_there) = run_ranks(2, check_failed_plan, strategy)
    assert losses.isfinite().all()
    assert torch.equal(losses, others)
    assert (errors, errors_there) == (["ElsewhereFailure"], ["ValueError"])


def mean_of_squares_or_of_sizes(output, targets, flags):
    loss = nn.functional.l1_loss if flags.any() else nn.functional.mse_loss
    return loss(output, targets)


@on_ranks(2)
def test_a_loss_that_changes_between_micro_batches_is_told_to_a_rank_without_rows(rank):
    """The other rank waits for a backward of FSDP2, of which the outputs are needed."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
    criterion = DataParallelCriterion(mean_of_squares_or_of_sizes)
    step = parallel_step(net, criterion, strategy="fsdp", micro_batch_size=2)
    inputs, targets, flags = torch.randn(4, 4), torch.randn(4, 5), torch.zeros(4)
    rows = slice(1) if rank == 0 else slice(1, 4)
    for _ in range(2):
        step(inputs[rows], (targets[rows], flags[rows]))
    flags[3] = 1
    with pytest.raises((ValueError, RuntimeError), match="mse_loss for some rows, and l1_loss"):
        step(inputs[rows], (targets[rows], flags[rows]))


class Counted(nn.Module):
    """Counts its forwards, and fails after some of them, if it is told: a list is not state of the module."""

    def __init__(self, *until_failure):
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.register_buffer("count", torch.zeros(()))
        self.left = [*until_failure]

    def forward(self, rows):
        if self.left:
            self.left.append(self.left.pop() - 1)
            if self.left[0] < 0:
                self.left.clear()
                raise ValueError("no output")
        self.count += 1
        return self.linear(rows)


@on_ranks(2)
def test_rows_of_an_update_that_failed_do_not_choose_the_buffers_of_the_next(rank):
    net = Counted()
    step = parallel_step(net, nn.MSELoss(), ["cpu"], strategy="ddp")
    net.left += [0] * (rank == 0)
    with pytest.raises((ValueError, RuntimeError), match=r"no output|1 of 2 ranks failed"):
        step(torch.randn(2, 7), torch.randn(2, 5))
    rows = 3 * rank  # The rank that failed has none now.
    step(torch.randn(rows, 7), torch.randn(rows, 5))
    assert net.count == 2  # of the rank with rows


@pytest.mark.parametrize("forwards", [0, 1, 2])
@on_ranks(2)
def test_a_rank_fails_in_the_small_forwards_of_the_first_reproducible_update(rank, forwards):
    net = Counted(*[forwards] * (rank == 0))
    step = parallel_step(net, nn.MSELoss(), ["cpu"], strategy="ddp", reproducible=True)
    batch = torch.randn(2, 7), torch.randn(2, 5)
    with pytest.raises((ValueError, RuntimeError), match=r"no output|1 of 2 ranks failed"):
        step(*batch)
    losses = step(*batch), step(*batch)
    assert losses[1] < losses[0]


@on_ranks(2, timeout=60)
def test_a_failure_of_surround_is_told(rank):
    """A rank that left the batch out was one update behind, and gradients of two batches were summed."""
    left = [1] * (rank == 1)

    def fail_once():
        if left and not left.clear():
            raise ValueError("no block")
        return nullcontext()

    step = parallel_step(Net(), nn.MSELoss(), ["cpu"], strategy="ddp", surround=fail_once)
    with pytest.raises((ValueError, RuntimeError), match=r"no block|1 of 2 ranks failed"):
        step(*batch(0, rank))
    step(*batch(1, rank))


@on_ranks(2, timeout=60)
def test_a_repeated_step_draws_the_numbers_of_its_first_attempt(rank):
    """Forwards without rows, which a failed rank runs for the others, drew from the generator behind it."""

    def losses(*, fails):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(7, 5), nn.Dropout(0.5))
        settings = {"micro_batch_size": 2, "reproducible": True}
        step = parallel_step(net, nn.MSELoss(), ["cpu"], strategy="fsdp", **settings)
        first = step(*batch(0, rank))

        def shard(*arguments):
            raise ValueError("no shard")

        if not fails:
            return first, step(*batch(1, rank))
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(Batch, "shard", shard)
            with pytest.raises((ValueError, RuntimeError)):
                step(*batch(1, rank))
        return first, step(*batch(1, rank))

    assert losses(fails=True) == losses(fails=False)


class Failing(torch.optim.SGD):
    """Fails where a list, which tests fill, names it."""

    left: ClassVar = []

    def step(self, closure=None):
        super().step(closure)
        self.tick("step")

    @classmethod
    def tick(cls, place, *arguments):
        if place in cls.left:
            cls.left.remove(place)
            raise torch.OutOfMemoryError(f"no memory in the {place}")


def optimizers_of(model, kind):
    """Returns one optimizer of all parameters, or two whose parameters each rank owns in part."""
    if kind == "plain":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    owned = [
        BalancedOptimizer(model, Failing, part.parameters(), shard="parameters", lr=0.1)
        for part in (model.module.out, model.module.blocks)
    ]
    owned[0].register_step_pre_hook(functools.partial(Failing.tick, "hook"))
    return owned


FAILING = {
    "unused": (GradientRecord, "forget_unused"),
    "multiply": (RankUpdate, "multiply"),
    "norm": (Arithmetic, "norm"),
    "clip": (Arithmetic, "clip"),  # The norm comes before it.
    "unscale": (torch.amp.GradScaler, "unscale_"),
}


PLACES = [
    ("fsdp", "multiply", "plain"),
    ("fsdp", "clip", "plain"),
    ("fsdp", "unscale", "plain"),
    ("ddp", "multiply", "owned"),
    ("ddp", "clip", "owned"),
    ("fsdp", "clip", "owned"),
    ("ddp", "unused", "plain"),
    ("fsdp", "norm", "plain"),
    ("fsdp", "norm", "owned"),
    *((strategy, place, "owned") for strategy in ("ddp", "fsdp") for place in ("step", "hook")),
]


@pytest.mark.parametrize(
    ("strategy", "place", "kind"),
    slow_but(PLACES, PLACES[0], PLACES[4], ("ddp", "hook", "owned"), ("fsdp", "step", "owned")),
)
@on_ranks(2)
def test_a_rank_fails_between_the_reduction_and_the_end_of_its_optimizers(
    rank, strategy, place, kind
):
    """The other rank waited for its part of the norm, or for the parameters that it owns, until the timeout."""
    model, criterion = parallelize(Net(), nn.MSELoss(), ["cpu"], strategy=strategy)
    precision = "fp16" if place == "unscale" else "fp32"
    settings = {"precision": precision, "max_grad_norm": 1.0}
    step = TrainStep(model, criterion, optimizers_of(model, kind), **settings)
    step(*batch(0, rank))
    Failing.left += [place] * (rank == 1)
    with pytest.MonkeyPatch.context() as patch:
        if place in FAILING:
            owner, name = FAILING[place]
            call = getattr(owner, name)

            def fail_once(*arguments, **settings):
                Failing.tick(place)
                return call(*arguments, **settings)

            patch.setattr(
                owner, name, staticmethod(fail_once) if owner is Arithmetic else fail_once
            )
        expected = pytest.raises(torch.OutOfMemoryError, match="no memory")
        rows = slice(0 if place == "unused" and rank == 0 else None)
        with expected if rank == 1 else nullcontext():
            step(*[each[rows] for each in batch(1, rank)])
    # A plain optimizer of DDP updates the copy of one rank alone, which the next step tells.
    for parameter in model.parameters() if (strategy, kind) != ("ddp", "plain") else ():
        values = [None, None]
        dist.all_gather_object(values, whole(parameter).detach())
        assert torch.equal(*values)  # Ranks have not parted.
    with pytest.raises(ValueError, match=f"the ranks differ(.|\n)*no memory in the {place}"):
        step(*batch(2, rank))
