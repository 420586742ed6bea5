"""The largest budget of cost: every shard whose ``rows x longest`` is within it fits its device."""

import functools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from .extrapolation import Lines
from .length_traces import LengthTraces, with_length
from .trace.tracer import run_traces

__all__: list[str] = []

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
