"""The table of tricks: the bytes that each saving would save for a model, measured one by one."""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from ..runtime.values import format_bytes
from ..savings.saving import Saving, all_savings
from .estimation import make_request, report_of
from .lines import Lines
from .report import MemoryReport
from .trace.layouts import LAYOUTS, ReplicaLayout, Request, SingleDevice, plain_criterion
from .trace.tracer import Trace, try_traces


def with_savings(request: Request, savings: Iterable[Saving]) -> Request | None:
    """Returns the request with all of ``savings``, or None if one of them does not suit it."""
    for saving in savings:
        changes = saving.changes(request)
        if changes is None:
            return None
        request = dataclasses.replace(request, **{**changes, "layout": LAYOUTS[changes.get("layout", request.layout.name)]})
    return request


@dataclass(frozen=True)
class Trick:
    """One row of the table: bytes of the busiest device at its peak, or None if the trick does not apply to this model."""

    name: str
    saves: int | None
    cost: str


@dataclass(frozen=True)
class TrickTable:
    """The tricks for one model. ``peak`` (bytes of the busiest device) and ``report`` are those of the plain program."""

    peak: int
    tricks: tuple[Trick, ...]
    report: MemoryReport = dataclasses.field(repr=False)

    def to_json(self) -> str:
        """Returns the table as JSON."""
        return json.dumps({"peak": self.peak, "tricks": [dataclasses.asdict(trick) for trick in self.tricks]}, indent=2)

    def __str__(self) -> str:
        rows = [
            [trick.name, "-", "", trick.cost]
            if trick.saves is None
            else [trick.name, format_bytes(trick.saves), f"{trick.saves / self.peak:.0%}", trick.cost]
            for trick in self.tricks
        ]
        table = tabulate(rows, ["trick", "saves", "of the peak", "cost"], "simple", disable_numparse=True)
        return f"peak without tricks: {format_bytes(self.peak)} on the busiest device\n\n{table}"


def measure_tricks(module: Any, criterion: Any, inputs: Any, targets: Any, *, devices: int = 1, **settings: Any) -> TrickTable:
    """Traces a step of the plain program, and the same step with each saving. Several devices are replicas.

    ``settings`` are ``optimizer``, ``precision``, ``device_kind``, ``dim`` and ``scalar``, as for :func:`estimate`.
    """
    layout = (SingleDevice if devices == 1 else ReplicaLayout).name
    request = make_request(module, plain_criterion(criterion), inputs, targets, layout=layout, devices=devices, **settings)
    report = report_of(request, request.rows)
    peak = max(report.allocated)
    options = [(saving, with_savings(request, [saving])) for saving in _savings_of(request)]
    traces = iter(try_traces([(option, _rows_of(option, request)) for _, option in options if option]))
    tricks = []
    for saving, option in options:
        trace = next(traces) if option else ""
        if option and isinstance(trace, Trace):
            tricks.append(Trick(saving.name, peak - max(Lines(option, trace).allocated_by_device()), saving.cost))
        elif saving.bytes_of is not None:
            size = saving.bytes_of(report.parts[0])
            tricks += [Trick(saving.name, size, f"{saving.cost} (not traced)")] if size else []
        else:
            tricks.append(Trick(saving.name, None, f"not for this model: {trace or saving.needs}"[:100]))
    return TrickTable(peak, tuple(tricks), report)


def _rows_of(option: Request, request: Request) -> int:
    """Returns the rows of a micro-batch of an option, of which each rank has a part."""
    ranks = request.devices if option.layout.is_distributed else 1
    return option.round_up(-(-option.rows_per_micro_batch // ranks))


def _savings_of(request: Request) -> Iterator[Saving]:
    """Yields the rows of the table: without those for several devices on one, and optimizers that are not smaller."""
    for saving in all_savings():
        suits = with_savings(request, [saving]) is not None or saving.bytes_of is not None
        if suits or saving.stage in ("exact", "by hand") or (saving.stage == "layout" and request.devices > 1):
            yield saving
