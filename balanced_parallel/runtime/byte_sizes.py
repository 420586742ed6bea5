"""Sizes of memory as people write them: ``"24GiB"``, ``"512 MiB"``, ``"80GB"``."""

import re
from collections.abc import Sequence

__all__: list[str] = []

UNITS: dict[str, int] = {"": 1, "B": 1, **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}}
UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}


def parse_bytes(size: int | str) -> int:
    """The number of bytes that ``size`` names: a positive whole number, or text such as ``"24GiB"`` or ``"1.5 GB"``.

    Raises:
        ValueError: it is neither, or has an unknown unit.
    """
    expected = "expected a positive number of bytes, or text with a unit, such as '24GiB', '512MiB' or '80GB'"
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    unit = None if match is None else {name.lower(): factor for name, factor in UNITS.items()}.get(match[2].lower())
    count = 0 if match is None or unit is None else round(float(match[1]) * unit)
    if count == 0:
        raise ValueError(f"{size!r} is no size of memory, {expected}")
    return count


def format_bytes(count: int) -> str:
    """``count`` in the largest unit that it fills: ``"1.50 GiB"``, ``"512 B"``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(count) >= UNITS[unit]:
            return f"{count / UNITS[unit]:.2f} {unit}"
    return f"{count} B"


def parse_each(capacity: int | str | Sequence[int | str], devices: int) -> tuple[int, ...]:
    """The bytes of each of ``devices`` devices: one size for all of them, or one for each.

    Raises:
        ValueError: no size of memory, or another number of them than devices.
    """
    sizes = [capacity] * devices if isinstance(capacity, (int, str)) else list(capacity)
    if len(sizes) != devices:
        raise ValueError(f"capacity has {len(sizes)} sizes for {devices} devices, expected one for each, or one for all")
    return tuple(map(parse_bytes, sizes))
