"""Pictures of a report: the parts of the peak, memory over the step, and the peak of other batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..runtime.values import UNITS, format_bytes, parse_each
from .report import PARTS, MemoryReport, rows_to_show, title_of, titled_phases, unit_of

Capacity = int | str | Sequence[int | str] | None


def load_pyplot() -> Any:
    """Returns matplotlib's pyplot, set to draw into files."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib, which is not installed: pip install 'balanced-parallel[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_report(path: Path | str, report: MemoryReport, capacity: Capacity = None) -> None:
    """Writes one figure: the parts of each device's peak, device 0 over the step, and the peak against the batch size.

    ``capacity`` is drawn as a line, and the batch sizes extend 20 % beyond the largest that fits.
    """
    pyplot = load_pyplot()
    limits = () if capacity is None else parse_each(capacity, report.devices)
    figure, (bars, step, batches) = pyplot.subplots(1, 3, figsize=(16, 4.5), layout="constrained")
    try:
        _draw_parts(bars, report, limits)
        _draw_step(step, report)
        _draw_batches(batches, report, limits)
        figure.suptitle(title_of(report))
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)


def _scale(axis: Any, most: int, title: str) -> int:
    """Labels the axis with the largest unit below ``most``, and returns the unit's bytes."""
    unit = unit_of(most)
    axis.set(title=title, ylabel=unit)
    return UNITS[unit]


def _draw_parts(axis: Any, report: MemoryReport, limits: Sequence[int]) -> None:
    unit = _scale(axis, max(report.allocated), "parts of the peak")
    places = range(report.devices)
    bottom = [0.0] * report.devices
    for part in PARTS:
        heights = [parts[part] / unit for parts in report.parts]
        if any(heights):
            axis.bar(places, heights, bottom=bottom, label=part)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for place, limit in enumerate(limits):
        if limit / unit < 2 * max(bottom):  # a line far above would flatten the bars
            axis.hlines(limit / unit, place - 0.45, place + 0.45, color="black", linestyle="dashed")
    axis.set_xticks(places, [f"device {place}" for place in places])
    axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))  # outside of the axes, which the bars fill


def _draw_step(axis: Any, report: MemoryReport) -> None:
    line = report.timeline[0]
    unit = _scale(axis, max(line), "tensors of device 0 over the step")
    axis.step(range(len(line)), [level / unit for level in line], where="post", linewidth=1)
    for name, place in titled_phases(report).items():
        axis.axvline(place, color="gray", linestyle="dotted")
        axis.annotate(name, (place, 0.02), xycoords=("data", "axes fraction"), fontsize="small", color="gray")
    axis.set(xlabel="allocations and releases", ylim=(0, None))


def _draw_batches(axis: Any, report: MemoryReport, limits: Sequence[int]) -> None:
    rows, largest = rows_to_show(report, limits, 20 if report.affine else 4)  # each is traced if memory is not affine
    peaks = [report.at(size) for size in rows]
    unit = _scale(axis, max(map(max, peaks)), "peak against the rows of a micro-batch")
    drawn: list[tuple[int, ...]] = []
    for device, line in enumerate(zip(*peaks, strict=True)):
        if any(all(abs(peak - other) < peak / 100 for peak, other in zip(line, before, strict=True)) for before in drawn):
            continue  # one line for devices with the same memory
        drawn.append(line)
        axis.plot(rows, [peak / unit for peak in line], marker=".", label=f"device {device}")
    for limit in dict.fromkeys(limits):
        label = f"capacity {format_bytes(limit)}" + f" of device {limits.index(limit)}" * (len(set(limits)) > 1)
        axis.axhline(limit / unit, color="black", linestyle="dashed", label=label)
    if largest:
        axis.axvline(largest, color="gray", linestyle="dotted", label=f"{largest} rows fit")
    axis.set(xlabel="rows over all devices", ylim=(0, None))
    axis.legend(fontsize="small")
