"""Ways to cut an effective batch into micro-batches: into equal numbers of rows, or by the cost of the rows."""

from typing import Any, Literal, NamedTuple, Protocol

from ..loss.criterion import DataParallelCriterion
from .gradient_sync import GradientSync
from .micro_batches import Batch, MicroBatch, Model, cut_micro_batches, most_rows

__all__: list[str] = []

Unit = Literal["rows", "cost"]


class Cut(NamedTuple):
    """The micro-batches of a batch.

    Args:
        micro_batches: in the order in which they run.
        targets: of the whole batch, in any number of parts.
    """

    micro_batches: list[MicroBatch]
    targets: list[tuple[Any, ...]]


class Cuts(Protocol):
    """A way to cut batches.

    Attributes:
        unit: of the limit, for one device in one forward.
    """

    unit: Unit

    def cut(self, batch: Batch, limit: float | None) -> Cut:
        """Returns the micro-batches of a batch."""

    def largest(self, batch: Batch, limit: float | None) -> tuple[float, float]:
        """Returns the largest share of a device in one forward, and a limit that halves it, 0 if nothing does."""


class EqualRows:
    """Cuts a batch into numbers of rows that differ by at most one."""

    unit: Unit = "rows"

    def __init__(self, model: Model, criterion: DataParallelCriterion, sync: GradientSync) -> None:
        self._model, self._criterion, self._sync = model, criterion, sync

    def cut(self, batch: Batch, limit: float | None) -> Cut:
        """Returns the micro-batches of a batch."""
        rows = None if limit is None else int(limit)
        return Cut(cut_micro_batches(self._model, self._criterion, self._sync, batch, rows), [batch.targets])

    def largest(self, batch: Batch, limit: float | None) -> tuple[int, int]:
        """Returns rows, and half of them, rounded up."""
        rows = most_rows(self._model, batch.inputs, None if limit is None else int(limit))
        return rows, -(-rows // 2) if rows > 1 else 0
