"""The base class of synchronising gradients: over the replicas of a process, the ranks of DDP, or the shards of FSDP2.

with sync.accumulating():
    sync.backward(losses, divisor, None)          # micro-batches before the last
sync.backward(losses, divisor, loss_sum)          # gradients are reduced while it runs
loss_sum = sync.finish(loss_sum, settings)        # everything is summed
"""

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..loss.criterion import DataParallelCriterion
from ..loss.sums import LossSum, Weight
from ..runtime.devices import move
from .settings import Settings


class GradientSync(abc.ABC):
    """Synchronises the gradients of one update, of a model and its criterion. Defaults are those of one process."""

    def begin(self) -> None:  # noqa: B027 - nothing to do in one process
        """Begins an update that may be abandoned."""

    def count_micro_batches(self, count: int) -> int:
        """Returns how many micro-batches to run, if this process needs ``count``."""
        return count

    @abc.abstractmethod
    def divisor(self, expected: Weight, before: float, in_float16: bool) -> Weight:
        """Returns the divisor of all gradients of an update, without waiting for a device. It is the same in all processes.

        ``expected`` is the weight of this process's rows, as far as they are known; ``before``, that of the update before, over
        everything, or 0. In float16, gradients need a divisor near the final one, and a power of two.
        """

    def accumulating(self) -> AbstractContextManager[None]:
        """Surrounds micro-batches before the last, whose gradients stay where they are."""
        return contextlib.nullcontext()

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

    @abc.abstractmethod
    def finish(self, local: LossSum, settings: Callable[[], Settings]) -> LossSum:
        """Returns loss and weight over everything. All gradients are reduced. A weight of other ranks is on the host."""

    @abc.abstractmethod
    def multiply(self, tensors: Sequence[Tensor], factor: Weight) -> None:
        """Multiplies the reduced gradients of ``tensors``."""

    def smallest(self, number: float) -> float:
        """Returns the smallest ``number`` of all processes."""
        return number

    def abandon(self) -> bool:
        """Gives the update up, after this process ran out of memory.

        Returns True if other processes wait in their reduction. :meth:`finish` then takes part, tells them, and raises.

        Raises:
            RuntimeError: another process failed for another reason.
        """
        return False

    @abc.abstractmethod
    def discard(self, *, out_of_memory: bool = False) -> None:
        """Forgets the gradients that are not reduced yet, after a failure. Processes that wait for them are told."""


@functools.singledispatch
def gradient_sync(model: Any, criterion: DataParallelCriterion) -> GradientSync:
    """Returns the gradient synchronisation of a model. Packages register theirs by the type of the model."""
    inside = getattr(model, "module", None)
    advice = (
        f": pass the {type(inside).__name__} that is in its .module"
        if gradient_sync.dispatch(type(inside)) is not gradient_sync.dispatch(object)
        else ""
    )
    raise TypeError(
        f"the model is a {type(model).__name__}, expected a DataParallelModel or the model that parallelize returns{advice}"
    )


def run_backward(losses: Sequence[Tensor], divisor: Weight) -> None:
    """Runs one backward from all losses that require a gradient, divided by ``divisor``."""
    factor, roots, gradients = 1 / divisor, [], []
    for loss in losses:
        if loss.requires_grad:
            roots.append(loss)
            is_tensor = isinstance(factor, Tensor)
            gradients.append(move(factor, loss.device).to(loss.dtype) if is_tensor else torch.full_like(loss, factor))  # type: ignore[arg-type]
    if not roots:
        raise RuntimeError(
            "the loss depends on no parameter with requires_grad=True, so there is nothing to train: expected a step outside of "
            "torch.no_grad() and inference_mode(), a model that is not frozen, and a criterion that does not detach its result"
        )
    torch.autograd.backward(roots, gradients)
