"""The gradients of an update: their sum over the micro-batches of a process, and the protocol that synchronises them.

Gradients are those of a sum of losses. They are divided by a prediction of the total weight, the divisor, as they are made. It
is chosen once, before the first backward of an update, and is the same on all ranks. The rest is one factor before the update.
With float16 the divisor is a power of two, so that a division rounds nothing, and gradients are near their final size.

A weight on a device starts its way to the host before the backward of its micro-batch, and is read after the last one. So the
host waits for no backward. ::

    sync = gradient_sync(model, criterion).open()     # one for each update
    with sync.accumulating():
        sync.backward(losses, divisor, None)          # micro-batches before the last
    sync.backward(losses, divisor, loss_sum)          # gradients are reduced while it runs
    loss_sum = sync.finish(loss_sum, settings)        # everything is summed
"""

import abc
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..loss.criterion import BatchLosses, DataParallelCriterion
from ..loss.sums import LossSum, Weight, add_up
from ..runtime.devices import move, start_copy
from ..runtime.torch_private import foreach_multiply_, without_compilation
from ..runtime.values import Precision, scaled
from .settings import Settings


class GradientSync(abc.ABC):
    """Synchronises the gradients of a model and its criterion. It has no state of an update."""

    @abc.abstractmethod
    def open(self) -> "UpdateSync":
        """Returns the synchronisation of one update. An update that runs again opens another one."""

    def random_numbers(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Surrounds all work on rows of one update, whose random numbers are those of this process. ``is_last`` ends it."""
        return contextlib.nullcontext()


class UpdateSync(abc.ABC):
    """Synchronises the gradients of one update. Defaults are those of one process."""

    def count_micro_batches(self, count: int) -> int:
        """Returns how many micro-batches to run, if this process needs ``count``."""
        return count

    @abc.abstractmethod
    def divisor(self, expected: Weight, before: float, in_float16: bool) -> Weight:
        """Returns the divisor of all gradients of the update, without waiting for a device. It is the same in all processes.

        ``expected`` is the weight of this process's rows, as far as they are known; ``before``, that of the update before, over
        everything, or 0. In float16, gradients need a divisor near the final one, and a power of two.
        """

    def accumulating(self) -> AbstractContextManager[None]:
        """Surrounds micro-batches before the last, whose gradients stay where they are."""
        return contextlib.nullcontext()

    def forget_forwards(self) -> None:  # noqa: B027 - nothing to do in one process
        """Tells that all forwards of the update were undone, and run again."""

    @abc.abstractmethod
    def forwards_without_rows(self, *, is_reduced: bool) -> Iterator[list[Tensor]]:
        """Takes part in forwards that other processes still make, without rows. Yields zeros for :meth:`backward`.

        ``is_reduced`` tells that this process has run its last backward.
        """

    @abc.abstractmethod
    def backward(self, losses: Sequence[Tensor], divisor: Weight, local: LossSum | None) -> None:
        """Runs backward from the losses of a micro-batch over ``divisor``.

        ``local`` is loss and weight of this process in the last backward, which reduces all gradients. They begin their way to
        the host before it.
        """

    def finish(self, local: LossSum, settings: Callable[[], Settings]) -> LossSum:
        """Returns loss and weight over everything. All gradients are reduced. A weight of other ranks is on the host."""
        return local

    def multiply(self, tensors: Sequence[Tensor], factor: Weight) -> None:
        """Multiplies the reduced gradients of ``tensors``, those that exist."""
        if isinstance(factor, Tensor) or factor != 1:
            foreach_multiply_([tensor.grad for tensor in tensors if tensor.grad is not None], factor)

    def smallest(self, number: float) -> float:
        """Returns the smallest ``number`` of all processes."""
        return number

    def abandon(self) -> "UpdateSync | None":
        """Gives the update up, after this process ran out of memory and :meth:`discard` was called.

        If other processes wait in their reduction, the result takes part in it, tells them, and raises in :meth:`finish`.
        """
        return None

    @abc.abstractmethod
    def discard(self, *, out_of_memory: bool = False) -> None:
        """Forgets the gradients that are not reduced yet, after a failure. Processes that wait for them are told."""


@functools.singledispatch
def gradient_sync(model: Any, criterion: DataParallelCriterion) -> GradientSync:
    """Returns the gradient synchronisation of a model. Packages register theirs by the type of the model."""
    compiled = without_compilation(model)
    inside = getattr(model, "module", None) if compiled is model else compiled
    is_wrapped = gradient_sync.dispatch(type(inside)) is not gradient_sync.dispatch(object)
    advice = f": pass the {type(inside).__name__} that is in its .module" if is_wrapped else ""
    if is_wrapped and compiled is not model:
        advice = f", without torch.compile: compile the module, by model.compile(...) of the {type(inside).__name__}"
    raise TypeError(
        f"the model is a {type(model).__name__}, expected a DataParallelModel or the model that parallelize returns{advice}"
    )


def run_backward(losses: Sequence[Tensor], divisor: Weight) -> None:
    """Runs one backward from all losses that require a gradient, divided by ``divisor``."""
    roots = [loss for loss in losses if loss.requires_grad]
    if not roots:
        raise RuntimeError(
            "the loss depends on no parameter with requires_grad=True, so there is nothing to train: expected a step outside of "
            "torch.no_grad() and inference_mode(), a model that is not frozen, and a criterion that does not detach its result"
        )
    factor = 1 / divisor
    gradients = [
        move(factor, loss.device).to(loss.dtype) if isinstance(factor, Tensor) else torch.full_like(loss, factor)
        for loss in roots
    ]
    torch.autograd.backward(roots, gradients)


class Accumulation:
    """Micro-batches that are not applied yet, on one rank. ``weight_before`` is that of the last update, over everything."""

    def __init__(
        self,
        sync: UpdateSync,
        trained: Mapping[str, Tensor],
        device: torch.device,
        precision: Precision,
        weight_before: float,
        *,
        is_mean: bool,
    ) -> None:
        dtypes = {tensor.dtype.to_real() for tensor in trained.values()}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.total = torch.zeros((), dtype=dtype, device=device)
        self.weight: Weight = 0.0
        self._weight_on_host: Weight | Callable[[], Tensor] = 0.0
        self.gradients: list[tuple[str, Tensor, int]] = []  # behind the last add(), with names and version counters
        self.is_reduced = False  # over replicas and ranks: nothing can be added
        self.sync = sync
        self._is_mean = is_mean
        self._scaler = precision.scaler_on(device)
        autocasts = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.float16
        self._in_float16 = self._scaler is not None or torch.float16 in dtypes or autocasts
        self._weight_before = weight_before
        self._divisor: Weight | None = None  # of all gradients of this update

    def begin_batch(self, losses: BatchLosses) -> None:
        """Counts the weight that the targets of a batch tell."""
        self._add_weight(losses.weight)
        self._is_mean = self._is_mean and losses.is_mean

    def backward(self, losses: Sequence[LossSum], followers: int, *, last: bool) -> None:
        """Counts the losses of a micro-batch, one for each replica, and runs its backward. The last one reduces all gradients.

        ``followers`` is the number of micro-batches of the same batch that follow, and probably weigh as much.
        """
        weights, roots = [], []
        for term in losses:
            weights.append(1.0 if term.weight is None else term.weight)  # a sum counts, but is not divided
            roots.append(term.total if self._scaler is None else scaled(term.total, self._scaler))
            self.total = self.total + move(term.total.detach(), self.total.device)
        weight = _sum(weights, self.total.device)
        self._add_weight(weight)
        if self._divisor is None:
            expected = _sum([self.weight, weight * followers], self.total.device)
            self._divisor = self.sync.divisor(expected, self._weight_before, self._in_float16) if self._is_mean else 1.0
        self.sync.backward(roots, self._divisor, LossSum(self.total, self.weight) if last else None)
        self.is_reduced = last

    def finish(self, minimum: float, settings: Callable[[], Settings]) -> tuple[Tensor, float, Weight]:
        """Reduces what is not reduced yet. Returns the loss over everything, its weight, and the factor for the gradients.

        ``minimum`` is that of the divisor; ``settings`` returns those of this rank, which the ranks compare.
        """
        for zeros in self.sync.forwards_without_rows(is_reduced=self.is_reduced):
            self.backward([LossSum(zero, 0.0) for zero in zeros], 0, last=True)
        whole = self.sync.finish(LossSum(self.total, self.weight), settings)
        counted = self._weight_on_host if whole.weight is self.weight else whole.weight
        weight = max(float(counted() if callable(counted) else counted or 0.0), minimum)
        true_divisor = weight if self._is_mean and weight else 1.0
        loss = whole.total / true_divisor if weight else torch.full_like(whole.total, torch.nan)
        return loss.to(self.total.dtype), weight, (1.0 if self._divisor is None else self._divisor) / true_divisor

    def _add_weight(self, weight: Weight) -> None:
        """Adds a weight. A sum on a device starts its way to the host."""
        if isinstance(weight, Tensor) or weight:
            self.weight = _sum([self.weight, weight], self.total.device)
            self._weight_on_host = start_copy(self.weight) if isinstance(self.weight, Tensor) else self.weight


def _sum(weights: Sequence[Weight], device: torch.device) -> Weight:
    """Returns the sum of weights. It is a number if all are on the host, and no device is read."""
    on_host, on_devices = 0.0, []
    for weight in weights:
        if isinstance(weight, Tensor) and not weight.is_cpu:
            on_devices.append(weight)
        else:
            on_host += float(weight)
    if not on_devices:
        return on_host
    return add_up([*on_devices, on_host] if on_host else on_devices, device)


def power_of_two(number: Weight) -> Weight:
    """Returns the power of two nearest to a number, on a logarithmic scale; 1 for 0, negative and infinite ones."""
    if not isinstance(number, Tensor):
        return 2.0 ** round(math.log2(number)) if 0 < number < math.inf else 1.0
    number = number.float()
    mantissa, _ = torch.frexp(number)  # number = mantissa * 2**exponent, and 0.5 <= mantissa < 1
    power = number / torch.where(mantissa < math.sqrt(0.5), 2 * mantissa, mantissa)
    return torch.where((number > 0) & (number < math.inf), power, 1.0)
