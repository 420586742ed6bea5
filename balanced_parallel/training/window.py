"""The micro-batches since the last update. A failure forgets them: nobody knows which rows the gradients are of."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..loss.criterion import DataParallelCriterion
from ..runtime.precision import Precision
from .accumulation import Accumulation
from .gradient_sync import GradientSync
from .update import Update

__all__: list[str] = []


class Window:
    """Holds the accumulation of one update, and the weight of the update before.

    Args:
        sync, criterion, trained, device: as for :class:`Accumulation`.
    """

    def __init__(
        self, sync: GradientSync, criterion: DataParallelCriterion, trained: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self._parts = sync, criterion, trained, device
        self._accumulation: Accumulation | None = None
        self._weight_before = 0.0

    @contextmanager
    def adding(self, update: Callable[[], Update], precision: Precision) -> Iterator[Accumulation]:
        """Yields the accumulation, a new one after an update or a failure.

        Args:
            update: returns the update to come. Gradients of before are forgotten through it.
            precision: of a new accumulation.
        """
        with self._discarding_on_failure():
            if self._accumulation is None:
                update().forget_gradients()
                self._accumulation = Accumulation(*self._parts, precision, self._weight_before)
            yield self._accumulation

    @contextmanager
    def ending(self, weight: float) -> Iterator[None]:
        """Surrounds the update. Nothing is accumulated behind it.

        Args:
            weight: of the update, over everything.
        """
        self._accumulation, self._weight_before = None, weight
        with self._discarding_on_failure():
            yield

    @contextmanager
    def _discarding_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._accumulation = None
            self._parts[0].discard(out_of_memory=isinstance(error, torch.OutOfMemoryError))
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_accumulation": None}  # a copy has no gradients
