"""Snapshots in the format of ``torch.cuda.memory._dump_snapshot``, which https://pytorch.org/memory_viz draws.

Addresses are those of a first-fit allocator, so they are not the device's.
"""

import bisect
from collections.abc import Sequence
from typing import Any

from .lines import Lines

__all__: list[str] = []


_FIRST_ADDRESS = 2**32
_UNIT = 512


def make_snapshot(lines: Lines, read: Sequence[tuple[int, int | None]]) -> dict[str, Any]:
    """Returns a snapshot of two updates.

    Args:
        read: for each device, its place in the trace, and its rows; None for the traced ones.
    """
    devices = [_events(lines, device, rows) for device, rows in read]
    segments = [_segment(number, *of_device) for number, of_device in enumerate(devices)]
    return {
        "segments": [segment for segment in segments if segment is not None],
        "device_traces": [events for events, _, _ in devices],
    }


def _events(lines: Lines, device: int, rows: int | None) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]], int]:
    """Returns the events of a device, the allocations that are left by address, and the largest address."""
    name, sizes, addresses = lines.device_name(device), lines.sizes(rows), _Addresses()
    events: list[dict[str, Any]] = []
    live: dict[int, dict[str, Any]] = {}
    for event in lines.first.events:
        number = abs(event)
        block, size = lines.first.blocks[number - 1], int(sizes[number - 1])
        if block.device != name or not size:
            continue
        if event > 0:
            frames = [_frame(block.line, block.module or block.operator), {"filename": "", "line": 0, "name": block.operator}]
            allocation: dict[str, Any] = {
                "addr": addresses.take(size),
                "size": size,
                "stream": block.stream,
                "frames": frames,
                "category": block.kind,
            }
            live[number] = allocation
            events.append({"action": "alloc", **allocation, "time_us": len(events)})
        else:
            allocation = live.pop(number)
            addresses.give_back(allocation["addr"], size)
            for action in ("free_requested", "free_completed"):
                events.append({"action": action, **allocation, "time_us": len(events)})
    return events, {allocation["addr"]: allocation for allocation in live.values()}, addresses.end


def _segment(device: int, events: list[Any], live: dict[int, dict[str, Any]], end: int) -> dict[str, Any] | None:
    if not events:
        return None
    blocks: list[dict[str, Any]] = []
    last = _FIRST_ADDRESS
    for address, allocation in sorted(live.items()):
        if last < address:
            blocks.append({"address": last, "size": address - last, "state": "inactive", "requested_size": 0, "frames": []})
        size = -(-allocation["size"] // _UNIT) * _UNIT
        requested = {"requested_size": allocation["size"], "frames": allocation["frames"]}
        blocks.append({"address": address, "size": size, "state": "active_allocated", **requested})
        last = address + size
    if last < end:
        blocks.append({"address": last, "size": end - last, "state": "inactive", "requested_size": 0, "frames": []})
    used = sum(allocation["size"] for allocation in live.values())
    sizes = {"total_size": end - _FIRST_ADDRESS, "allocated_size": used, "active_size": used, "requested_size": used}
    kind = {"stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False, "frames": []}
    return {"device": device, "address": _FIRST_ADDRESS, "blocks": blocks, **sizes, **kind}


def _frame(line: str, name: str) -> dict[str, Any]:
    file, _, number = line.rpartition(":")
    has_number = number.isdigit()
    return {"filename": file if has_number else line, "line": int(number) if has_number else 0, "name": name}


class _Addresses:
    """First-fit allocator of addresses."""

    def __init__(self) -> None:
        self.end = _FIRST_ADDRESS
        self._free: list[tuple[int, int]] = []  # address and size, in order

    def take(self, size: int) -> int:
        """Returns an address with ``size`` free bytes behind it."""
        size = -(-size // _UNIT) * _UNIT
        for place, (address, free) in enumerate(self._free):
            if free >= size:
                rest = [(address + size, free - size)] if free > size else []
                self._free[place : place + 1] = rest
                return address
        self.end += size
        return self.end - size

    def give_back(self, address: int, size: int) -> None:
        """Frees an address, and joins it with free neighbours."""
        size = -(-size // _UNIT) * _UNIT
        place = bisect.bisect(self._free, (address, 0))
        if place < len(self._free) and self._free[place][0] == address + size:
            size += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == address:
            address, before = self._free.pop(place - 1)
            size, place = size + before, place - 1
        self._free.insert(place, (address, size))
