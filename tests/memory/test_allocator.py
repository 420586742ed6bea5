"""The rules of torch's caching allocator."""

from balanced_parallel.memory.allocator import MIB, CachingAllocator, replay

# Each: a name, bytes to allocate, and the MiB that are reserved then.
STEPS = [
    (1, 100, 2),  # a small segment
    (2, MIB, 2),
    (6, MIB, 4),  # the rest of the first is too small by 512 bytes
    (3, 3 * MIB, 24),
    (4, 17 * MIB - 1, 24),  # the rest of the 20 suffices
    (7, 17 * MIB - 1, 42),  # a segment of its own, rounded to 2 MiB
]


def test_segments_are_reserved_by_the_rules_of_torch():
    allocator = CachingAllocator()
    for key, size, reserved in STEPS:
        assert allocator.allocate(key, size)
        assert allocator.reserved == reserved * MIB
    for key, _, _ in STEPS:
        allocator.release(key)
    assert allocator.allocate(5, 16 * MIB)
    assert allocator.reserved == allocator.max_reserved == 42 * MIB


def test_free_memory_is_given_back_before_the_capacity_is_reached():
    limited = CachingAllocator(30 * MIB)
    assert limited.allocate(1, 20 * MIB)
    assert not limited.allocate(2, 20 * MIB)
    limited.release(1)
    assert limited.allocate(2, 24 * MIB)
    assert replay([1, 2, -1, -2], [100, 20 * MIB]) == ([512, 20 * MIB + 512, 20 * MIB, 0], 22 * MIB)
    assert replay([1, 2], [100, 20 * MIB], 21 * MIB) is None


def test_free_neighbouring_blocks_are_merged():
    sizes = [4 * MIB] * 5 + [16 * MIB]
    assert replay([1, 2, 3, 4, 5, -2, -4, -3, -1, 6], sizes).reserved == 20 * MIB


def test_stream_does_not_reuse_the_memory_of_another():
    events = [1, -1, 2]
    sizes = [4 * MIB] * 2
    assert replay(events, sizes).reserved == 20 * MIB
    assert replay(events, sizes, streams=[0, 0]).reserved == 20 * MIB
    assert replay(events, sizes, streams=[1, 0]).reserved == 40 * MIB
    # Free segments of all streams are given back.
    assert replay(events, sizes, 30 * MIB, [1, 0]).reserved == 20 * MIB


def test_expandable_segments_grow_at_their_end_and_give_back_pages():
    def reserved(events, sizes, capacity=None):
        found = replay(events, sizes, capacity, expandable=True)
        return found and found.reserved

    # There is a page for small blocks, and one of 20 MiB for the others.
    assert reserved([1, 2, 3], [100, 2 * MIB, 17 * MIB]) == 22 * MIB
    assert replay([1], [16_000_000], expandable=True).allocated == [16_000_000]  # a multiple of 512
    growing = [1, -1, 2, -2, 3, -3], [20 * MIB, 40 * MIB, 60 * MIB]
    assert (replay(*growing).reserved, reserved(*growing)) == (120 * MIB, 60 * MIB)
    holes = [1, 2, 3, -1, -3, 4], [20 * MIB, 20 * MIB, 20 * MIB, 40 * MIB]
    assert reserved(*holes) == 80 * MIB  # the free page at the end, and a further one
    assert reserved(*holes, 60 * MIB) == 60 * MIB  # the first page is given back
    assert reserved(*holes, 59 * MIB) is None
