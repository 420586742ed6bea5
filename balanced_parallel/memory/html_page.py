"""A page about a report, in one file that needs no network: memory over the step for any number of rows, and its holders."""

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..runtime.byte_sizes import UNITS, format_bytes, parse_each
from .holders import holders_table
from .report import MemoryReport

__all__: list[str] = []

POINTS = 600  # of a curve
STEPS = 12  # of the slider
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font-family: system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }}
table {{ border-collapse: collapse; display: block; font-size: 0.9rem; overflow-x: auto; }}
th, td {{ padding: 0.2rem 0.8rem 0.2rem 0; text-align: left; border-bottom: 1px solid #ddd; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p id="peak">{peak}</p>
{figure}
<h2>Holders of the peak</h2>
<div id="holders">{holders}</div>
{assumed}
{options}
<script>
const pages = {pages};
document.getElementById("memory").on("plotly_sliderchange", change => {{
  const page = pages[change.slider.active];
  document.getElementById("peak").textContent = page.peak;
  document.getElementById("holders").innerHTML = page.holders;
}});
</script>
</body>
</html>
"""


def write_page(
    path: Path | str,
    report: MemoryReport,
    capacity: int | str | Sequence[int | str] | None = None,
    options: str = "",
) -> None:
    """Writes the page: memory of each device over the step with its phases, a slider for rows, the holders, and the options.

    Args:
        path: of the file.
        report: a result of :func:`estimate`, not read from a file.
        capacity: bytes or text such as ``"24GiB"``, for each device or one for all. It is drawn as a line.
        options: HTML of the options of a plan, added as a section.

    Raises:
        ImportError: plotly is not installed.
        ValueError: not a size of memory, or a wrong number of sizes.
    """
    limits = () if capacity is None else parse_each(capacity, report.devices)
    rows = _rows_of_slider(report, limits)
    pages = [_page(report, count, limits) for count in rows]
    title = f"{report.layout} on {report.devices} x {report.device_kind}, {report.precision}"
    options = options and f"<h2>Options of the plan</h2>\n{options}"
    first = pages[rows.index(report.rows)]
    figure = _figure(report, rows, limits).to_html(full_html=False, include_plotlyjs=True, div_id="memory")
    assumed = "".join(f"<p>{html.escape(name)}: {html.escape(source)}</p>" for name, source in report.assumed.items())
    text = _PAGE.format(
        assumed=assumed, title=html.escape(title), figure=figure, options=options, pages=json.dumps(pages), **first
    )
    Path(path).write_text(text, encoding="utf-8")


def titled_phases(report: MemoryReport) -> dict[str, int]:
    """Returns the phases with their titles: the backward of the last micro-batch is not the only one."""
    titles = {"backward": "last backward"} if report.micro_batches > 1 else {}
    return {titles.get(name, name): place for name, place in report.phases.items()}


def _rows_of_slider(report: MemoryReport, limits: Sequence[int]) -> list[int]:
    """Returns the numbers of rows, among them that of the report."""
    if not report.affine:
        return [report.rows]  # another number would be traced
    try:
        largest = report.largest(limits) if limits else 0
    except ValueError:  # any number fits
        largest = 0
    most = max(largest * 1.2, 2 * report.rows)
    some = {max(1, round(most * step / STEPS / report.devices)) * report.devices for step in range(1, STEPS + 1)}
    return sorted({*some, report.rows, *([largest] if largest else [])})


def _page(report: MemoryReport, rows: int, limits: Sequence[int]) -> dict[str, str]:
    peaks = report.peak if rows == report.rows else report.at(rows)
    hottest = peaks.index(max(peaks))
    fits = "".join(
        f", {'fits' if all(peak <= limit for peak, limit in zip(peaks, limits, strict=True)) else 'does not fit'} "
        f"in {' + '.join(map(format_bytes, limits if len(set(limits)) > 1 else limits[:1]))}"
        for _ in limits[:1]
    )
    beyond = max(peaks) - max(_levels(report, rows)[hottest])
    names = " and ".join(name for name in ("workspace", "context") if report.parts[hottest][name])
    hidden = f", of which the curve does not show {format_bytes(beyond)} of {names or 'workspace'}" if beyond else ""
    peak = f"peak {format_bytes(max(peaks))} on device {hottest}{hidden}"
    text = f"{report.micro_batches} micro-batch(es) of {rows} rows: {peak}{fits}"
    holders = report.where[hottest] if rows == report.rows else report.holders_at(rows)[hottest]
    return {"peak": text, "holders": holders_table(holders, "html")}


def _figure(report: MemoryReport, rows: Sequence[int], limits: Sequence[int]) -> Any:
    graphs = load_plotly()
    curves = {count: [_thinned(line) for line in _levels(report, count)] for count in rows}
    unit = next((name for name in ("GiB", "MiB", "KiB") if max(report.peak) >= UNITS[name]), "B")
    shown = curves[report.rows]
    figure = graphs.Figure()
    for device, curve in enumerate(shown):
        figure.add_scatter(
            x=[place for place, _ in curve],
            y=[level / UNITS[unit] for _, level in curve],
            line_shape="hv",
            name=f"device {device}",
        )
    for name, place in {"forward": 0, **titled_phases(report)}.items():
        figure.add_vline(x=place, line_dash="dot", line_color="gray", annotation_text=name, annotation_textangle=-90)
    for limit in dict.fromkeys(limits):
        label = {"annotation_text": f"capacity {format_bytes(limit)}", "annotation_position": "bottom right"}
        figure.add_hline(y=limit / UNITS[unit], line_dash="dash", line_color="black", **label)
    steps = [
        {
            "label": str(count),
            "method": "restyle",
            "args": [
                {
                    "x": [[place for place, _ in curve] for curve in curves[count]],
                    "y": [[level / UNITS[unit] for _, level in curve] for curve in curves[count]],
                }
            ],
        }
        for count in rows
    ]
    slider = {
        "active": list(rows).index(report.rows),
        "currentvalue": {"prefix": "rows over all devices: "},
        "pad": {"t": 60},
        "steps": steps,
    }
    figure.update_layout(
        xaxis_title="allocations and releases",
        yaxis_title=f"{unit} of tensors",
        yaxis_rangemode="tozero",
        sliders=[slider],
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        margin={"t": 40, "l": 50, "r": 10},
        template="plotly_white",
    )
    return figure


def _levels(report: MemoryReport, rows: int) -> Sequence[Sequence[int]]:
    return report.timeline if rows == report.rows else report.levels_at(rows)


def _thinned(line: Sequence[int]) -> list[tuple[int, int]]:
    """Returns places and levels of at most ``POINTS`` points, the highest of their neighbours."""
    width = -(-len(line) // POINTS)
    starts = range(0, len(line), width)
    places = [max(range(start, min(start + width, len(line))), key=line.__getitem__) for start in starts]
    return [(place, line[place]) for place in places]


def load_plotly() -> Any:
    """Returns plotly's graph objects.

    Raises:
        ImportError: plotly is not installed.
    """
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise ImportError("pages need plotly, which is not installed: pip install 'balanced-parallel[plot]'") from error
    return graph_objects
