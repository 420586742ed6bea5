"""The result of an estimate: bytes per device, their purpose, their place in the source, and the
peak of other batches.

A :class:`MemoryReport` is plain data, and :class:`OtherBatches` behind it has the traces, which
answer for other numbers of rows. ``write_page`` makes a page of both, in one file that needs no
network.
"""

import collections
import dataclasses
import datetime
import html
import importlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from .. import __version__
from ..runtime.values import check_positive, format_bytes, naming_arguments, parse_bytes
from .lines import Lines, most_that_fit, trace_exactly
from .problem import Request

_HOLDERS = 12  # The largest holders of a peak are shown.


@dataclass(frozen=True)
class Holder:
    """Bytes at the peak that one line of one module allocated."""

    bytes: int
    part: str
    module: str
    line: str

    def __str__(self) -> str:
        places = [place for place in (self.part, self.module, self.line) if place]
        return f"{format_bytes(self.bytes)} of {' in '.join(places)}"


def holders_of(lines: Lines, device: int, rows: int) -> tuple[Holder, ...]:
    """Returns the largest holders of a device's peak."""
    sizes = collections.Counter[tuple[str, str, str]]()
    for block in lines.blocks_at_peak(device, rows):
        sizes[block.kind, block.module, block.line or block.operator] += block.size
    return tuple(Holder(size, *key) for key, size in sizes.most_common(_HOLDERS))


def holders_table(report: "MemoryReport", device: int, style: str) -> str:
    """Returns the holders of a device's peak and the peak as a table, in a format of tabulate."""
    holders, peak = report.where[device], report.allocated[device]
    rows = [
        [format_bytes(holder.bytes), holder.part, holder.module, holder.line] for holder in holders
    ]
    others = peak - sum(holder.bytes for holder in holders)
    rows += [[format_bytes(others), "all others"], [format_bytes(peak), "the peak"]]
    return tabulate(rows, ["bytes", "part", "module", "line"], style, disable_numparse=True)


# bytes or text such as "24GiB", of each device or one for all
Capacity = int | str | Sequence[int | str]


def parse_each(capacity: Capacity, devices: int) -> tuple[int, ...]:
    """Returns the number of bytes of each of ``devices`` devices."""
    is_list = isinstance(capacity, Iterable) and not isinstance(capacity, str)
    sizes: list[Any] = [*capacity] if is_list else [capacity] * devices  # type: ignore[misc]
    if len(sizes) != devices:
        raise ValueError(
            f"capacity has {len(sizes)} sizes for {devices} devices, expected one size, or one per device"
        )
    return tuple(map(parse_bytes, sizes))


@dataclass(frozen=True, eq=False)
class OtherBatches:
    """Traces behind a report: exact for its own number of rows, affine for others."""

    request: Request
    exact: Lines
    lines: Lines
    traces: dict[int, Lines] = dataclasses.field(default_factory=dict)

    def at(self, rows: int) -> Lines:
        """Returns the lines to read for ``rows`` rows."""
        return self.lines if self.lines.is_affine else self.trace(rows)

    def largest(self, limits: Sequence[int]) -> int:
        """Returns the most rows that fit; 0 if not even one row fits.

        A trace at the result confirms it.
        """
        rows = most_that_fit(lambda rows: self.fits(rows, limits))
        # It may not be affine in between.
        while self.lines.is_affine and rows and not self.trace(rows).fit(limits, rows):
            rows -= 1
        return rows

    def fits(self, rows: int, limits: Sequence[int]) -> bool:
        """Returns True if each device reserves at most its limit for ``rows`` rows."""
        return self.at(rows).fit(limits, rows)

    def trace(self, rows: int) -> Lines:
        """Returns the lines of a trace of ``rows`` rows."""
        if rows == self.exact.first.rows:
            return self.exact
        if rows not in self.traces:
            self.traces[rows] = trace_exactly(self.request, rows)
        return self.traces[rows]


def json_of(values: Mapping[str, object], *hidden: str) -> str:
    """Returns JSON of the values with other names than those of ``hidden``."""
    shown = {name: value for name, value in values.items() if name not in hidden}
    return json.dumps(shown, indent=2, default=dataclasses.asdict)


class Peak(tuple[int, ...]):
    """Bytes of each device.

    ``fits`` is True if each device has as many, and None if its capacity is not known.
    """

    fits: bool | None

    def __new__(cls, sizes: Sequence[int], fits: bool | None = None) -> "Peak":
        """Makes a tuple of sizes."""
        self = super().__new__(cls, sizes)
        self.fits = fits
        return self


PARTS = (
    "parameters",
    "gradients",
    "optimizer state",
    "inputs",
    "saved activations",
    "temporaries",
    "communication buckets",
    "workspace",
    "rounding",
)


@dataclass(frozen=True)
class MemoryReport:
    """The memory of an update in bytes, with one entry per device in each tuple.

    Attributes:
        allocated: maximum in use in the second update, when the optimizer's state exists: what
            ``torch.cuda.max_memory_allocated`` returns, but for workspaces of convolutions. The sum
            of ``parts``.
        reserved: memory that torch's allocator takes from the device for it, in segments:
            ``torch.cuda.max_memory_reserved``.
        nvidia_smi: memory of the process: ``reserved``, and the context of the driver.
        at_most: ``nvidia_smi`` if cuDNN chooses the method with the largest workspace for
            convolutions of size 3 in float32.
        parts: the allocated bytes by purpose. ``workspace`` is that of cuBLAS, and ``rounding`` the
            rest of blocks that the allocator does not split. ``assumed`` has the sources of
            constants.
        timeline: bytes in use after every allocation and release of the second update.
        where: modules and lines of source with the most bytes at the peak, the largest first.
        phases: places in the timeline where the (last) backward and the optimizer's step begin; none
            with ``mode="evaluate"``.
        rows: of one micro-batch over all devices and ranks. An update has ``micro_batches`` of them.
        flops: operations of an update without those of the optimizer.
        affine: :meth:`at` computes other batches from two traces. Otherwise it traces each of them.

    Example:
        >>> batch = torch.zeros(8, 256), torch.zeros(8, 256)
        >>> report = memory.estimate(torch.nn.Linear(256, 256), torch.nn.MSELoss(), *batch, device_kind="cpu")
        >>> report.at(8) == report.allocated < report.at(512)
        True
        >>> report.at(report.largest("6MiB"))[0] <= 6 * 2**20
        True
    """

    mode: str
    layout: str
    device_kind: str
    precision: str
    devices: int
    rows: int
    micro_batches: int
    allocated: tuple[int, ...]
    reserved: tuple[int, ...]
    nvidia_smi: tuple[int, ...]
    at_most: tuple[int, ...]
    parts: tuple[Mapping[str, int], ...]
    assumed: Mapping[str, str]
    timeline: tuple[tuple[int, ...], ...]
    where: tuple[tuple[Holder, ...], ...]
    phases: Mapping[str, int]
    flops: int
    affine: bool
    batches: OtherBatches = dataclasses.field(repr=False, compare=False)

    @naming_arguments
    def at(self, rows: int, capacity: Capacity | None = None) -> Peak:
        """Returns the allocated bytes of each device for micro-batches of ``rows`` rows over all
        devices and ranks.

        If the rows do not divide evenly, they are those of a device with the larger share. ``fits``
        of the result says whether they fit in ``capacity``, as for :meth:`largest`; ``None`` is
        that of the device kind.

        Raises:
            ValueError: the number is not positive.
        """
        check_positive(rows=rows)
        request = self.batches.request
        capacity = capacity or request.kind.capacity
        rows = -(-rows // request.processes)
        fits = (
            None
            if capacity is None
            else self.batches.fits(rows, parse_each(capacity, self.devices))
        )
        # one row broadcasts and has other strides
        lines = self.batches.trace(rows) if rows == 1 else self.batches.at(rows)
        return Peak(lines.allocated_by_device(rows), fits)

    @naming_arguments
    def largest(self, capacity: Capacity) -> int:
        """Returns the most rows of a micro-batch, over all devices and ranks, that fit; 0 if not even
        one row of each rank fits.

        Args:
            capacity: bytes or text such as ``"24GiB"``, for each device or one for all.
        """
        most = self.batches.largest(parse_each(capacity, self.devices))
        return most * self.batches.request.processes

    def save_html(self, path: Path | str, capacity: Capacity | None = None) -> None:
        """Writes a page that needs no network: memory over the step, and the holders of the peak.

        ``capacity``, as for :meth:`largest`, is drawn as a line. This needs plotly.
        """
        write_page(path, self, capacity)

    def to_json(self) -> str:
        """Returns the report as JSON, without its timeline."""
        return json_of(vars(self), "timeline", "batches")

    def __str__(self) -> str:
        notes = "".join(f"\n{name}: {source}" for name, source in self.assumed.items())
        where = holders_table(self, 0, "simple")
        return f"{title_of(self)}\n\n{self._table('simple')}\n\nWhere it goes, on device 0:\n\n{where}\n{notes}"

    def _repr_html_(self) -> str:
        """Returns the report as HTML, for notebooks."""
        where = holders_table(self, 0, "html")
        return (
            f"<p>{title_of(self)}</p>{self._table('html')}<p>Where it goes, on device 0:</p>{where}"
        )

    def _table(self, style: str) -> str:
        names = [part for part in PARTS if any(parts[part] for parts in self.parts)]
        columns = {
            "allocated": self.allocated,
            "reserved": self.reserved,
            "nvidia-smi": self.nvidia_smi,
        }
        columns |= {"at most": self.at_most} if self.at_most != self.nvidia_smi else {}
        columns |= {name: tuple(parts[name] for parts in self.parts) for name in names}
        rows = [
            [f"device {i}", *(format_bytes(sizes[i]) for sizes in columns.values())]
            for i in range(self.devices)
        ]
        return tabulate(rows, ["", *columns], style, disable_numparse=True, stralign="right")


class KindComparison(dict[str, MemoryReport]):
    """The reports of an update by the names of device kinds. As text it is a table.

    Example:
        >>> net, batch = torch.nn.Linear(4, 2), (torch.zeros(8, 4), torch.zeros(8, 2))
        >>> kinds = memory.compare_kinds(net, torch.nn.MSELoss(), *batch, device_kind=["a100", "t4"])
        >>> [*kinds]
        ['a100', 't4']
    """

    def __str__(self) -> str:
        rows = []
        for name, report in self.items():
            capacity = report.batches.request.kind.capacity or 0
            needs = max(report.nvidia_smi)
            sizes = map(format_bytes, (needs, capacity, max(capacity - needs, 0)))
            fits = "yes" if report.at(report.rows).fits else "no"
            rows.append([name, fits, *sizes, f"{report.largest(capacity)} rows"])
        headers = ["kind", "fits", "needs", "capacity", "left", "largest micro-batch"]
        return tabulate(rows, headers, "simple", disable_numparse=True)


POINTS = 600  # A curve has at most as many.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font-family: system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }}
table {{ border-collapse: collapse; font-size: 0.9rem; }}
th, td {{ padding: 0.2rem 0.8rem 0.2rem 0; text-align: left; border-bottom: 1px solid #ddd; }}
td {{ overflow-wrap: anywhere; }}
pre {{ white-space: pre-wrap; }}
#memory {{ max-width: 100%; overflow: hidden; }}
@media (max-width: 40rem) {{ table {{ font-size: 0.65rem; }} th, td {{ padding-right: 0.3rem; }} }}
</style>
</head>
<body>
<h1 id="verdict">{verdict}</h1>
<p id="peak">{peak}</p>
<p>{title}</p>
{figure}
<h2>Holders of the peak</h2>
<div id="holders">{holders}</div>
{assumed}
{options}
</body>
</html>
"""


def write_page(
    path: Path | str,
    report: MemoryReport,
    capacity: Capacity | None,
    verdict: str = "",
    options: str = "",
) -> None:
    """Writes the page of :meth:`MemoryReport.save_html`, with the verdict of a plan and its options
    (HTML) as a section.
    """
    limits = () if capacity is None else parse_each(capacity, report.devices)
    hottest = report.allocated.index(max(report.allocated))
    peak = format_bytes(report.allocated[hottest])
    versions = f"torch {torch.__version__}, balanced_parallel {__version__}"
    title = f"{type(report.batches.request.module).__name__}: {title_of(report)} ({versions}, {datetime.date.today()})"
    text = _PAGE.format(
        title=html.escape(title),
        verdict=html.escape(verdict or _verdict(report, limits)),
        peak=f"peak of tensors: {peak} on device {hottest}; the allocator and the driver take the rest",
        figure=_figure(report, limits).to_html(
            {"responsive": True, "displayModeBar": False}, full_html=False, div_id="memory"
        ),
        holders=holders_table(report, hottest, "html"),
        assumed="".join(
            f"<p>{html.escape(name)}: {html.escape(source)}</p>"
            for name, source in report.assumed.items()
        ),
        options=options and f"<h2>Options of the plan</h2>\n{options}",
    )
    Path(path).write_text(text, encoding="utf-8")


def _verdict(report: MemoryReport, limits: Sequence[int]) -> str:
    """Returns whether the fullest device fits, and by how much."""
    if not limits:
        return f"needs {format_bytes(max(report.nvidia_smi))}"
    request = report.batches.request
    rows = report.rows // request.processes
    lines = report.batches.at(rows)
    parts = []
    for device, needs, limit in zip(request.traced_devices, report.nvidia_smi, limits, strict=True):
        # The allocator gives back its cache where the device is full.
        size = lines.reserved(device, rows, limit)
        parts.append((needs if size is None else size + request.kind.context, limit))
    return verdict_of(parts)


def verdict_of(parts: Iterable[tuple[int, int]], how: str = "") -> str:
    """Returns whether the fullest device fits, of which parts have what it needs and its capacity,
    and what is left there: first if that is little.
    """
    needs, limit = max(parts, key=lambda part: part[0] / part[1])
    used = f"{how}{format_bytes(needs)} of {format_bytes(limit)}"
    if needs > limit:
        return f"does not fit: {used}, {format_bytes(needs - limit)} too much"
    left = f"{format_bytes(limit - needs)} left"
    if needs > 0.98 * limit:
        return f"fits: yes, with only {left}, {used}"
    return f"fits: yes, {used}, {left}"


def title_of(report: MemoryReport) -> str:
    """Returns the layout, the devices, the precision and the rows, as text."""
    size = f"{report.micro_batches} micro-batch(es) of {report.rows} rows"
    mode = "" if report.mode == "train" else "evaluation: "
    return f"{mode}{report.layout} on {report.devices} x {report.device_kind}, {report.precision}, {size}"


def _figure(report: MemoryReport, limits: Sequence[int]) -> Any:
    graphs = load_plotly()
    unit = format_bytes(max(report.allocated)).split()[1]
    size = parse_bytes(f"1 {unit}")
    figure = graphs.Figure()
    for device, line in enumerate(report.timeline):
        points = progress_of(line, [0, *report.phases.values(), len(line)])
        # A curve has few points, the highest of their neighbours.
        step = -(-len(points) // POINTS)
        parts = [points[place : place + step] for place in range(0, len(points), step)]
        places = [part[0][0] for part in parts]
        levels = [max(level for _, level in part) / size for part in parts]
        # Colours go from cyan to violet: phases are gray, and the capacity is red.
        color = f"hsl({180 + 120 * device // report.devices}, 70%, 45%)"
        name = f"device {device}"
        figure.add_scatter(x=places, y=levels, line_shape="hv", line_color=color, name=name)
    backward = "last backward" if report.micro_batches > 1 else "backward"
    for place, name in enumerate(["forward", *report.phases]):
        figure.add_vline(
            x=place,
            line_dash="dot",
            line_color="gray",
            annotation_text=backward if name == "backward" else name,
            annotation_textangle=-90,
        )
    for limit in dict.fromkeys(limits):
        figure.add_hline(
            y=limit / size,
            line_dash="dash",
            line_color="red",
            name=f"capacity {format_bytes(limit)}",
            showlegend=True,
        )
    figure.update_layout(
        xaxis_title="progress of each device",
        xaxis_showticklabels=False,
        yaxis_title=f"{unit} of tensors",
        yaxis_rangemode="tozero",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        margin={"t": 40, "l": 50, "r": 10},
        template="plotly_white",
    )
    return figure


def progress_of(line: Sequence[int], bounds: Sequence[int]) -> list[tuple[float, int]]:
    """Returns the levels of a device where they change, each with its progress: the number of the
    phase, and the part of the device's own changes in it.
    """
    points = []
    for phase, (start, end) in enumerate(itertools.pairwise(bounds)):
        changes = [at for at in range(start, end) if at == start or line[at] != line[at - 1]]
        points += [(phase + number / len(changes), line[at]) for number, at in enumerate(changes)]
    return points


def load_plotly() -> Any:
    """Returns plotly's graph objects."""
    try:
        return importlib.import_module("plotly.graph_objects")
    except ImportError as error:
        raise ImportError(
            "pages need plotly, which is not installed: pip install 'balanced-parallel[plot]'"
        ) from error
