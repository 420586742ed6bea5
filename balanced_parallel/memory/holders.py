"""Modules and lines of source that hold memory at the peak."""

import collections
from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from ..runtime.byte_sizes import format_bytes
from .extrapolation import Lines

__all__: list[str] = []


@dataclass(frozen=True)
class Holder:
    """Bytes at the peak that one line of one module allocated."""

    bytes: int
    part: str
    module: str
    line: str


def holders_of(lines: Lines, device: int, rows: int | None, most: int = 12) -> tuple[Holder, ...]:
    """Returns the largest holders of a device's peak.

    Args:
        rows: number of rows; None for the traced one.
        most: how many holders to return.
    """
    sizes: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for block in lines.blocks_at(device, lines.summit(device, rows)[0], rows):
        sizes[block.kind, block.module, block.line or block.operator] += block.size
    return tuple(Holder(size, *key) for key, size in sizes.most_common(most))


def holders_table(holders: Sequence[Holder], style: str) -> str:
    """Returns holders as a table, in a format of tabulate."""
    rows = [[format_bytes(one.bytes), one.part, one.module, one.line] for one in holders]
    table: str = tabulate(rows, ["bytes", "part", "module", "line"], style, disable_numparse=True)
    return table
