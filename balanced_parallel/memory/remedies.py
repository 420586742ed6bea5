"""A step of which not one row fits: the largest holders of memory, and the saving that would help most."""

import dataclasses
from collections.abc import Iterator, Sequence

from ..runtime.byte_sizes import format_bytes
from ..savings.activation_checkpointing import find_blocks
from .estimation import make_report
from .extrapolation import Lines
from .holders import Holder
from .trace.inplace_names import with_inplace_activations
from .trace.traced_request import Request
from .trace.tracer import run_traces

__all__: list[str] = []


def explain(request: Request, limits: Sequence[int]) -> str:
    """Returns what one row per device needs, the largest holders of it, and the saving that would help most.

    Args:
        limits: bytes of each device.
    """
    rows = request.row_step
    options = list(remedies(request))
    traces = run_traces([(option, rows) for option in (request, *(other for _, other in options))])
    plain, *saving = [Lines.exact(trace, request) for trace in traces]
    report = make_report(request, rows, plain, None, plain)
    worst = max(range(len(limits)), key=lambda i: report.reserved[i] - limits[i])
    device = request.layout.traced_devices(request.devices)[worst]
    holders = ", ".join(f"{format_bytes(one.bytes)} of {one.part}{_place(one)}" for one in report.where[worst][:3])
    saved = {name: plain.peak(device) - lines.peak(device) for (name, _), lines in zip(options, saving, strict=True)}
    best = max(saved, key=lambda name: saved[name], default="")
    advice = f"{best} would save most, {format_bytes(saved[best])}" if saved.get(best, 0) > 0 else "no known saving would help"
    return (
        f"one row per device needs {format_bytes(report.reserved[worst])} of device {worst}, expected at most "
        f"{format_bytes(limits[worst])}. The largest holders are {holders}; {advice}"
    )


def remedies(request: Request) -> Iterator[tuple[str, Request]]:
    """Yields the name of each saving that leaves the result as it is, and the request with it."""
    if not request.blocks and (blocks := find_blocks(request.module)):
        yield "checkpoint_activations", dataclasses.replace(request, blocks=blocks)
    if not request.inplace and any(getattr(part, "inplace", None) is False for part in request.module.modules()):
        yield "inplace_activations", with_inplace_activations(request)
    if "offload_activations" not in request.savings:
        yield "offload_activations", dataclasses.replace(request, savings=(*request.savings, "offload_activations"))
    if not request.balanced and request.layout.takes_balanced_optimizer and request.devices > 1:
        yield "BalancedOptimizer", dataclasses.replace(request, balanced=True)


def _place(holder: Holder) -> str:
    where = ", ".join(filter(None, (holder.module, holder.line)))
    return f" ({where})" if where else ""
