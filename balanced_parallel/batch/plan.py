"""Plans of a batch: numbers of rows and costs in, the rows of each shard out. No tensors.

A cut by cost gives each shard rows of about the same cost. A shard is padded to its longest row, so
it costs rows x longest. Rows are sorted by cost, and each shard is a run of this order. No other
partition has a lower maximum: exchange its rows for runs of the same sizes, and no shard gets a
longer longest row.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from fractions import Fraction

from ..runtime.devices import Devices, free_bytes


def split_sizes(rows: int, shares: int | Sequence[float]) -> list[int]:
    """Returns the number of rows of each part: equal parts, or in proportion to weights.

    With weights, the rows that remain go to the largest remainders, to the first ones among equals.

    Example:
        >>> split_sizes(9, 4), split_sizes(9, [2, 1])
        ([3, 2, 2, 2], [6, 3])
    """
    if isinstance(shares, int):
        more = rows % shares if shares else 0
        return [rows // shares + 1] * more + [rows // shares] * (shares - more) if shares else []
    # exact: with rounded quotients the sizes could exceed the total
    weights = [Fraction(share) for share in shares]
    exact = [rows * weight / sum(weights) for weight in weights]
    sizes = [math.floor(part) for part in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda index: sizes[index] - exact[index])
    for index in by_remainder[: rows - sum(sizes)]:
        sizes[index] += 1
    return sizes


Combine = Callable[[Sequence[float]], float]  # cost of a shard, from the costs of its rows
RowNumbers = Sequence[int]  # numbers of rows: a range, or a list of them
Plan = Sequence[Sequence[RowNumbers]]  # micro-batches x devices


def consecutive(sizes: Sequence[int], start: int = 0) -> list[range]:
    """Returns ranges of the given sizes, one behind the other."""
    return list(
        itertools.starmap(range, itertools.pairwise(itertools.accumulate(sizes, initial=start)))
    )


def equal_rows(
    rows: int,
    shares: int | Sequence[float],
    limit: float | None = None,
    agree: Callable[[int], int] = lambda count: count,
) -> Plan:
    """Plans as few micro-batches as possible, whose sizes differ by at most one row.

    A device may get no rows.

    ``limit`` is the most rows of a device in one micro-batch. ``agree`` returns the number of
    micro-batches to plan, for the number that is needed.

    Example:
        >>> equal_rows(5, 2, limit=2)
        [[range(0, 2), range(2, 3)], [range(3, 4), range(4, 5)]]
    """
    plan = []
    start = 0
    count = count_micro_batches(rows, None if limit is None else int(limit), shares)
    for size in split_sizes(rows, agree(count)):
        plan.append(consecutive(split_sizes(size, shares), start))
        start += size
    return plan


def count_micro_batches(
    rows: int, micro_batch_size: int | None, shares: int | Sequence[float]
) -> int:
    """Returns the smallest number of micro-batches with at most ``micro_batch_size`` rows per
    device; 0 without rows.
    """
    if micro_batch_size is None or rows == 0:
        return min(rows, 1)
    count = -(-rows // (micro_batch_size * (shares if isinstance(shares, int) else len(shares))))
    # the largest share decides
    while max(split_sizes(-(-rows // count), shares)) > micro_batch_size:
        count += 1
    return count


def proportional_sizes(rows: int, shares: Sequence[int]) -> list[int]:
    """Splits the rows of the targets, a multiple if they are flattened, in proportion to the rows
    of the inputs.
    """
    total = sum(shares)
    return (
        list(shares)
        if rows == total
        else [len(scaled(part, total, rows)) for part in consecutive(shares)]
    )


def scaled(part: RowNumbers, rows: int, target_rows: int) -> range:
    """Returns the rows of the targets, a multiple if they are flattened, that belong to consecutive
    rows of the inputs.
    """
    start, stop = (part[0], part[-1] + 1) if part else (0, 0)
    is_other = rows == 0 or (target_rows % rows and rows % target_rows)
    if is_other or start * target_rows % rows or stop * target_rows % rows:
        raise ValueError(
            f"the targets have {target_rows} rows, but the inputs have {rows}, expected the same number, or a multiple"
        )
    return range(start * target_rows // rows, stop * target_rows // rows)


def check_split(split: Sequence[float] | str | None, devices: int) -> tuple[float, ...] | None:
    """Returns the weights of the devices.

    Raises ``ValueError`` unless ``split`` is None or has a valid weight for each.
    """
    if split is None:
        return None
    try:
        weights = (
            ()
            if isinstance(split, (str, Mapping, Set))
            else tuple(float(weight) for weight in split)
        )
    except (TypeError, ValueError):  # The value is not a sequence of numbers.
        weights = ()
    if (
        len(weights) != devices
        or not all(0 <= weight < float("inf") for weight in weights)
        or not sum(weights) > 0
    ):
        raise ValueError(
            f"split={split!r}, expected None or one weight per device ({devices} here), none negative and not all zero, or "
            "'memory' for a DataParallelModel"
        )
    return weights


def share_by_memory(devices: Devices) -> tuple[float, ...] | None:
    """Returns the weights of the devices by their free bytes now.

    Replicas on one device share its memory equally.
    """
    free = [free_bytes(device) / devices.count(device) for device in devices]
    return tuple(part / sum(free) for part in free) if any(free) else None


_PRECISION = 1e-4  # The largest cost may be larger than the optimum by this part of it.


def cut_by_cost(
    costs: Sequence[float],
    shards: int,
    combine: Combine | None = None,
    *,
    most_rows: int | None = None,
    budget: float | None = None,
    together: int = 1,
) -> list[list[int]]:
    """Splits rows into shards whose largest cost is as small as possible.

    Returns the rows of each, the longest first.

    Args:
        costs: one for each row.
        shards: their number. With fewer rows, one shard per row.
        combine: cost of a shard, from the costs of its rows. It must not decrease with another row.
            ``None`` is rows x longest, the size of a padded shard. With ``sum`` nothing is padded,
            and a shard may have rows of any cost.
        most_rows: of a shard.
        budget: the largest cost of a shard. The number of shards suffices for it, as
            :func:`cut_to_budget` finds.
        together: number of shards that run at the same time. The last of them may then be smaller.

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
    if len(ordered) > shards * limit:
        raise ValueError(
            f"{len(ordered)} rows in {shards} shards of at most {limit}, expected {shards * limit} rows at most"
        )
    if shards <= 1:
        return [order] if order else []
    best = _fill_evenly(ordered, shards, combine, limit, budget)
    full = len(best) // together * together
    # Shards that run last need not fill the capacity, and can be more even.
    if 0 < full < len(best) < shards:
        rest = sorted(place for run in best[full:] for place in run)
        last = cut_by_cost(
            [ordered[place] for place in rest], shards - full, combine, most_rows=most_rows
        )
        best[full:] = [[rest[place] for place in run] for run in last]
    else:
        best = _use_all(best, shards, ordered, combine)
    return [[order[place] for place in run] for run in best]


def _fill_evenly(
    ordered: Sequence[float], shards: int, combine: Combine | None, limit: int, budget: float | None
) -> list[RowNumbers]:
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
    runs: Sequence[RowNumbers], shards: int, ordered: Sequence[float], combine: Combine | None
) -> list[RowNumbers]:
    """Splits the runs of the highest cost until there is one for each shard."""

    def cost(run: RowNumbers) -> float:
        return cost_of_shard([ordered[place] for place in run], combine)

    split = [*runs]
    while len(split) < shards:
        run = max((run for run in split if len(run) > 1), key=cost)
        above = 1 + bisect.bisect_left(
            range(1, len(run) - 1), True, key=lambda at: cost(run[:at]) >= cost(run[at:])
        )
        rows = min(max(above - 1, 1), above, key=lambda at: max(cost(run[:at]), cost(run[at:])))
        split.remove(run)
        split += [run[:rows], run[rows:]]
    return sorted(split, key=lambda run: run[0])
