"""A replay of torch's caching allocator: the memory that it allocates and reserves for a sequence
of allocations.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` with its defaults. Sizes are rounded to
512 bytes. Free blocks are chosen by best fit, split, and merged with free neighbours. A block above
1 MiB keeps a remainder of up to 1 MiB, which ``torch.cuda.max_memory_allocated`` counts. A segment
belongs to the stream that needed it first, and only that stream reuses its blocks::

    size of a block      segment
    up to 1 MiB          2 MiB
    up to 10 MiB         20 MiB
    larger               its own, rounded to 2 MiB

With ``expandable_segments`` a pool has one segment, which grows by pages of 2 MiB (small blocks) or
20 MiB at its end. All blocks are split. Pages without a block in use are given back if memory runs
out.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MIB = 2**20
_SMALL = MIB
_MEDIUM = 10 * MIB
_SMALL_SEGMENT = 2 * MIB
_MEDIUM_SEGMENT = 20 * MIB
_ROUND = 2 * MIB
Free = tuple[int, int, int]  # size, segment, offset
Pool = tuple[bool, int]  # small blocks or others, and their stream


class CachingAllocator:
    """Segments and the free blocks in them, which are released before all segments exceed
    ``capacity`` bytes.
    """

    def __init__(self, capacity: int | None = None, *, expandable: bool = False) -> None:
        self.capacity = capacity
        self.expandable = expandable
        self.allocated = self.reserved = self.max_reserved = 0
        self._free = defaultdict[Pool, list[Free]](list)
        # Each free block is at its start and at its end.
        self._borders: dict[tuple[int, int], Free] = {}
        self._segments: list[tuple[int, Pool]] = []  # Each has a size and a pool.
        self._expanding: dict[Pool, int] = {}  # the segments of expandable pools
        self._used: dict[int, Free] = {}

    def allocate(self, key: int, size: int, stream: int = 0) -> bool:
        """Takes ``size`` bytes under the name ``key`` for a stream.

        Returns False if they do not fit.
        """
        if size == 0:
            return True
        size = -(-size // 512) * 512
        small = size <= _SMALL
        pool = small, stream
        block = self._take(pool, size) or self._reserve(pool, size)
        if block is None and self._release_free():
            block = self._reserve(pool, size)
        if block is None:
            return False
        length, segment, offset = block
        rest = length - size
        if rest >= 512 if small or self.expandable else rest > _SMALL:
            self._insert(pool, (rest, segment, offset + size))
            length = size
        self._used[key] = (length, segment, offset)
        self.allocated += length
        return True

    def release(self, key: int) -> None:
        """Frees the bytes that were allocated under the name ``key``."""
        block = self._used.pop(key, None)
        if block is None:
            return
        size, segment, offset = block
        self.allocated -= size
        pool = self._segments[segment][1]
        for border in (offset, offset + size):
            neighbour = self._borders.get((segment, border))
            if neighbour is not None:
                self._remove(pool, neighbour)
                size = size + neighbour[0]
                offset = min(offset, neighbour[2])
        self._insert(pool, (size, segment, offset))

    def _insert(self, pool: Pool, block: Free) -> None:
        size, segment, offset = block
        bisect.insort(self._free[pool], block)
        self._borders[segment, offset] = self._borders[segment, offset + size] = block

    def _remove(self, pool: Pool, block: Free) -> None:
        size, segment, offset = block
        free = self._free[pool]
        del (
            free[bisect.bisect_left(free, block)],
            self._borders[segment, offset],
            self._borders[segment, offset + size],
        )

    def _take(self, pool: Pool, size: int) -> Free | None:
        free = self._free[pool]
        at = bisect.bisect_left(free, (size, -1, -1))
        if at == len(free):
            return None
        block = free[at]
        self._remove(pool, block)
        return block

    def _reserve(self, pool: Pool, size: int) -> Free | None:
        """Enlarges a segment, behind a free block at its end: the only one of an expandable pool,
        otherwise a new one.

        Pages given back leave a gap.
        """
        number = len(self._segments)
        unit = _page(pool) if size < _MEDIUM else _ROUND
        if self.expandable:
            number = self._expanding.setdefault(pool, number)
            unit = _page(pool)
        if number == len(self._segments):
            self._segments.append((0, pool))
        end, _ = self._segments[number]
        last = self._borders.get((number, end), (0, number, end))
        length = -(-(size - last[0]) // unit) * unit
        if self.capacity is not None and self.reserved + length > self.capacity:
            return None
        self.reserved += length
        self.max_reserved = max(self.max_reserved, self.reserved)
        if last[0]:
            self._remove(pool, last)
        self._segments[number] = end + length, pool
        return last[0] + length, number, last[2]

    def _release_free(self) -> int:
        """Gives back whole segments, or pages of expandable ones, without a block in use.

        Returns their bytes.
        """
        before = self.reserved
        for pool, free in self._free.items():
            for size, segment, offset in list(free):
                page = _page(pool) if self.expandable else self._segments[segment][0]
                first = -(-offset // page) * page
                last = (offset + size) // page * page
                if first < last:
                    self._remove(pool, (size, segment, offset))
                    self.reserved -= last - first
                    for start, end in ((offset, first), (last, offset + size)):
                        if start < end:
                            self._insert(pool, (end - start, segment, start))
        return before - self.reserved


def _page(pool: Pool) -> int:
    return _SMALL_SEGMENT if pool[0] else _MEDIUM_SEGMENT


class Replay(NamedTuple):
    """The bytes of blocks in use after each event, and the maximum of the reserved bytes."""

    allocated: list[int]
    reserved: int


def replay(
    events: Iterable[int],
    sizes: Sequence[int],
    capacity: int | None = None,
    streams: Sequence[int] | None = None,
    expandable: bool = False,
) -> Replay | None:
    """Replays events: ``+n`` allocates block ``n``, counted from 1, ``-n`` releases it.

    None if ``capacity`` does not suffice.
    """
    allocator = CachingAllocator(capacity, expandable=expandable)
    levels = []
    for event in events:
        if event < 0:
            allocator.release(-event)
        elif not allocator.allocate(event, sizes[event - 1], streams[event - 1] if streams else 0):
            return None
        levels.append(allocator.allocated)
    return Replay(levels, allocator.max_reserved)
