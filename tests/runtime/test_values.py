"""Parsing and formatting of memory sizes."""

import pytest

from balanced_parallel.runtime.values import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * 2**30),
        (" 1.5 mib ", 3 * 2**19),
        ("80GB", 80 * 10**9),
        ("7 B", 7),
        ("2KiB", 2048),
        ("1TiB", 2**40),
        (12345, 12345),
    ],
)
def test_parse_bytes_reads_numbers_and_units(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "size",
    ["", "GiB", "-1GiB", "3 parsecs", "1e9", "0", 0, -5, True, 2.5, None, "1 GiB 2", "0.1 B"],
)
def test_invalid_sizes_raise_an_error_with_the_value(size):
    with pytest.raises(
        ValueError,
        match="is not a memory size, expected a positive number of bytes, or text with a unit",
    ):
        parse_bytes(size)


@pytest.mark.parametrize("size", ["24", " 1.5 "])
def test_text_without_a_unit_is_refused(size):
    with pytest.raises(
        ValueError, match=f"'{size}' is not a memory size, it has no unit: {size.strip()}GiB\\?"
    ):
        parse_bytes(size)


def test_format_bytes_uses_the_largest_unit_of_at_least_one():
    assert [format_bytes(count) for count in (0, 1023, 1024, 3 * 2**19, 5 * 2**30, 2**40)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 MiB",
        "5.00 GiB",
        "1.00 TiB",
    ]
