"""Memory sizes as text: ``"24GiB"``, ``"512 MiB"``, ``"80GB"``."""

import re
from collections.abc import Sequence

__all__: list[str] = []

UNITS: dict[str, int] = {"": 1, "B": 1, **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}}
UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}


def parse_bytes(size: int | str) -> int:
    """Returns the number of bytes in ``size``.

    Args:
        size: a positive integer, or text such as ``"24GiB"`` or ``"1.5 GB"``.

    Raises:
        ValueError: if ``size`` is neither, or its unit is unknown.
    """
    expected = "expected a positive number of bytes, or text with a unit, such as '24GiB', '512MiB' or '80GB'"
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    unit = None if match is None else {name.lower(): factor for name, factor in UNITS.items()}.get(match[2].lower())
    count = 0 if match is None or unit is None else round(float(match[1]) * unit)
    if count == 0:
        raise ValueError(f"{size!r} is not a memory size, {expected}")
    return count


def format_bytes(count: int) -> str:
    """Formats ``count`` in the largest unit of which it is at least one: ``"1.50 GiB"``, ``"512 B"``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(count) >= UNITS[unit]:
            return f"{count / UNITS[unit]:.2f} {unit}"
    return f"{count} B"


def parse_each(capacity: int | str | Sequence[int | str], devices: int) -> tuple[int, ...]:
    """Returns the number of bytes of each of ``devices`` devices.

    Args:
        capacity: one size for all devices, or one size per device.
        devices: number of devices.

    Raises:
        ValueError: if a size is invalid, or the number of sizes differs from the number of devices.
    """
    sizes = [capacity] * devices if isinstance(capacity, (int, str)) else list(capacity)
    if len(sizes) != devices:
        raise ValueError(f"capacity has {len(sizes)} sizes for {devices} devices, expected one size, or one per device")
    return tuple(map(parse_bytes, sizes))
