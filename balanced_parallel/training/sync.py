"""The protocol by which a strategy brings the gradients of an update together.

The code below is one update::

    sync = gradient_sync(model, criterion).open()
    with sync.accumulating():
        sync.backward(losses, divisor, None)          # micro-batches before the last
    sync.backward(losses, divisor, loss_sum)          # gradients are reduced while it runs
    loss_sum = sync.finish(loss_sum, settings)        # everything is summed
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from ..loss.criterion import DataParallelCriterion
from ..loss.sums import LossSum, Weight
from ..runtime.devices import NO_BLOCK
from ..runtime.torch_private import without_compilation
from .settings import Settings


class GradientSync(Protocol):
    """Synchronises the gradients of a model and its criterion. It has no state of an update."""

    def open(self) -> "UpdateSync":
        """Returns the synchronisation of one update. An update that runs again opens another one."""

    def random_numbers(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Surrounds all work on rows of one update, whose random numbers are those of this process.

        ``is_last`` ends it.
        """
        return NO_BLOCK


class UpdateSync(Protocol):
    """Synchronises the gradients of one update."""

    def count_micro_batches(self, count: int) -> int:
        """Returns how many micro-batches to run, if this process needs ``count``."""

    def divisor(self, expected: Weight, before: float, in_float16: bool) -> Weight:
        """Returns the divisor of all gradients of the update, without waiting for a device.

        It is the same in all processes.

        ``expected`` is the weight of this process's rows, as far as they are known; ``before``,
        that of the update before, over everything, or 0. In float16, gradients need a divisor near
        the final one, and a power of two.
        """

    def accumulating(self) -> AbstractContextManager[None]:
        """Surrounds micro-batches before the last, whose gradients stay where they are."""

    def forwards_without_rows(self, *, is_reduced: bool) -> Iterator[list[Tensor]]:
        """Takes part in forwards that other processes still make, without rows.

        Yields zeros, or nothing, as losses for :meth:`backward`.

        ``is_reduced`` tells that this process has run its last backward.
        """

    def backward(self, losses: Sequence[Tensor], divisor: Weight, local: LossSum | None) -> None:
        """Runs backward from the losses of a micro-batch over ``divisor``.

        ``local`` is loss and weight of this process in the last backward, which reduces all
        gradients. They begin their way to the host before it.
        """

    def finish(self, local: LossSum, settings: Callable[[], Settings]) -> LossSum:
        """Returns loss and weight over everything.

        All gradients are reduced. A weight of other ranks is on the host.
        """

    def multiply(self, tensors: Sequence[Tensor], factor: Weight) -> None:
        """Multiplies the reduced gradients of ``tensors``, those that exist."""

    def smallest(self, number: float) -> float:
        """Returns the smallest ``number`` of all processes."""
        return number

    def tell(self, error: BaseException, *, has_begun: bool, is_single: bool = False) -> None:
        """Tells other processes of a failure, which wait in :func:`gather_objects`.

        They have run forwards before, if this ``has_begun``: those of the first of two passes, or a
        single one.
        """
        return

    def discard(self, error: BaseException, divide: Callable[[], object] = bool) -> bool:
        """Forgets the gradients that are not reduced yet, after a failure.

        Processes that do not know of it are told. Returns True if they have agreed to update.
        ``divide`` takes part in their :meth:`divisor`, unless this process has.
        """
        return False


@functools.singledispatch
def gradient_sync(model: Any, criterion: DataParallelCriterion) -> GradientSync:
    """Returns the gradient synchronisation of a model.

    Packages register theirs by the type of the model.
    """
    compiled = without_compilation(model)
    inside = getattr(model, "module", None) if compiled is model else compiled
    is_wrapped = gradient_sync.dispatch(type(inside)) is not gradient_sync.dispatch(object)
    advice = f": pass the {type(inside).__name__} that is in its .module" if is_wrapped else ""
    if is_wrapped and compiled is not model:
        advice = f", without torch.compile: compile the module, by model.compile(...) of the {type(inside).__name__}"
    raise TypeError(
        f"the model is a {type(model).__name__}, expected a DataParallelModel or the model that parallelize returns{advice}"
    )
