"""The result of an estimate: bytes per device, their purpose, their place in the source, and the peak of other batches."""

import dataclasses
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from ..runtime.byte_sizes import format_bytes, parse_each

__all__: list[str] = []

PARTS = (
    "parameters",
    "gradients",
    "optimizer state",
    "inputs",
    "saved activations",
    "temporaries",
    "communication buckets",
    "workspace",
    "context",
)


@dataclass(frozen=True)
class Holder:
    """Bytes at the peak that one line of one module allocated."""

    bytes: int
    part: str
    module: str
    line: str


@dataclass(frozen=True)
class MemoryReport:
    """The memory of an update in bytes, with one entry per device in each tuple.

    Attributes:
        peak: maximum in use in the second update, when the optimizer's state exists. The sum of ``parts``.
        reserved: memory that torch's allocator takes from the device for this peak, in segments.
        parts: the peak by purpose. ``workspace`` and ``context`` are constants, with their sources in ``assumed``.
        timeline: bytes in use after every allocation and release of the second update.
        where: modules and lines of source with the most bytes at the peak, the largest first.
        phases: places in the timeline where the (last) backward and the optimizer's step begin.
        rows: of one micro-batch over all devices. An update has ``micro_batches`` of them.
        flops: operations of an update without those of the optimizer.
        affine: :meth:`at` computes other batches from two traces. Otherwise it traces each of them.
    """

    layout: str
    device_kind: str
    precision: str
    devices: int
    rows: int
    micro_batches: int
    peak: tuple[int, ...]
    reserved: tuple[int, ...]
    parts: tuple[Mapping[str, int], ...]
    assumed: Mapping[str, str]
    timeline: tuple[tuple[int, ...], ...]
    where: tuple[tuple[Holder, ...], ...]
    phases: Mapping[str, int]
    flops: int
    affine: bool
    _peak_at: Callable[[int], tuple[int, ...]] | None = dataclasses.field(default=None, repr=False, compare=False)
    _traced_at: Callable[[int], tuple[int, ...]] | None = dataclasses.field(default=None, repr=False, compare=False)
    _most_rows: Callable[[Sequence[int]], int | None] | None = dataclasses.field(default=None, repr=False, compare=False)
    _reserved_at: Callable[[int, Sequence[int]], bool] | None = dataclasses.field(default=None, repr=False, compare=False)

    def at(self, rows: int) -> tuple[int, ...]:
        """Returns the peak of each device for micro-batches of ``rows`` rows over all devices.

        If the rows do not divide evenly, it is the peak of a device with the larger share.

        Raises:
            ValueError: ``rows`` is not positive, or this report was read from a file.
        """
        _check_rows(rows)
        peaks: tuple[int, ...] = _known(self._peak_at)(rows)
        return peaks

    def fits(self, rows: int, limits: Sequence[int]) -> bool:
        """Returns True if a micro-batch of ``rows`` rows over all devices fits ``limits``, the bytes of each device."""
        return bool(_known(self._reserved_at)(rows, limits))

    def largest(self, capacity: int | str | Sequence[int | str]) -> int:
        """Returns the most rows of a micro-batch, over all devices, that fit; 0 if not even one row fits.

        Memory after each event is a line in the rows, and the first line to reach the capacity gives a bound. A replay of
        the allocator with its segments, and a trace at the result, decide.

        Args:
            capacity: bytes or text such as ``"24GiB"``, for each device or one for all.

        Raises:
            ValueError: not a size of memory, a wrong number of sizes, or this report was read from a file.
        """
        limits = parse_each(capacity, self.devices)
        fits = _known(self._reserved_at)
        most = _known(self._most_rows)(limits)
        if most is None:
            raise ValueError("the memory does not depend on the rows: any number of them fits")
        low, high = 0, max(most, 0) + 2  # the bound by tensors alone, and one for the rounding of blocks
        step = 1
        while low < high - 1:  # most results are just below the bound
            middle = max(low + 1, high - step)
            if fits(middle, limits):
                low = middle
                break
            high, step = middle, 2 * step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle, limits) else (low, middle)
        while low == max(most, 0) + 1 and fits(low + 1, limits):  # shares of unequal devices are rounded
            low, most = low + 1, low
        traced_at = _known(self._traced_at)
        while self.affine and low and any(map(operator.gt, traced_at(low), limits)):  # sizes that are not affine in between
            low -= 1
        return low

    def to_json(self) -> str:
        """Returns the report as JSON, without its timeline."""
        hidden = {"timeline", "_peak_at", "_traced_at", "_reserved_at", "_most_rows"}
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.name not in hidden}
        return json.dumps(values | {"where": [[dataclasses.asdict(each) for each in one] for one in self.where]}, indent=2)

    def __str__(self) -> str:
        names = [part for part in PARTS if any(parts[part] for parts in self.parts)]
        rows = [
            [f"device {i}", format_bytes(self.peak[i]), format_bytes(self.reserved[i]), *(format_bytes(p[n]) for n in names)]
            for i, p in enumerate(self.parts)
        ]
        table = tabulate(rows, ["", "peak", "reserved", *names], "simple", disable_numparse=True, stralign="right")
        holders = [[format_bytes(one.bytes), one.part, one.module, one.line] for one in self.where[0]]
        where = tabulate(holders, ["bytes", "part", "module", "line"], "simple", disable_numparse=True)
        notes = "".join(f"\n{name}: {source}" for name, source in self.assumed.items())
        first = (
            f"{self.layout} on {self.devices} x {self.device_kind}, {self.precision}, {self.micro_batches} micro-batch(es) of "
            f"{self.rows} rows"
        )
        return f"{first}\n\n{table}\n\nWhere it goes, on device 0:\n\n{where}\n{notes}"


def _known(function: Callable[..., Any] | None) -> Callable[..., Any]:
    if function is None:
        raise ValueError("this report was read from a file: call memory.estimate again for other batches")
    return function


def _check_rows(rows: int) -> None:
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ValueError(f"rows={rows!r}, expected a positive number")
