"""The bytes of every block as a function of the rows, from two traces: the peak for any number of rows without another one.

Each block's size is affine in the rows, so what lives after each event is too, and the peak is the maximum of those lines:
convex and piecewise linear, which is why one line through two peaks would be wrong.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batch.scattering import split_sizes
from .caching_allocator import replay
from .device_specs import DeviceKind
from .operators.workspaces import LARGEST, SMALL, Call, may_need_scratch, scratch_of
from .trace.allocations import Block
from .trace.tracer import Trace

__all__: list[str] = []

Numbers = NDArray[np.int64]
MEASURED = 16  # calls, those with most in use beside them


@dataclass(frozen=True, eq=False)
class Lines:
    """Two traces of the same events. Rows are rounded up to ``step``, so that each device has as many; or ``split`` says what
    each has."""

    first: Trace
    second: Trace | None
    kind: DeviceKind
    devices: int
    step: int
    split: tuple[float, ...] | None = None

    @property
    def is_affine(self) -> bool:
        """Whether the second trace did what the first did, so that rows in between and beyond are known."""
        one, two = self.first, self.second
        return two is not None and one.events == two.events and one.operators == two.operators

    def device_name(self, device: int) -> str:
        return "cpu" if device == 0 else f"cpu:{device}"

    def sizes(self, rows: int | None = None) -> Numbers:
        """Bytes of each block, unrounded."""
        first = np.array([block.size for block in self.first.blocks], dtype=np.int64)
        if rows is None or self.second is None:
            return first
        second = np.array([block.size for block in self.second.blocks], dtype=np.int64)
        beyond = {self.device_name(device): self._beyond(rows, device) for device in range(self.devices)}
        everywhere = rows - self.first.rows, self.second.rows - self.first.rows  # what is on the host
        places = np.array([beyond.get(block.device, everywhere) for block in self.first.blocks], dtype=np.int64)
        return first + (second - first) * places[:, 0] // places[:, 1]

    def _beyond(self, rows: int, device: int) -> tuple[int, int]:
        """How far a device's rows are beyond those of the first trace, and how far those of the second are."""
        assert self.second is not None
        if self.split is None:
            return -(-rows // self.step) * self.step - self.first.rows, self.second.rows - self.first.rows
        mine, first, second = (split_sizes(count, self.split)[device] for count in (rows, self.first.rows, self.second.rows))
        return mine - first, (second - first) or 1

    def levels(self, device: int, rows: int | None = None) -> Numbers:
        """Bytes in use on a device after each event, rounded as its allocator rounds them."""
        rounded = -(-self.sizes(rows) // self.kind.rounds_to) * self.kind.rounds_to
        mine = np.array([block.device == self.device_name(device) for block in self.first.blocks])
        return np.cumsum(np.where(self._events > 0, 1, -1) * (rounded * mine)[np.abs(self._events) - 1])

    def most_rows(self, device: int, limit: int) -> int | None:
        """The most rows with which tensors alone stay within ``limit``: where the first line meets it. None if none does."""
        at, after = self.levels(device, self.first.rows)[self.start :], self.levels(device, 2 * self.first.rows)[self.start :]
        slope = (after - at) / self.first.rows
        limit -= self.kind.workspace + self.kind.context
        grows = slope > 0
        if (at[~grows] > limit).any():
            return 0
        room = limit - at[grows]
        return self.first.rows + math.floor((room / slope[grows]).min()) if grows.any() else None

    def summit(self, device: int, rows: int | None = None) -> tuple[int, int, int]:
        """The event of the second update after which most is in use, how much, and how much of it an operator has for itself."""
        levels = self.levels(device, rows)
        event = self.start + int(levels[self.start :].argmax())
        best = event, int(levels[event]), 0
        for call in self._highest_calls(device, rows, levels) if self.kind.scratch else ():
            scratch = scratch_of(call)
            level = int(levels[call.position - 1]) + scratch
            best = max(best, (call.position - 1, level, scratch), key=lambda one: one[1])
        return best

    def _highest_calls(self, device: int, rows: int | None, levels: Numbers) -> list[Call]:
        """Of the calls that need scratch, those with most in use beside it."""
        name = self.device_name(device)
        after = [i for i, call in enumerate(self.first.calls) if call.position > self.start and call.device == name]
        after.sort(key=lambda i: -levels[self.first.calls[i].position - 1])
        chosen: dict[Any, Call] = {}
        for i in after:
            call = self.first.calls[i]
            if not may_need_scratch(call, functools.partial(self._shrunk, i)):
                continue
            if rows is not None and self.second is not None:
                call = call.between(self.second.calls[i], *self._beyond(rows, device))
            if call.bytes <= LARGEST:
                chosen.setdefault((call.operator, call.args), call)
            if len(chosen) == MEASURED:
                break
        return list(chosen.values())

    def _shrunk(self, i: int) -> Call:
        """A call with as few rows as make it small, if that is known."""
        call = self.first.calls[i]
        if self.second is None or call.bytes <= SMALL:
            return call
        rows = max(1, self.first.rows * SMALL // call.bytes)
        return call.between(self.second.calls[i], rows - self.first.rows, self.second.rows - self.first.rows)

    def peak(self, device: int, rows: int | None = None) -> int:
        """Bytes in use at most in the second update, with what cuBLAS takes and what lies outside of the allocator."""
        return self.summit(device, rows)[1] + self.kind.workspace + self.kind.context

    def reserved(self, device: int, rows: int | None = None, capacity: int | None = None) -> int | None:
        """Bytes that the allocator has at most, and what lies outside of it; None where ``capacity`` does not suffice."""
        if not self.kind.segments:
            peak = self.peak(device, rows)
            return peak if capacity is None or peak <= capacity else None
        name = self.device_name(device)
        events = [event for event in self.first.events if self.first.blocks[abs(event) - 1].device == name]
        sizes = self.sizes(rows).tolist()
        events = [len(sizes) + 1, *events]
        sizes.append(self.kind.workspace)
        found = replay(events, sizes, None if capacity is None else capacity - self.kind.context)
        return None if found is None else found + self.kind.context

    def flops(self, rows: int | None = None) -> int:
        """Operations of the second update."""
        if rows is None or self.second is None:
            return self.first.flops
        one, two = self.first, self.second
        return one.flops + (two.flops - one.flops) * (rows - one.rows) // (two.rows - one.rows)

    def blocks_at(self, device: int, event: int, rows: int | None = None) -> list[Block]:
        """The blocks in use after an event, with their sizes for ``rows`` rows."""
        live: set[int] = set()
        for number in self.first.events[: event + 1]:
            if number > 0:
                live.add(number)
            else:
                live.discard(-number)
        mine, sizes = self.device_name(device), self.sizes(rows)
        held = [number for number in sorted(live) if self.first.blocks[number - 1].device == mine]
        return [dataclasses.replace(self.first.blocks[n - 1], size=int(sizes[n - 1])) for n in held]

    @property
    def start(self) -> int:
        return self.first.marks["second"]

    @functools.cached_property
    def _events(self) -> Numbers:
        return np.array(self.first.events, dtype=np.int64)
