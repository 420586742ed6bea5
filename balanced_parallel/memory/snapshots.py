"""Snapshots in the format of ``torch.cuda.memory._dump_snapshot``, which https://pytorch.org/memory_viz draws.

Addresses are those of the replayed allocator, so they are not the device's.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from .allocator import CachingAllocator
from .lines import Lines
from .trace.allocations import MAYBE


def make_snapshot(lines: Lines, read: Sequence[tuple[int, int | None]]) -> dict[str, Any]:
    """Returns a snapshot of two updates. ``read`` has each device's place in the trace, and its rows (None: the traced ones)."""
    snapshot: dict[str, Any] = {"segments": [], "device_traces": []}
    for number, (device, rows) in enumerate(read):
        allocator = CachingAllocator()
        live: dict[int, dict[str, Any]] = {}
        snapshot["device_traces"].append(list(_events(lines, device, rows, allocator, live)))
        snapshot["segments"] += _segments(number, allocator, live)
    return snapshot


def _events(
    lines: Lines, device: int, rows: int | None, allocator: CachingAllocator, live: dict[int, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Replays the events of a device. ``live`` has the allocations in the end."""
    name, sizes = lines.device_name(device), lines.sizes(rows)
    for time, event in enumerate(lines.first.events):
        number = abs(event)
        block, size = lines.first.blocks[number - 1], int(sizes[number - 1])
        if block.device != name or not size or block.kind == MAYBE:
            continue
        if event > 0:
            allocator.allocate(number, size, block.stream)
            frames = [_frame(block.line, block.module or block.operator), {"filename": "", "line": 0, "name": block.operator}]
            address, _ = allocator.place(number)
            live[number] = {"addr": address, "size": size, "stream": block.stream, "frames": frames, "category": block.kind}
            yield {"action": "alloc", **live[number], "time_us": 2 * time}
        else:
            allocator.release(number)
            allocation = live.pop(number)
            for later, action in enumerate(("free_requested", "free_completed")):
                yield {"action": action, **allocation, "time_us": 2 * time + later}


def _segments(device: int, allocator: CachingAllocator, live: dict[int, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    places = {allocator.place(number): allocation for number, allocation in live.items()}
    for start, length, (is_small, stream) in allocator.segments:
        blocks, end = [], start
        used = 0
        for (address, size), allocation in sorted(places.items(), key=lambda item: item[0]):
            if start <= address < start + length:
                blocks += _inactive(end, address)
                requested = {"requested_size": allocation["size"], "frames": allocation["frames"]}
                blocks.append({"address": address, "size": size, "state": "active_allocated", **requested})
                end, used = address + size, used + allocation["size"]
        blocks += _inactive(end, start + length)
        yield {
            "device": device,
            "stream": stream,
            "address": start,
            "blocks": blocks,
            **dict.fromkeys(("allocated_size", "active_size", "requested_size"), used),
            "total_size": length,
            "segment_type": "small" if is_small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
        }


def _inactive(start: int, end: int) -> list[dict[str, Any]]:
    free = {"address": start, "size": end - start, "state": "inactive", "requested_size": 0, "frames": []}
    return [free] if start < end else []


def _frame(line: str, name: str) -> dict[str, Any]:
    file, _, number = line.rpartition(":")
    has_number = number.isdigit()
    return {"filename": file if has_number else line, "line": int(number) if has_number else 0, "name": name}
