"""The result of an estimate: bytes per device, their purpose, their place in the source, and the peak of other batches."""

import dataclasses
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from ..runtime.byte_sizes import format_bytes, parse_each
from .holders import Holder, holders_table
from .length_budget import largest_cost
from .length_traces import LengthTraces
from .other_batches import OtherBatches

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
        micro_batch_cost: the budget of cost that :func:`fit` set, with ``lengths=``.
        affine: :meth:`at` computes other batches from two traces. Otherwise it traces each of them.

    Example:
        >>> batch = torch.zeros(8, 256), torch.zeros(8, 256)
        >>> report = memory.estimate(torch.nn.Linear(256, 256), torch.nn.MSELoss(), *batch, device_kind="cpu")
        >>> report.at(8) == report.peak < report.at(512)
        True
        >>> report.at(report.largest("6MiB"))[0] <= 6 * 2**20
        True
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
    micro_batch_cost: int | None = None
    _batches: OtherBatches | None = dataclasses.field(default=None, repr=False, compare=False)
    _lengths: LengthTraces | None = dataclasses.field(default=None, repr=False, compare=False)

    def at(self, rows: int, length: int | None = None) -> tuple[int, ...]:
        """Returns the peak of each device for micro-batches of ``rows`` rows over all devices.

        If the rows do not divide evenly, it is the peak of a device with the larger share.

        Args:
            length: of all rows, if the estimate had ``lengths=``.

        Raises:
            ValueError: ``rows`` or ``length`` is not positive, this report was read from a file, or it has no lengths.
        """
        _check_positive("rows", rows)
        if length is not None:
            _check_positive("length", length)
            return self._of_lengths.peaks(rows, length)
        return self._of_batches.peak_at(rows)

    def largest(self, capacity: int | str | Sequence[int | str]) -> int:
        """Returns the most rows of a micro-batch, over all devices, that fit; 0 if not even one row fits.

        Args:
            capacity: bytes or text such as ``"24GiB"``, for each device or one for all.

        Raises:
            ValueError: not a size of memory, a wrong number of sizes, or this report was read from a file.
        """
        return self._of_batches.largest(parse_each(capacity, self.devices))

    def largest_cost(self, capacity: int | str | Sequence[int | str]) -> int:
        """Returns the largest budget of cost that fits: a ``micro_batch_cost`` for :class:`TrainStep`.

        Each device may run any shard whose ``rows x longest`` is within it. The estimate had ``lengths=``. The result is 0 if one
        row of the longest does not fit, and at most 0.1 % below the largest possible.

        Args:
            capacity: as for :meth:`largest`.

        Raises:
            ValueError: as for :meth:`largest`, or the estimate had no lengths.
        """
        return largest_cost(self._of_lengths, parse_each(capacity, self.devices))

    def levels_at(self, rows: int) -> list[list[int]]:
        """Returns the timeline for micro-batches of ``rows`` rows over all devices.

        Raises:
            ValueError: as for :meth:`at`.
        """
        _check_positive("rows", rows)
        return self._of_batches.levels_at(rows)

    def holders_at(self, rows: int) -> list[tuple[Holder, ...]]:
        """Returns ``where`` for micro-batches of ``rows`` rows over all devices.

        Raises:
            ValueError: as for :meth:`at`.
        """
        _check_positive("rows", rows)
        return self._of_batches.holders_at(rows)

    def save_html(self, path: Path | str, capacity: int | str | Sequence[int | str] | None = None) -> None:
        """Writes a page that needs no network: memory over the step, a slider for the rows, and the holders of the peak.

        Args:
            path: of the file.
            capacity: as for :meth:`largest`. It is drawn as a line.

        Raises:
            ImportError: plotly is not installed.
            ValueError: not a size of memory, a wrong number of sizes, or this report was read from a file.
        """
        from .html_page import write_page

        write_page(path, self, capacity)

    def save_snapshot(self, path: Path | str) -> None:
        """Writes both updates for torch's memory visualiser, https://pytorch.org/memory_viz.

        The file has the format of ``torch.cuda.memory._dump_snapshot``: every allocation and release of each device, with the
        module, the operator and the line. Addresses are invented.

        Raises:
            ValueError: this report was read from a file.
        """
        Path(path).write_bytes(pickle.dumps(self._of_batches.snapshot()))

    @property
    def _of_batches(self) -> OtherBatches:
        if self._batches is None:
            raise ValueError("this report was read from a file: call memory.estimate again for other batches")
        return self._batches

    @property
    def _of_lengths(self) -> LengthTraces:
        if self._lengths is None:
            raise ValueError("this report has no lengths: call memory.estimate(..., lengths=(shortest, longest))")
        return self._lengths

    def to_json(self) -> str:
        """Returns the report as JSON, without its timeline."""
        hidden = {"timeline", "_batches", "_lengths"}
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.name not in hidden}
        return json.dumps(values | {"where": [[dataclasses.asdict(each) for each in one] for one in self.where]}, indent=2)

    def __str__(self) -> str:
        notes = "".join(f"\n{name}: {source}" for name, source in self.assumed.items())
        where = holders_table(self.where[0], "simple")
        return f"{self._title}\n\n{self._table('simple')}\n\nWhere it goes, on device 0:\n\n{where}\n{notes}"

    def _repr_html_(self) -> str:
        """Returns the report as HTML, for notebooks."""
        where = holders_table(self.where[0], "html")
        return f"<p>{self._title}</p>{self._table('html')}<p>Where it goes, on device 0:</p>{where}"

    @property
    def _title(self) -> str:
        size = f"{self.micro_batches} micro-batch(es) of {self.rows} rows"
        return f"{self.layout} on {self.devices} x {self.device_kind}, {self.precision}, {size}"

    def _table(self, style: str) -> str:
        names = [part for part in PARTS if any(parts[part] for parts in self.parts)]
        rows = [
            [f"device {i}", format_bytes(self.peak[i]), format_bytes(self.reserved[i]), *(format_bytes(p[n]) for n in names)]
            for i, p in enumerate(self.parts)
        ]
        table: str = tabulate(rows, ["", "peak", "reserved", *names], style, disable_numparse=True, stralign="right")
        return table


def _check_positive(name: str, number: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{name}={number!r}, expected a positive number")
