"""The peak for rows of any length, from traces of three lengths: the bytes of each block are a polynomial.

For one number of rows they are a quadratic polynomial of the length: embeddings grow with the length, attention scores with its
square. Three traces give the polynomial of each block, and two numbers of rows at each length give :class:`Lines` for any
length. The peak is the maximum of many polynomials, so a polynomial through three peaks would be wrong.

The largest budget of cost: every shard whose ``rows x longest`` is within it fits its device.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..batch.containers import leaves, map_leaves
from .lines import Lines
from .trace.layouts import Request
from .trace.tracer import Trace, run_traces

__all__: list[str] = []


ROWS = 2  # per device in the first of two traces: one row is a special case for torch
EVEN = 64  # lengths are multiples of it where possible, since strided layers round other lengths


@dataclass(frozen=True, eq=False)
class LengthTraces:
    """Lines in the rows at three lengths.

    Attributes:
        request: the update that was traced.
        dim: the dimension of the lengths.
        shortest, longest: the lengths of the rows to come.
        lengths: those that were traced.
    """

    request: Request
    dim: int
    shortest: int
    longest: int
    lengths: tuple[int, ...]
    lines: tuple[Lines, ...]

    def at(self, length: int) -> Lines:
        """Returns the lines for rows of another length."""
        pairs = [(one.first, one.second or one.first) for one in self.lines]
        first, second = (self._between(traces, length) for traces in zip(*pairs, strict=True))
        return dataclasses.replace(self.lines[0], first=first, second=second)

    def peaks(self, rows: int, length: int) -> tuple[int, ...]:
        """Returns the peak of each device, for rows over all devices."""
        if rows == 1:  # a special case for torch: broadcasting, strides
            job = with_length(self.request, self.dim, length), rows
            lines, at = Lines.exact(run_traces([job])[0], self.request), None
        else:
            lines, at = self.at(length), rows
        return tuple(lines.peak(device, at) for device in self.request.layout.traced_devices(self.request.devices))

    def _between(self, traces: Sequence[Trace], length: int) -> Trace:
        first, weights = traces[0], self._weights(length)
        known = np.array([[block.size for block in trace.blocks] for trace in traces], dtype=np.float64)
        sizes = np.maximum(np.rint(weights @ known), 0).astype(np.int64).tolist()
        return dataclasses.replace(
            first,
            blocks=[dataclasses.replace(block, size=size) for block, size in zip(first.blocks, sizes, strict=True)],
            flops=round(float(weights @ np.array([trace.flops for trace in traces], dtype=np.float64))),
        )

    def tensors(self, device: int, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the peak for several numbers of rows per device with their lengths. Without segments."""
        kind = dataclasses.replace(self.request.kind, rounds_to=1)  # rounded sizes are not a polynomial
        lines = [dataclasses.replace(line, kind=kind) for line in self.lines]
        known = np.array([line.levels(device, count)[line.start :] for line in lines for count in _counts(line)])
        beyond = rows * self.request.row_step / _counts(lines[0])[0] - 1  # the second trace has twice the rows
        weights = [np.outer(self._weights(length), [1 - more, more]) for length, more in zip(lengths, beyond, strict=True)]
        levels: NDArray[np.float64] = np.array(weights).reshape(len(rows), -1) @ known
        peaks: NDArray[np.float64] = levels.max(1) + (kind.workspace + kind.context)
        return peaks

    def _weights(self, length: int) -> NDArray[np.float64]:
        """Returns the weight of each trace in the polynomial through all of them (Lagrange)."""
        known = self.lengths
        factors = [[(length - other) / (one - other) for other in known if other != one] for one in known]
        weights: NDArray[np.float64] = np.prod(np.array(factors), axis=1)
        return weights


def _counts(line: Lines) -> tuple[int, int]:
    assert line.second is not None
    return line.first.rows, line.second.rows


def trace_lengths(request: Request, dim: int, lengths: tuple[int, int]) -> LengthTraces:
    """Traces two numbers of rows at each of three lengths, from ``(shortest, longest)``.

    Raises:
        ValueError: the lengths are out of their range; the module runs other operators at other lengths.
    """
    shortest, longest = check_lengths(request, dim, lengths)
    even = next(even for even in (EVEN, EVEN // 2, EVEN // 4, EVEN // 8, 1) if longest % even == 0 and 4 * even <= longest)
    step = max(1, min(3 * longest // 8, (longest - shortest) // 2) // even * even)
    traced = (longest - 2 * step, longest - step, longest)
    counts = ROWS * request.row_step, 2 * ROWS * request.row_step
    traces = run_traces([(with_length(request, dim, length), count) for length in traced for count in counts])
    first = traces[0]
    if any((trace.events, trace.operators) != (first.events, first.operators) for trace in traces):
        raise ValueError(
            f"the module runs other operators with {counts[0]} and {counts[1]} rows, or with rows of length {traced[0]} and "
            f"{longest}, so that its memory for other lengths is not known: see memory.estimate for a batch of each length"
        )
    lines = [
        Lines(one, two, request.kind, request.devices, request.row_step)
        for one, two in zip(traces[::2], traces[1::2], strict=True)
    ]
    return LengthTraces(request, dim, shortest, longest, traced, tuple(lines))


def check_lengths(request: Request, dim: int, lengths: tuple[int, int]) -> tuple[int, int]:
    """Returns the shortest and the longest length.

    Raises:
        ValueError: they are not two different lengths; no tensor has the dimension; devices have unequal shares.
    """
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
    tensors = [leaf for _, leaf in leaves((request.inputs, request.targets)) if isinstance(leaf, Tensor)]
    return [tensor for tensor in tensors if dim < tensor.dim()]


TIGHTEST = 3  # shards that are replayed and traced, those that need the most memory
PRECISION = 1e-3  # of the budget
Limits = Sequence[int]  # bytes of each device


def largest_cost(traces: LengthTraces, limits: Limits) -> int:
    """Returns the largest ``rows x longest`` per device that fits; 0 if one row of the longest does not.

    Memory grows with the rows and with the length, so the largest shards of a budget decide: few long rows, and many short ones.
    Their tensors give a bound. Below it, a replay of the allocator and traces of the shards that need the most memory decide.

    Raises:
        ValueError: the memory depends on neither the rows nor their length.
    """
    least, high = traces.longest, 2 * traces.longest
    if not _tensors_fit(traces, limits, least):
        return 0
    while _tensors_fit(traces, limits, high):
        high *= 2
        if high > 2**60:
            raise ValueError("the memory depends on neither the rows nor their length: any number of them fits")
    high = _last_that(functools.partial(_tensors_fit, traces, limits), max(least, high // 2), high) + 1
    replay, low, step = functools.partial(_replay_fits, traces, limits), high, max(1, int(high * PRECISION))
    while low > least and not replay(low := max(least, high - step)):  # most results are just below the bound
        high, step = low, 2 * step
    if not replay(low):
        return 0
    low = _last_that(replay, low, high)
    exhaustive = None if traces.request.kind.segments else TIGHTEST  # another shard may fill segments worse
    while low >= least and not (_replay_fits(traces, limits, low, exhaustive) and _traces_fit(traces, limits, low)):
        low -= max(1, int(low * PRECISION))
    return low if low >= least else 0


def tightest_shards(traces: LengthTraces, budget: int, count: int | None = 1) -> list[tuple[int, int]]:
    """Returns the rows and the length of the ``count`` shards within a budget that need the most memory."""
    rows, lengths, peaks = _shards(traces, budget)
    return [(int(rows[i]), int(lengths[i])) for i in np.argsort(-peaks.max(0), kind="stable")[:count]]


def _shards(traces: LengthTraces, budget: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Returns rows and lengths of the largest shards, and the peaks of their tensors on each device.

    Memory divided by cost falls with the length and then grows. So the ends decide, and whole rows of a length near an end."""
    few = budget // traces.longest
    some = traces.shortest + np.arange(16)
    between = np.geomspace(traces.shortest, traces.longest, 16).astype(np.int64)
    rows = np.unique(np.concatenate([few + np.arange(16), budget // np.concatenate([some, between])]))
    rows = rows[(few <= rows) & (rows <= budget // traces.shortest)]
    lengths = np.minimum(traces.longest, budget // rows)
    traced = dict.fromkeys(traces.request.layout.traced_devices(traces.request.devices))
    return rows, lengths, np.array([traces.tensors(device, rows, lengths) for device in traced])


def _tensors_fit(traces: LengthTraces, limits: Limits, budget: int) -> bool:
    return bool((_shards(traces, budget)[2].max(1) <= _limits_of_traced(traces, limits)).all())


def _replay_fits(traces: LengthTraces, limits: Limits, budget: int, count: int | None = TIGHTEST) -> bool:
    step, found = traces.request.row_step, tightest_shards(traces, budget, count)
    return all(_fits(traces, traces.at(length), rows * step, limits) for rows, length in found)


def _traces_fit(traces: LengthTraces, limits: Limits, budget: int) -> bool:
    request, step = traces.request, traces.request.row_step
    jobs = [(with_length(request, traces.dim, length), rows * step) for rows, length in tightest_shards(traces, budget, TIGHTEST)]
    return all(_fits(traces, Lines.exact(trace, request), None, limits) for trace in run_traces(jobs))


def _fits(traces: LengthTraces, lines: Lines, rows: int | None, limits: Limits) -> bool:
    traced = traces.request.layout.traced_devices(traces.request.devices)
    asked = dict.fromkeys(zip(traced, limits, strict=True))
    return all(lines.reserved(device, rows, limit) is not None for device, limit in asked)


def _limits_of_traced(traces: LengthTraces, limits: Limits) -> NDArray[np.int64]:
    lowest: dict[int, int] = {}
    for device, limit in zip(traces.request.layout.traced_devices(traces.request.devices), limits, strict=True):
        lowest[device] = min(limit, lowest.get(device, limit))
    return np.array(list(lowest.values()))


def _last_that(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Returns a number that fits and is at most ``PRECISION`` below one that does not. ``low`` fits, and ``high`` does not."""
    while high - low > max(1, int(low * PRECISION)):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
