"""The memory of rows of unequal length: the largest budget of cost with which every shard fits its device.

A shard of ``rows`` rows, padded to ``length``, is within a budget if ``rows x length`` is. For one shard the bytes of each block
grow as ``rows * (a + b * length + c * length ** 2)``: embeddings grow with the length, attention scores with its square. With
``rows = budget / length`` that is convex in the length, so one of two shards of a budget needs the most:

    few of the longest rows     budget / longest  x longest
    many of the shortest rows   budget / shortest x shortest

Two numbers of rows are traced at each of both ends. Traces of some shards in between confirm the result.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ..batch.containers import leaves, map_leaves
from .lines import Lines, most_that_fit, trace_exactly
from .trace.layouts import Request
from .trace.tracer import run_traces

ROWS = 2  # per device in the first of two traces: one row is a special case for torch
CONFIRMED = 5  # shards of the budget that are traced in the end


@dataclass(frozen=True, eq=False)
class LengthTraces:
    """Lines in the rows at both ends of the lengths, the shortest and the longest along ``dim``."""

    request: Request
    dim: int
    shortest: int
    longest: int
    lines: tuple[Lines, Lines]

    def allocated(self, rows: int, length: int) -> tuple[int, ...]:
        """Returns the allocated bytes of each device in a trace of ``rows`` rows over all devices."""
        return trace_exactly(with_length(self.request, self.dim, length), rows).allocated_by_device()

    def largest_cost(self, limits: Sequence[int]) -> int:
        """Returns the largest budget that fits, in whole rows of the longest; 0 if one of them does not fit."""

        def ends_fit(rows: int) -> bool:
            counts = rows * self.longest // self.shortest, rows
            return all(lines.fit(limits, count * self.request.row_step) for lines, count in zip(self.lines, counts, strict=True))

        rows = most_that_fit(ends_fit)  # of the longest, per device
        while rows and not self._traces_fit(rows, limits):
            rows -= max(1, rows // 1000)
        return rows * self.longest

    def _traces_fit(self, rows: int, limits: Sequence[int]) -> bool:
        """Traces shards from the longest rows to the shortest. Those in between have whole rows and the rounding of blocks."""
        budget, step = rows * self.longest, self.request.row_step
        counts = np.unique(np.geomspace(rows, budget // self.shortest, CONFIRMED).astype(np.int64)).tolist()
        jobs = [(with_length(self.request, self.dim, min(self.longest, budget // count)), count * step) for count in counts]
        return all(Lines(self.request, trace).fit(limits) for trace in run_traces(jobs))


def trace_lengths(request: Request, dim: int, lengths: tuple[int, int]) -> LengthTraces:
    """Traces two numbers of rows of the shortest and of the longest rows."""
    shortest, longest = check_lengths(request, dim, lengths)
    counts = ROWS * request.row_step, 2 * ROWS * request.row_step
    traces = run_traces([(with_length(request, dim, length), count) for length in (shortest, longest) for count in counts])
    short, long = Lines(request, *traces[:2]), Lines(request, *traces[2:])
    if not (short.is_affine and long.is_affine):
        raise ValueError(
            f"the module runs other operators with {counts[0]} and {counts[1]} rows, so that its memory for other numbers is not "
            "known: see memory.estimate for a batch of each length"
        )
    return LengthTraces(request, dim, shortest, longest, (short, long))


def check_lengths(request: Request, dim: int, lengths: tuple[int, int]) -> tuple[int, int]:
    """Returns the shortest and the longest length, if they suit the request."""
    if len(lengths) != 2 or lengths[0] < 1 or lengths[0] + 2 > lengths[1]:
        raise ValueError(f"lengths={lengths!r}, expected (shortest, longest), such as (1, 512), with a difference of 2 or more")
    if dim == request.dim or not _with_dim(request, dim):
        raise ValueError(f"trim={dim}, expected the dimension of the lengths: in some tensor, and not that of the rows")
    if request.split is not None:
        raise ValueError(f"split={request.split} with lengths={lengths!r}, expected equal devices: cost is spread evenly")
    return lengths


def with_length(request: Request, dim: int, length: int) -> Request:
    """Returns the request for rows of another length, in all tensors that have the batch's length along ``dim``."""
    whole = max(tensor.size(dim) for tensor in _with_dim(request, dim))

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() <= dim or leaf.size(dim) != whole:
            return leaf
        return leaf.new_empty([*leaf.shape[:dim], length, *leaf.shape[dim + 1 :]], device="meta")

    inputs, targets = map_leaves(resize, (request.inputs, request.targets))
    return dataclasses.replace(request, inputs=inputs, targets=targets)


def _with_dim(request: Request, dim: int) -> list[Tensor]:
    return [leaf for _, leaf in leaves((request.inputs, request.targets)) if isinstance(leaf, Tensor) and dim < leaf.dim()]
