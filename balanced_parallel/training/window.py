"""The micro-batches since the last update. A failure forgets them: nobody knows which rows the gradients are of."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..runtime.progress import naming_ranks
from .accumulation import Accumulation
from .gradient_sync import GradientSync
from .micro_batches import Batch

__all__: list[str] = []


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
