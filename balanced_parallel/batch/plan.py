"""Plans of a batch: numbers of rows in, the rows of each shard out. No tensors."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from fractions import Fraction

from ..runtime.devices import Devices, free_bytes


def split_sizes(rows: int, shares: int | Sequence[float]) -> list[int]:
    """Returns the number of rows of each part: equal parts, or in proportion to weights.

    With weights, the rows that remain go to the largest remainders, to the first ones among equals.
    The first part has one of the rows, if there are any.

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

    def rank(index: int) -> tuple[bool, Fraction]:
        # The first device has the module and its buffers, so it is never without rows.
        return index > 0 or sizes[0] > 0, sizes[index] - exact[index]

    by_remainder = sorted(range(len(sizes)), key=rank)
    for index in by_remainder[: rows - sum(sizes)]:
        sizes[index] += 1
    return sizes


RowNumbers = Sequence[int]  # numbers of rows: a range, or a list of them
Plan = Sequence[Sequence[RowNumbers]]  # micro-batches x devices


def consecutive(sizes: Sequence[int]) -> list[range]:
    """Returns ranges of the given sizes, one behind the other."""
    return [*itertools.starmap(range, itertools.pairwise(itertools.accumulate(sizes, initial=0)))]


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
    count = count_micro_batches(rows, None if limit is None else int(limit), shares)
    sizes = [split_sizes(size, shares) for size in split_sizes(rows, agree(count))]
    parts = iter(consecutive([*itertools.chain(*sizes)]))
    return [[*itertools.islice(parts, len(row))] for row in sizes]


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
        or not weights[0]
    ):
        raise ValueError(
            f"split={split!r}, expected None or one weight per device ({devices} here), none negative and the first one "
            "positive, as that device has the module, or 'memory' for a DataParallelModel"
        )
    return weights


def share_by_memory(devices: Devices) -> tuple[float, ...] | None:
    """Returns the weights of the devices by their free bytes now.

    Replicas on one device share its memory equally.
    """
    free = [free_bytes(device) / devices.count(device) for device in devices]
    return tuple(part / sum(free) for part in free) if any(free) else None
