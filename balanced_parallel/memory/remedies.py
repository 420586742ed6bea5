"""The bytes that each saving would save, measured one by one: the table of tricks, and the advice of an error."""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from ..runtime.values import format_bytes
from ..savings.saving import Saving, all_savings
from .estimation import lines_of, make_report, make_request
from .lines import Lines
from .report import MemoryReport
from .trace.layouts import ReplicaLayout, Request, SingleDevice, plain_criterion
from .trace.tracer import Trace, try_traces


def saved_bytes(request: Request, rows: int, peak: int, savings: Iterable[Saving]) -> dict[Saving, int | str]:
    """Traces ``rows`` rows with each of ``savings``. Returns the bytes that it takes off ``peak``, or why it does not suit."""
    options = {saving: request.with_savings([saving]) for saving in savings}
    traces = iter(try_traces([(option, _rows_of(option, request, rows)) for option in options.values() if option]))
    saved: dict[Saving, int | str] = {}
    for saving, option in options.items():
        trace = next(traces) if option else saving.needs
        if option and isinstance(trace, Trace):
            saved[saving] = peak - max(Lines(option, trace).allocated_by_device())
        else:
            saved[saving] = f"not for this model: {trace}"
    return saved


def _rows_of(option: Request, request: Request, rows: int) -> int:
    """Returns the rows of a micro-batch of an option, of which each rank has a part."""
    ranks = request.devices if option.layout.is_distributed and not request.layout.is_distributed else 1
    return option.round_up(-(-rows * request.micro_batches // (option.micro_batches * ranks)))


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
        return json.dumps({"peak": self.peak, "tricks": self.tricks}, indent=2, default=dataclasses.asdict)

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
    """Traces a step with each saving. Several devices are replicas. ``settings`` are those of :func:`estimate`."""
    layout = (SingleDevice if devices == 1 else ReplicaLayout).name
    request = make_request(module, plain_criterion(criterion), inputs, targets, layout=layout, devices=devices, **settings)
    report = make_report(request, request.rows, *lines_of(request, request.rows))
    peak = max(report.allocated)
    tricks = []
    for saving, saved in saved_bytes(request, request.rows, peak, _savings_of(request)).items():
        size = saving.bytes_of(report.parts[0]) if saving.bytes_of else 0
        if isinstance(saved, int):
            tricks.append(Trick(saving.name, saved, saving.cost))
        elif saving.bytes_of is None:
            tricks.append(Trick(saving.name, None, saved[:100]))
        elif size:
            tricks.append(Trick(saving.name, size, f"{saving.cost} (not traced)"))
    return TrickTable(peak, tuple(tricks), report)


def _savings_of(request: Request) -> Iterator[Saving]:
    """Yields the rows of the table: without those for several devices on one, and optimizers that are not smaller."""
    for saving in all_savings():
        suits = request.with_savings([saving]) is not None or saving.bytes_of is not None
        if suits or saving.stage in ("exact", "by hand") or (saving.stage == "layout" and request.devices > 1):
            yield saving
