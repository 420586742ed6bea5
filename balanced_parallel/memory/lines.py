"""The peak for any number of rows from two traces: the bytes of every block are a line in the rows.

The size of each block is affine in the rows, so the total after each event is affine too. The peak is the maximum of these
lines. It is convex and piecewise linear, so one line through two peaks would be wrong.
"""

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..batch.plan import split_sizes
from .allocator import Replay, replay
from .trace.allocations import MAYBE, Block
from .trace.fakes import host_of
from .trace.layouts import Request
from .trace.tracer import Trace, run_traces

_UNBOUNDED = 2**40  # rows
Numbers = NDArray[np.int64]


def most_that_fit(fits: Callable[[int], bool], limit: int | None = None) -> int:
    """Returns the largest number of rows, at most ``limit``, that fits, as all smaller ones do; 0 if not even 1 fits."""
    if limit is None:
        limit = 1
        while fits(limit):
            limit *= 2
            if limit > _UNBOUNDED:
                raise ValueError("the memory does not depend on the rows: any number of them fits")
    elif limit > 0 and fits(limit):
        return limit
    return bisect.bisect_left(range(1, limit), True, key=lambda rows: not fits(rows))


@dataclass(frozen=True, eq=False)
class Lines:
    """Two traces of the same events, the second with more rows; without it, only the rows of the first are known."""

    request: Request
    first: Trace
    second: Trace | None = None
    _replays: dict[tuple[int, int | None, int | None, bool], Replay | None] = dataclasses.field(default_factory=dict, init=False)

    @property
    def is_affine(self) -> bool:
        """True if both traces ran the same events, so that other numbers of rows are known."""
        first, second = self.first, self.second
        return second is not None and first.events == second.events and first.operators == second.operators

    def device_name(self, device: int) -> str:
        """Returns the name of a traced device."""
        return "cpu" if device == 0 else f"cpu:{device}"

    def sizes(self, rows: int | None = None) -> Numbers:
        """Returns the bytes of each block, without the allocator's rounding."""
        first = np.array([block.size for block in self.first.blocks], dtype=np.int64)
        if rows is None or self.second is None:
            return first
        second = np.array([block.size for block in self.second.blocks], dtype=np.int64)
        beyond = {self.device_name(device): self._beyond(rows, device) for device in range(self.request.devices)}
        everywhere = rows - self.first.rows, self.second.rows - self.first.rows  # for blocks on the host
        places = np.array([beyond.get(block.device, everywhere) for block in self.first.blocks], dtype=np.int64)
        return first + (second - first) * places[:, 0] // places[:, 1]

    def _beyond(self, rows: int, device: int) -> tuple[int, int]:
        """Returns the distance of a device's rows from those of the first trace, and the same for the second trace."""
        assert self.second is not None
        if self.request.split is None:
            return self.request.round_up(rows) - self.first.rows, self.second.rows - self.first.rows
        rows_of_device, first, second = (
            split_sizes(count, self.request.split)[device] for count in (rows, self.first.rows, self.second.rows)
        )
        return rows_of_device - first, (second - first) or 1

    def levels(self, device: int, rows: int | None = None) -> Numbers:
        """Returns the bytes of blocks in use on a device after each event, with the allocator's rounding."""
        replayed = self._replay(device, rows)
        assert replayed is not None
        return np.array(replayed.allocated, dtype=np.int64)

    def allocated(self, device: int, rows: int | None = None) -> int:
        """Returns the maximum of bytes in use in the second update."""
        return int(self.levels(device, rows)[self.start :].max())

    def allocated_by_device(self, rows: int | None = None) -> tuple[int, ...]:
        """Returns the maximum of bytes in use on each device."""
        return tuple(self.allocated(device, rows) for device in self.request.traced_devices)

    def reserved(self, device: int, rows: int | None = None, capacity: int | None = None, *, upper: bool = False) -> int | None:
        """Returns the bytes that the allocator reserves; None if these and the context are more than ``capacity``.

        With ``upper`` it is an upper bound, with memory that operators may take or not.
        """
        replayed = self._replay(device, rows, capacity, upper)
        return None if replayed is None else replayed.reserved

    def _replay(self, device: int, rows: int | None, capacity: int | None = None, upper: bool = False) -> Replay | None:
        key = device, rows, capacity, upper
        if key not in self._replays:
            name, kind = self.device_name(device), self.request.kind
            is_here = np.array([block.device == name and (upper or block.kind != MAYBE) for block in self.first.blocks])
            sizes = self.sizes(rows) * is_here
            limit = None if capacity is None else capacity - kind.context
            if kind.segments:
                streams = [block.stream for block in self.first.blocks]
                self._replays[key] = replay(self.first.events, sizes.tolist(), limit, streams, kind.expandable)
            else:
                events = np.array(self.first.events, dtype=np.int64)
                rounded = -(-sizes // kind.rounds_to) * kind.rounds_to
                levels = np.cumsum(np.sign(events) * rounded[np.abs(events) - 1])
                most = int(levels[self.start :].max())
                self._replays[key] = Replay(levels.tolist(), most) if limit is None or most <= limit else None
        return self._replays[key]

    def fit(self, limits: Sequence[int], rows: int | None = None) -> bool:
        """Returns True if each device reserves at most its limit in bytes."""
        asked = dict.fromkeys(zip(self.request.traced_devices, limits, strict=True))  # ranks have the same
        return all(self.reserved(device, rows, limit) is not None for device, limit in asked)

    def flops(self, rows: int | None = None) -> int:
        """Returns the operations of the second update."""
        if rows is None or self.second is None:
            return self.first.flops
        first, second = self.first, self.second
        return first.flops + (second.flops - first.flops) * (rows - first.rows) // (second.rows - first.rows)

    def bytes_on_host(self, rows: int | None = None) -> int:
        """Returns the bytes per device that a micro-batch of the second update allocates on the host."""
        host, sizes = str(host_of(self.request.devices)), self.sizes(rows)
        allocated = [event - 1 for event in self.first.events[self.start :] if event > 0]
        total = sum(int(sizes[number]) for number in allocated if self.first.blocks[number].device == host)
        return total // (self.request.devices * self.first.micro_batches)

    def blocks_at_peak(self, device: int, rows: int | None = None) -> list[Block]:
        """Returns the blocks in use at the peak of a device, with their sizes for ``rows`` rows."""
        peak = self.start + int(self.levels(device, rows)[self.start :].argmax())
        events = self.first.events[: peak + 1]
        live = set(events) - {-event for event in events if event < 0}
        name, sizes = self.device_name(device), self.sizes(rows)
        numbers = [number for number in sorted(live) if number > 0 and self.first.blocks[number - 1].device == name]
        return [dataclasses.replace(self.first.blocks[n - 1], size=int(sizes[n - 1])) for n in numbers]

    @property
    def start(self) -> int:
        """The first event of the second update."""
        return self.first.marks["second"]


def trace_exactly(request: Request, rows: int) -> Lines:
    """Traces micro-batches of ``rows`` rows. The result is for this number alone."""
    return Lines(request, run_traces([(request, rows)])[0])
