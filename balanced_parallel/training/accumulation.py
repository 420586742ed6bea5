"""Micro-batches: how a batch is cut into them, and loss, weight and gradients of those since the last update.

Gradients are those of a sum of losses. They are divided by a prediction of the total weight (``divisor``) as they are made. What
the prediction lacks is one factor, before the update.

A weight on a device is copied to the host before the backward of its micro-batch is launched, and read after the last one. So the
host waits for no backward. With float16 the divisor is a power of two, so that a division rounds nothing.

A failure forgets the micro-batches: nobody knows which rows the gradients are of.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..batch.containers import Dims
from ..batch.outputs import PerReplica
from ..batch.plan import split_sizes
from ..batch.rows import Arguments, as_arguments, count_micro_batches, count_rows, cut_batch, detach_outputs
from ..loss.criterion import BatchLosses, DataParallelCriterion
from ..loss.sums import LossSum, Weight, add_up
from ..runtime.collectives import begin_reduction, naming_ranks
from ..runtime.devices import move, start_copy
from ..runtime.values import Precision, scaled
from .strategy import GradientSync, Settings

__all__: list[str] = []


class Accumulation:
    """Micro-batches that are not applied yet, on one rank.

    Args:
        sync: of their gradients.
        criterion: computes the losses.
        trained: the parameters that get gradients, by name.
        device: of the loss.
        precision: of their forward. With float16, gradients are kept near their final size.
        weight_before: the weight of the last update, over everything.
    """

    def __init__(
        self,
        sync: GradientSync,
        criterion: DataParallelCriterion,
        trained: Mapping[str, Tensor],
        device: torch.device,
        precision: Precision,
        weight_before: float,
    ) -> None:
        dtypes = {tensor.dtype.to_real() for tensor in trained.values()}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.total = torch.zeros((), dtype=dtype, device=device)
        self.weight: Weight = 0.0
        self._weight_on_host: Weight | Callable[[], Tensor] = 0.0
        self.is_reduced = False  # over replicas and ranks: nothing can be added
        self._sync = sync
        self._is_mean = criterion.reduction != "sum"
        self._scaler = precision.scaler_on(device)
        self._in_float16 = self._scaler is not None or torch.float16 in dtypes or _autocasts_to_float16(device)
        self._weight_before = weight_before
        self._divisor: Weight = 1.0  # of the gradients that exist
        self._has_gradients = False

    def begin_batch(self, losses: BatchLosses) -> None:
        """Counts the weight that the targets of a batch tell."""
        self._add_weight(losses.weight)
        self._is_mean = self._is_mean and not losses.is_divided

    def backward(self, losses: Sequence[LossSum], followers: int, *, last: bool) -> None:
        """Counts the losses of a micro-batch, and runs its backward.

        Args:
            losses: one for each replica.
            followers: micro-batches of the same batch that follow, and probably weigh as much.
            last: reduces all gradients.
        """
        weights = [1.0 if term.weight is None else term.weight for term in losses]  # a sum counts, but is not divided
        weight = _sum(weights, self.total.device)
        self._add_weight(weight)
        for term in losses:
            self.total = self.total + move(term.total.detach(), self.total.device)
        if last:
            begin_reduction()
            self._sync.start(LossSum(self.total, self.weight))
        self._predict_divisor(weight * followers, last=last)
        roots = [scaled(term.total, self._scaler) for term in losses]
        self._sync.backward(roots, self._divisor, last=last)
        self._has_gradients, self.is_reduced = True, last

    def finish(self, minimum: float, settings: Settings) -> tuple[Tensor, float, Weight]:
        """Reduces what is not reduced yet.

        Args:
            minimum: of the divisor.
            settings: of the ranks, which compare them.

        Returns:
            The loss over everything, its weight, and the factor for the gradients.
        """
        for zeros in self._sync.forwards_without_rows(is_reduced=self.is_reduced):
            self.backward([LossSum(zero, 0.0) for zero in zeros], 0, last=True)
        whole = self._sync.finish(LossSum(self.total, self.weight), settings)
        counted = self._weight_on_host if whole.weight is self.weight else whole.weight
        weight = max(float(counted() if callable(counted) else counted or 0.0), minimum)
        divisor = weight if self._is_mean and weight else 1.0
        loss = whole.total / divisor if weight else torch.full_like(whole.total, torch.nan)
        return loss.to(self.total.dtype), weight, self._divisor * self._sync.gradient_scale / divisor

    def _predict_divisor(self, to_come: Weight, *, last: bool) -> None:
        if not self._is_mean:
            return
        expected = _sum([self.weight, to_come], self.total.device)
        if not self._in_float16:
            if not self._has_gradients:
                self._divisor = _positive(self._sync.first_divisor(expected, self._weight_before))
            return
        before, whole = self._divisor, self._sync.whole_weight(expected, last=last)
        near = power_of_two(whole if last else larger(whole, self._weight_before), otherwise=before)
        self._divisor = near if last else larger(near, before)
        if self._has_gradients and (isinstance(self._divisor, Tensor) or self._divisor != before):
            self._sync.rescale(before / self._divisor)

    def _add_weight(self, weight: Weight) -> None:
        """Adds a weight. A sum on a device starts its way to the host."""
        before, self.weight = self.weight, _sum([self.weight, weight], self.total.device)
        if self.weight is not before:
            self._weight_on_host = start_copy(self.weight) if isinstance(self.weight, Tensor) else self.weight


def _autocasts_to_float16(device: torch.device) -> bool:
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.float16


def _positive(divisor: float) -> float:
    return divisor if 0 < divisor < math.inf else 1.0


def _sum(weights: Sequence[Weight], device: torch.device) -> Weight:
    """Returns the sum of weights. It is a number if all are on the host, and no device is read."""
    on_devices = [weight for weight in weights if isinstance(weight, Tensor) and not weight.is_cpu]
    on_host = float(sum(float(weight) for weight in weights if not isinstance(weight, Tensor) or weight.is_cpu))
    if not on_devices:
        return on_host
    return add_up([*on_devices, on_host] if on_host else on_devices, device)


def power_of_two(number: Weight, otherwise: Weight = 1.0) -> Weight:
    """Returns the power of two nearest to a number, on a logarithmic scale; ``otherwise`` for 0, negative and infinite ones."""
    if not isinstance(number, Tensor):
        return 2.0 ** round(math.log2(number)) if 0 < number < math.inf else otherwise
    number = number.float()
    mantissa, _ = torch.frexp(number)  # number = mantissa * 2**exponent, and 0.5 <= mantissa < 1
    power = number / torch.where(mantissa < math.sqrt(0.5), 2 * mantissa, mantissa)
    return torch.where((number > 0) & (number < math.inf), power, otherwise)


def larger(number: Weight, other: Weight) -> Weight:
    """Returns the larger of two numbers."""
    if isinstance(number, Tensor):
        return number.clamp(min=other)
    return other.clamp(min=number) if isinstance(other, Tensor) else max(number, other)


def is_one(factor: Weight) -> bool:
    """Returns True for a number that is 1. A factor on a device is not read."""
    return not isinstance(factor, Tensor) and factor == 1


class Batch(NamedTuple):
    """Rows that the caller passes at once.

    Args:
        inputs: of the model.
        targets: of the criterion, behind the outputs.
        is_whole: an effective batch. Its last backward reduces all gradients.
        outputs: receives the detached outputs of its micro-batches; None keeps none.
        losses: of its micro-batches; None lets the criterion choose.
    """

    inputs: Any
    targets: tuple[Any, ...]
    is_whole: bool
    outputs: list[PerReplica] | None
    losses: BatchLosses | None = None


class MicroBatch(NamedTuple):
    """Rows of a batch that run in one forward.

    Args:
        arguments: of the model.
        targets: of the criterion, behind the outputs.
        followers: micro-batches of the same batch that follow.
        order: the rows of the batch, if they are not in its order.
    """

    arguments: Arguments
    targets: tuple[Any, ...]
    followers: int
    order: list[int] | None = None


class Model(Protocol):
    """A model that returns its outputs per replica."""

    devices: list[torch.device]
    dim: int
    module: nn.Module

    @property
    def out_dims(self) -> Dims:
        """The dimension of the rows in the outputs."""

    @property
    def split(self) -> tuple[float, ...] | None:
        """The weight of each device; None for equal parts."""

    def mark(self, arguments: Arguments) -> Arguments:
        """Returns the arguments with the dimensions of their rows."""

    def modules(self) -> Iterator[nn.Module]:
        """Yields all modules."""

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module. Returns a :class:`PerReplica`."""


def cut_micro_batches(
    model: Model,
    criterion: DataParallelCriterion,
    sync: GradientSync,
    batch: Batch,
    micro_batch_size: int | None,
) -> list[MicroBatch]:
    """Returns the micro-batches of a batch.

    A batch without rows has no micro-batches, unless other ranks wait in a layer for every rank. Inputs that have no rows, such
    as settings alone, are one.
    """
    arguments = model.mark(as_arguments(batch.inputs))
    marked, target_dim = criterion.mark(batch.targets, {}, model.out_dims)
    rows = count_rows(arguments, model.dim)
    if rows is None:
        return [MicroBatch(arguments, marked.inputs, 0)]
    count = sync.count_micro_batches(count_micro_batches(rows, micro_batch_size, model.split or len(model.devices)))
    parts = cut_batch(arguments, marked.inputs, split_sizes(rows, count), (model.dim, target_dim))
    return [MicroBatch(*part, followers) for part, followers in zip(parts, reversed(range(len(parts))), strict=True)]


def run_forward(
    model: Model, precision: Precision, micro_batch: MicroBatch, losses: BatchLosses, collected: list[PerReplica] | None
) -> list[LossSum]:
    """Runs the model and the criterion. Returns a loss per replica.

    Args:
        collected: receives the detached outputs.
    """
    with precision.autocast(model.devices):
        outputs = model(*micro_batch.arguments.inputs, **micro_batch.arguments.kwargs)
        if collected is not None:
            collected.append(detach_outputs(outputs, micro_batch.order))
        return losses.compute(outputs, *micro_batch.targets)


def most_rows(model: Model, inputs: Any, micro_batch_size: int | None) -> int:
    """Returns the rows of a device in the largest micro-batch; 0 without rows."""
    rows = count_rows(model.mark(as_arguments(inputs)), model.dim) or 0
    shares = model.split or len(model.devices)
    count = count_micro_batches(rows, micro_batch_size, shares)
    return max(split_sizes(-(-rows // count), shares)) if count else 0


class Window:
    """Holds the accumulation of one update, and the weight of the update before (``weight_before``), over everything.

    Args:
        sync: of the gradients.
    """

    def __init__(self, sync: GradientSync) -> None:
        self.sync = sync
        self._accumulation: Accumulation | None = None
        self.waiting: list[Batch] = []  # batches that run in the update
        self.weight_before = 0.0

    @property
    def is_empty(self) -> bool:
        """Returns True between two updates."""
        return self._accumulation is None and not self.waiting

    @contextmanager
    def adding(self, begin: Callable[[float], Accumulation]) -> Iterator[Accumulation]:
        """Yields the accumulation, a new one after an update or a failure.

        Args:
            begin: makes it. The argument is the weight of the update before, over everything.
        """
        with self._discarding_on_failure(has_rows=self._accumulation is not None):
            if self._accumulation is None:
                self._accumulation = begin(self.weight_before)
            yield self._accumulation

    @contextmanager
    def ending(self, weight: float) -> Iterator[None]:
        """Surrounds the update. Nothing is accumulated behind it.

        Args:
            weight: of the update, over everything.
        """
        self._accumulation, self.weight_before = None, weight
        with self._discarding_on_failure():
            yield

    @contextmanager
    def _discarding_on_failure(self, *, has_rows: bool = False) -> Iterator[None]:
        with naming_ranks():
            try:
                yield
            except BaseException as error:
                if has_rows:
                    error.add_note("the rows that were added since the last update are dropped: add them again before apply()")
                self._accumulation, self.waiting = None, []
                self.sync.discard(out_of_memory=isinstance(error, torch.OutOfMemoryError))
                raise

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_accumulation": None, "waiting": []}  # a copy has no gradients
