"""The peak for any number of rows, from two traces.

The size of each block is an affine function of the number of rows, so the total after each event is
affine too. The peak is the maximum of these lines. It is convex and piecewise linear, so one line
through two peaks would be wrong.
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..batch.plan import split_sizes
from .allocator import replay
from .operators import MAYBE
from .problem import Request
from .trace.allocations import Block, Trace
from .trace.fakes import fake_devices
from .trace.tracer import run_traces

_UNBOUNDED = 2**40  # rows
Numbers = NDArray[np.int64]


def most_that_fit(fits: Callable[[int], bool], limit: int | None = None) -> int:
    """Returns the largest number of rows, at most ``limit``, that fits, as all smaller ones do; 0
    if not even 1 fits.
    """
    if limit is None:
        limit = 1
        while fits(limit):
            limit *= 2
            if limit > _UNBOUNDED:
                raise ValueError("the memory does not depend on the rows: any number of them fits")
    elif limit > 0 and fits(limit):
        return limit
    return bisect.bisect_left(range(1, limit), True, key=lambda rows: not fits(rows))


class Lines:
    """Two traces of the same events, the second with more rows; without it, only the rows of the
    first are known.
    """

    def __init__(self, request: Request, first: Trace, second: Trace | None = None) -> None:
        self.request = request
        self.first = first
        self.second = second
        self._last = second or first
        self.start = first.marks["second"]  # the first event of the second update
        places = {str(device): place for place, device in enumerate(fake_devices(request.devices))}
        # Workspaces have the size of those of the request's kind, which the trace may not have.
        sizes = {"workspace": request.kind.workspace}
        self._bytes = [
            np.array([sizes.get(each.kind, each.size) for each in trace.blocks])
            for trace in (first, self._last)
        ]
        self.kinds = np.array([block.kind for block in first.blocks])
        self.is_output = np.array([block.is_output for block in first.blocks])
        self._streams = [block.stream for block in first.blocks]
        self._lower = np.array([block.least for block in first.blocks])
        self._upper = np.array([block.most for block in first.blocks])
        # the host counts as one device more
        devices = [places.get(block.device, request.devices) for block in first.blocks]
        self._devices = np.array(devices)
        self._events = np.array(first.events, dtype=np.int64)
        self._numbers = np.abs(self._events) - 1  # the places of their blocks
        self._replay = functools.cache(self._replay_events)

    @property
    def is_affine(self) -> bool:
        """True if the same operators allocated and released memory in both traces, so that other
        numbers of rows are known.
        """
        return self.second is not None and not self.difference

    @functools.cached_property
    def difference(self) -> str:
        """The first operators that differ between the traces, as text; empty if none do."""
        traces = self.first, self._last
        operators = [[block.operator for block in trace.blocks] for trace in traces]
        for before, after in itertools.zip_longest(*operators, fillvalue="nothing"):
            if before != after:
                return f"{after} in place of {before}"
        return "" if self.first.events == self._last.events else "releases in another order"

    def sizes(self, rows: int) -> Numbers:
        """Returns the bytes of each block, without the allocator's rounding."""
        sizes, second = self._bytes
        start, end = self._rows(self.first.rows), self._rows(self._last.rows)
        steps = (self._rows(rows) - start)[self._devices]
        sizes = sizes + (second - sizes) * steps // np.maximum(end - start, 1)[self._devices]
        result: Numbers = np.minimum(sizes, self._upper) * (sizes > self._lower)
        return result

    def _rows(self, rows: int) -> Numbers:
        """Returns the rows of each device, and those of the host, among so many rows."""
        request = self.request
        of_devices = (
            split_sizes(rows, request.split)
            if request.split
            else [request.round_up(rows)] * request.devices
        )
        return np.array([*of_devices, rows], dtype=np.int64)

    def levels(self, device: int, rows: int) -> Numbers:
        """Returns the bytes of blocks in use on a device after each event of the second update,
        with the allocator's rounding.
        """
        replayed = self._replay(device, rows, None, False)
        assert replayed is not None
        return replayed[0][self.start :]

    def allocated(self, device: int, rows: int) -> int:
        """Returns the maximum of bytes in use in the second update."""
        return int(self.levels(device, rows).max())

    def more_if_kept(self, device: int, rows: int, is_kept: NDArray[np.bool_]) -> int:
        """Returns how much higher the peak is if a loop keeps some blocks of an update until the
        backward of the next.
        """
        sizes, _ = self._sums(device, rows)
        released = (sizes * is_kept)[self._numbers] * (self._events < 0)
        extra = np.cumsum(released)
        backward = self.first.marks["backward"]
        is_first = self._numbers < self._events[: self.start].max(initial=0)
        extra[backward:] -= (released * is_first)[:backward].sum()
        levels = self.levels(device, rows)
        return int((levels + extra[self.start :]).max() - levels.max())

    def allocated_by_device(self, rows: int) -> tuple[int, ...]:
        """Returns the maximum of bytes in use on each device."""
        return tuple(self.allocated(device, rows) for device in self.request.traced_devices)

    def reserved(
        self,
        device: int,
        rows: int,
        capacity: int | None = None,
        *,
        upper: bool = False,
    ) -> int | None:
        """Returns the bytes that the allocator reserves, or None beyond ``capacity``; with
        ``upper`` at most.
        """
        replayed = self._replay(device, rows, capacity, upper)
        return None if replayed is None else replayed[1]

    def at_least(self, device: int, rows: int) -> int:
        """Returns the most bytes of blocks in use on a device, without what the allocator does not
        split off. No replay.
        """
        return self._most(self._sums(device, rows)[1])

    def at_least_at_once(self, device: int, rows: int) -> int:
        """Returns the least bytes of an update of one micro-batch, as the first of a trace is: it
        lacks the state of the optimizer.
        """
        sizes, _ = self._sums(device, rows)
        state = sizes * (self.kinds == "optimizer state")
        levels = np.cumsum(np.sign(self._events) * (sizes - state)[self._numbers])
        return int(levels[: self.start].max() + state.sum() - sizes @ (self.kinds == "inputs"))

    def _most(self, levels: Numbers) -> int:
        """Returns the maximum in the updates that count: segments of the first update stay."""
        return int(levels[0 if self.request.kind.is_gpu else self.start :].max())

    def _sums(self, device: int, rows: int, upper: bool = False) -> tuple[Numbers, Numbers]:
        """Returns the size of each block of a device, and the sum of those in use after each event."""
        unit = self.request.kind.rounds_to
        sizes = self.sizes(rows) * ((self._devices == device) & ((self.kinds != MAYBE) | upper))
        return sizes, np.cumsum(np.sign(self._events) * (-(-sizes // unit) * unit)[self._numbers])

    def _replay_events(
        self, device: int, rows: int, capacity: int | None, upper: bool
    ) -> tuple[Numbers, int] | None:
        """Returns the bytes of blocks in use after each event, and those that are reserved."""
        kind, (sizes, levels) = self.request.kind, self._sums(device, rows, upper)
        most = self._most(levels)
        limit = None if capacity is None else capacity - kind.context
        if limit is not None and most > limit:  # a replay would take long
            return None
        if not kind.is_gpu:
            return levels, most
        has_size = sizes[self._numbers] > 0
        events = self._events[has_size].tolist()
        result = replay(events, sizes.tolist(), limit, self._streams, kind.expandable)
        if result is None:
            return None
        # Events of blocks on other devices change nothing.
        return np.array([0, *result.allocated])[np.cumsum(has_size)], result.reserved

    def fit(self, limits: Sequence[int], rows: int) -> bool:
        """Returns True if each device reserves at most its limit in bytes."""
        return all(
            self.reserved(device, rows, limit) is not None
            for device, limit in zip(self.request.traced_devices, limits, strict=True)
        )

    def flops(self, rows: int) -> int:
        """Returns the operations of the second update."""
        more = (self._last.flops - self.first.flops) * (rows - self.first.rows)
        return self.first.flops + more // max(self._last.rows - self.first.rows, 1)

    def bytes_on_host(self, rows: int) -> int:
        """Returns the bytes per device that forward and backward of a micro-batch allocate on the
        host, in the second update.
        """
        events = self._events[self.start : self.first.marks["update"]]
        allocated = events[events > 0] - 1
        on_host = allocated[self._devices[allocated] == self.request.devices]
        return int(self.sizes(rows)[on_host].sum()) // (
            self.request.devices * self.request.traced_micro_batches
        )

    def blocks_at_peak(self, device: int, rows: int) -> list[Block]:
        """Returns the blocks in use at the peak of a device, with their sizes for ``rows`` rows."""
        peak = self.start + int(self.levels(device, rows).argmax())
        events = self._events[: peak + 1]
        in_use = np.setdiff1d(events, -events)  # Nothing releases these numbers.
        live = in_use[in_use > 0] - 1
        sizes = self.sizes(rows)
        return [
            self.first.blocks[n]._replace(size=int(sizes[n]))
            for n in live
            if self._devices[n] == device
        ]


def trace_exactly(request: Request, rows: int) -> Lines:
    """Traces micro-batches of ``rows`` rows. The result is for this number alone."""
    return Lines(request, run_traces([(request, rows)])[0])
