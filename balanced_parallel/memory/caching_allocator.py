"""A replay of torch's caching allocator: what it reserves for a sequence of allocations, and the capacity that suffices.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` with its defaults, on one stream: blocks of 512 bytes; up to 1 MiB
from segments of 2 MiB, below 10 MiB from segments of 20 MiB, larger ones from segments of their own, rounded to 2 MiB; best
fit, split and merged. Not seen on a GPU yet.
"""

import bisect
from collections.abc import Iterable

__all__: list[str] = []

MIB = 2**20
_SMALL, _MEDIUM = MIB, 10 * MIB
_SMALL_SEGMENT, _MEDIUM_SEGMENT, _ROUND = 2 * MIB, 20 * MIB, 2 * MIB

Free = tuple[int, int, int]  # size, segment, offset


class CachingAllocator:
    """Segments, and the free blocks in them.

    Args:
        capacity: bytes that segments may have together; where a new one is beyond it, free segments are given back first.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.reserved = self.peak = 0
        self._free: dict[bool, list[Free]] = {True: [], False: []}
        self._starts: dict[tuple[int, int], Free] = {}
        self._ends: dict[tuple[int, int], Free] = {}
        self._segments: list[int] = []
        self._used: dict[int, Free] = {}

    def allocate(self, key: int, size: int) -> bool:
        """Whether there is room for ``size`` bytes, which are then in use as ``key``."""
        if size == 0:
            return True
        size = -(-size // 512) * 512
        small = size <= _SMALL
        block = self._take(small, size) or self._new_segment(small, size)
        if block is None:
            return False
        length, segment, offset = block
        rest = length - size
        if rest >= 512 if small else rest > _SMALL:
            self._insert(small, (rest, segment, offset + size))
            length = size
        self._used[key] = (length, segment, offset)
        return True

    def release(self, key: int) -> None:
        """Gives back what is in use as ``key``."""
        block = self._used.pop(key, None)
        if block is None:
            return
        size, segment, offset = block
        small = self._segments[segment] == _SMALL_SEGMENT
        before, after = self._ends.get((segment, offset)), self._starts.get((segment, offset + size))
        if before is not None:
            self._remove(small, before)
            size, offset = size + before[0], before[2]
        if after is not None:
            self._remove(small, after)
            size += after[0]
        self._insert(small, (size, segment, offset))

    def _insert(self, small: bool, block: Free) -> None:
        size, segment, offset = block
        bisect.insort(self._free[small], block)
        self._starts[segment, offset] = self._ends[segment, offset + size] = block

    def _remove(self, small: bool, block: Free) -> None:
        size, segment, offset = block
        free = self._free[small]
        del free[bisect.bisect_left(free, block)], self._starts[segment, offset], self._ends[segment, offset + size]

    def _take(self, small: bool, size: int) -> Free | None:
        free = self._free[small]
        at = bisect.bisect_left(free, (size, -1, -1))
        if at == len(free):
            return None
        block = free[at]
        self._remove(small, block)
        return block

    def _new_segment(self, small: bool, size: int) -> Free | None:
        length = _SMALL_SEGMENT if small else _MEDIUM_SEGMENT if size < _MEDIUM else -(-size // _ROUND) * _ROUND
        if self.capacity is not None and self.reserved + length > self.capacity:
            self._give_back()
            if self.reserved + length > self.capacity:
                return None
        self._segments.append(length)
        self.reserved += length
        self.peak = max(self.peak, self.reserved)
        return length, len(self._segments) - 1, 0

    def _give_back(self) -> None:
        for small, free in self._free.items():
            whole = [one for one in free if one[0] == self._segments[one[1]]]
            for block in whole:
                self._remove(small, block)
                self.reserved -= block[0]


def replay(events: Iterable[int], sizes: list[int], capacity: int | None = None) -> int | None:
    """Bytes reserved at most for a sequence of events (``+n`` allocates block ``n``, counted from 1, ``-n`` releases it); None
    where ``capacity`` does not suffice."""
    allocator = CachingAllocator(capacity)
    for event in events:
        if event < 0:
            allocator.release(-event)
        elif not allocator.allocate(event, sizes[event - 1]):
            return None
    return allocator.peak
