"""Savings that a request does not use yet, each with the bytes that it would save."""

import dataclasses
from collections.abc import Iterator

from ..savings.activation_checkpointing import find_blocks
from .request import Request
from .trace.tracer import run_traces
from .extrapolation import Lines

__all__: list[str] = []


def remedies(request: Request) -> Iterator[tuple[str, Request]]:
    """Yields the name of each saving that leaves the result as it is, and the request that uses it."""
    if not request.blocks and (blocks := find_blocks(request.module)):
        yield "checkpoint_activations", dataclasses.replace(request, blocks=blocks)
    if not request.balanced and request.layout.takes_balanced_optimizer and request.devices > 1:
        yield "BalancedOptimizer", dataclasses.replace(request, balanced=True)


def best_remedy(request: Request) -> tuple[str, int] | None:
    """Returns the name of the saving that helps most with one row per device, and its bytes; None if none helps."""
    rows = request.row_step
    plain = _peak(request, rows)
    found = [(name, plain - _peak(other, rows)) for name, other in remedies(request)]
    best = max(found, key=lambda pair: pair[1], default=None)
    return best if best is not None and best[1] > 0 else None


def _peak(request: Request, rows: int) -> int:
    lines = Lines(run_traces([(request, rows)])[0], None, request.kind, request.devices, 1)
    return max(lines.peak(i) for i in request.traced_devices)
