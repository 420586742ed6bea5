"""Memory of a report's step for other numbers of rows, and its events for the memory visualiser of torch."""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .extrapolation import Lines
from .holders import Holder, holders_of
from .snapshots import make_snapshot
from .trace.traced_request import Request
from .trace.tracer import run_traces

__all__: list[str] = []


def trace_exactly(request: Request, rows: int) -> Lines:
    """Traces micro-batches of ``rows`` rows. The result is for this number alone."""
    return Lines.exact(run_traces([(request, rows)])[0], request)


@dataclass(frozen=True, eq=False)
class OtherBatches:
    """The traces of a report.

    Args:
        request: the step.
        mine: the lines of the report's number of rows.
        read: for each device, its place in the trace, and the rows at which to read ``mine``; None for the traced ones.
        lines: for other numbers of rows.
    """

    request: Request
    mine: Lines
    read: Sequence[tuple[int, int | None]]
    lines: Lines

    @property
    def _traced(self) -> list[int]:
        return [device for device, _ in self.read]

    def peak_at(self, rows: int) -> tuple[int, ...]:
        """Returns the peak of each device for ``rows`` rows."""
        # one row broadcasts and has other strides; oneDNN rounds the workspace of a recurrent layer in its own way
        special = rows == 1 or not self.lines.is_affine or runs(self.mine, "mkldnn_rnn_layer")
        return self.traced_at(rows) if special else tuple(self.lines.peak(device, rows) for device in self._traced)

    def traced_at(self, rows: int) -> tuple[int, ...]:
        """Returns the peak of each device in a trace of ``rows`` rows."""
        return tuple(self._trace(rows).peak(device) for device in self._traced)

    def levels_at(self, rows: int) -> list[list[int]]:
        """Returns the bytes in use on each device after every event of the second update."""
        known, at = (self.lines, rows) if self.lines.is_affine else (self._trace(rows), None)
        return [known.levels(device, at)[known.start :].tolist() for device in self._traced]

    def holders_at(self, rows: int) -> list[tuple[Holder, ...]]:
        """Returns the largest holders of each device's peak."""
        known, at = (self.lines, rows) if self.lines.is_affine else (self._trace(rows), None)
        return [holders_of(known, device, at) for device in self._traced]

    def largest(self, limits: Sequence[int]) -> int:
        """Returns the most rows that fit; 0 if not even one row fits.

        Memory after each event is a line in the rows, and the first line to reach a limit gives a bound. A replay of the
        allocator with its segments, and a trace at the result, decide.
        """
        most = self._most_rows(limits)
        if most is None:
            raise ValueError("the memory does not depend on the rows: any number of them fits")
        low, high = 0, max(most, 0) + 2  # the bound by tensors alone, and one for the rounding of blocks
        step = 1
        while low < high - 1:  # most results are just below the bound
            middle = max(low + 1, high - step)
            if self._fits(middle, limits):
                low = middle
                break
            high, step = middle, 2 * step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle, limits) else (low, middle)
        while low == max(most, 0) + 1 and self._fits(low + 1, limits):  # shares of unequal devices are rounded
            low, most = low + 1, low
        while self.lines.is_affine and low and any(map(operator.gt, self.traced_at(low), limits)):  # sizes not affine in between
            low -= 1
        return low

    def snapshot(self) -> dict[str, Any]:
        """Returns the events of both updates in the format of ``torch.cuda.memory._dump_snapshot``."""
        return make_snapshot(self.mine, self.read)

    @functools.cached_property
    def _traces(self) -> dict[int, Lines]:
        return {}

    def _trace(self, rows: int) -> Lines:
        if rows not in self._traces:
            self._traces[rows] = trace_exactly(self.request, rows)
        return self._traces[rows]

    def _most_rows(self, limits: Sequence[int]) -> int | None:
        if not self.lines.is_affine:
            return 2**20
        per_device = [self.lines.most_rows(device, limit) for device, limit in zip(self._traced, limits, strict=True)]
        return min((most for most in per_device if most is not None), default=None)

    def _fits(self, rows: int, limits: Sequence[int]) -> bool:
        known, at = (self.lines, rows) if self.lines.is_affine else (self._trace(rows), None)
        asking = dict.fromkeys(zip(self._traced, limits, strict=True))
        return all(known.reserved(device, at, limit) is not None for device, limit in asking)


def runs(lines: Lines, name: str) -> bool:
    """Returns True if the traced step runs an operator with ``name`` in its name."""
    return any(name in operator for operator in lines.first.operators)
