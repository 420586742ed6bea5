"""Cuts by cost: the costs of rows in, the rows of each shard out. No tensors.

A cut by cost gives each shard rows of about the same cost. A shard is padded to its longest row, so
it costs rows x longest. Rows are sorted by cost, and each shard is a run of this order. No other
partition has a lower maximum: exchange its rows for runs of the same sizes, and no shard gets a
longer longest row.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

Combine = Callable[[Sequence[float]], float]  # cost of a shard, from the costs of its rows
_PRECISION = 1e-4  # The largest cost may be larger than the optimum by this part of it.


def cut_by_cost(
    costs: Sequence[float],
    shards: int,
    combine: Combine | None = None,
    *,
    most_rows: int | None = None,
    budget: float | None = None,
) -> list[list[int]]:
    """Splits rows into shards whose largest cost is as small as possible.

    Returns the rows of each, the longest first.

    Args:
        costs: one for each row.
        shards: their number. With fewer rows, one shard per row.
        combine: cost of a shard, from the costs of its rows. It must not decrease with another row.
            ``None`` is rows x longest, the size of a padded shard. With ``sum`` nothing is padded,
            and a shard may have rows of any cost.
        most_rows: of a shard. The number of shards suffices for it.
        budget: the largest cost of a shard. The number of shards suffices for it, as
            :func:`cut_to_budget` finds.

    Example:
        >>> cut_by_cost([3, 9, 2, 3, 2, 4], 3)
        [[1], [5, 0], [3, 2, 4]]
        >>> cut_by_cost([3, 9, 2, 3, 2, 4], 2, sum)
        [[1, 0], [5, 3, 2, 4]]
    """
    order = sorted_rows(costs)
    ordered = [float(costs[row]) for row in order]
    shards = min(shards, len(ordered))
    limit = most_rows or len(ordered)
    if shards <= 1:
        return [order] if order else []
    best = _fill_evenly(ordered, shards, combine, limit, budget)
    return [[order[place] for place in run] for run in _use_all(best, shards, ordered, combine)]


def _fill_evenly(
    ordered: Sequence[float], shards: int, combine: Combine | None, limit: int, budget: float | None
) -> list[Sequence[int]]:
    """Splits sorted rows into at most so many runs, whose largest cost is as small as possible."""
    low = cost_of_shard(ordered[:1], combine)
    if combine in (None, sum):
        low = max(low, sum(ordered) / shards)
    high = cost_of_shard(ordered, combine) if budget is None else budget
    best = list(_fill(ordered, high, combine, limit))
    capacity = low
    while high - low > _PRECISION * high:
        runs = list(itertools.islice(_fill(ordered, capacity, combine, limit), shards + 1))
        if len(runs) <= shards:
            best = runs
            high = capacity
        else:
            low = capacity
        capacity = (low + high) / 2
    return best


def cut_to_budget(
    costs: Sequence[float], budget: float, combine: Combine | None = None
) -> list[list[int]]:
    """Splits rows as :func:`cut_by_cost` does, into as few shards as possible that cost at most
    ``budget``.

    Example:
        >>> cut_to_budget([3, 9, 2, 3, 2, 4], 9)
        [[1], [5, 0], [3, 2, 4]]
    """
    order = sorted_rows(costs)
    ordered = [float(costs[row]) for row in order]
    if order and (alone := cost_of_shard(ordered[:1], combine)) > budget:
        raise ValueError(
            f"row {order[0]} alone costs {alone:g}, expected at most the budget of {budget:g}: raise it"
        )
    return [[order[place] for place in run] for run in _fill(ordered, budget, combine, len(order))]


def sorted_rows(costs: Sequence[float]) -> list[int]:
    """Returns the indices of the rows, the largest cost first. Rows of equal cost keep their order."""
    for row, cost in enumerate(costs):
        if cost is None or not 0 <= cost < math.inf:
            raise ValueError(
                f"the cost of row {row} is {cost}, expected a finite number that is not negative"
            )
    return sorted(range(len(costs)), key=costs.__getitem__, reverse=True)  # stable


def cost_of_shard(costs: Sequence[float], combine: Combine | None) -> float:
    """Returns the cost of a shard. Its longest row is the first."""
    return len(costs) * costs[0] if combine is None else float(combine(costs))


def _fill(
    ordered: Sequence[float], capacity: float, combine: Combine | None, limit: int
) -> Iterator[Sequence[int]]:
    """Yields shards of at most ``limit`` rows. The next one is opened if the next row does not fit."""
    if combine is sum:
        yield from _first_fit(ordered, capacity, limit)
        return
    start = 0
    end = len(ordered)
    while start < end:
        rows = min(limit, end - start)
        if combine is None:
            if rows * ordered[start] > capacity:
                rows = int(capacity / ordered[start] + 1e-9) or 1
        elif combine(ordered[start : start + rows]) > capacity:
            fits = range(1, rows)  # numbers of first rows, for a bisection
            rows = (
                bisect.bisect_right(
                    fits, capacity, key=lambda count: combine(ordered[start : start + count])
                )
                or 1
            )
        yield range(start, start + rows)
        start += rows


def _first_fit(ordered: Sequence[float], capacity: float, limit: int) -> list[list[int]]:
    """Puts each row into the first shard with room for it."""
    runs: list[list[int]] = []
    free: list[float] = []
    for place, cost in enumerate(ordered):
        for index, run in enumerate(runs):
            if cost <= free[index] and len(run) < limit:
                break
        else:
            index = len(runs)
            runs.append([])
            free.append(capacity * (1 + 1e-9))
        runs[index].append(place)
        free[index] -= cost
    return runs


def _use_all(
    runs: Sequence[Sequence[int]], shards: int, ordered: Sequence[float], combine: Combine | None
) -> list[Sequence[int]]:
    """Halves the runs of the highest cost until there is one for each shard."""

    def cost(run: Sequence[int]) -> float:
        return cost_of_shard([ordered[place] for place in run], combine)

    split = [*runs]
    while len(split) < shards:
        run = max((run for run in split if len(run) > 1), key=cost)
        half = len(run) // 2
        split.remove(run)
        split += [run[:half], run[half:]]
    return sorted(split, key=lambda run: run[0])
