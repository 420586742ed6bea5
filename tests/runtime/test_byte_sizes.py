"""Sizes of memory, read and written."""

import pytest

from balanced_parallel.runtime.byte_sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * 2**30),
        (" 1.5 mib ", 3 * 2**19),
        ("80GB", 80 * 10**9),
        ("512", 512),
        ("7 B", 7),
        ("2KiB", 2048),
        ("1TiB", 2**40),
        (12345, 12345),
    ],
)
def test_sizes_are_read(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("size", ["", "GiB", "-1GiB", "3 parsecs", "1e9", "0", 0, -5, True, 2.5, None, "1 GiB 2", "0.1 B"])
def test_what_is_no_size_is_refused_by_name(size):
    with pytest.raises(ValueError, match="is no size of memory, expected a positive number of bytes, or text with a unit"):
        parse_bytes(size)


def test_sizes_are_written_in_the_largest_unit_that_they_fill():
    assert [format_bytes(count) for count in (0, 1023, 1024, 3 * 2**19, 5 * 2**30, 2**40)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 MiB",
        "5.00 GiB",
        "1.00 TiB",
    ]
