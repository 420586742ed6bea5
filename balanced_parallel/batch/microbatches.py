"""Splits an effective batch into micro-batches: as few as possible, with sizes that differ by at most one row.

14 rows in micro-batches of at most 3 rows per device, on two devices::

                 time ->
                 micro-batch 0   micro-batch 1   micro-batch 2
    device 0     rows 0-2        rows 5-7        rows 10-11
    device 1     rows 3-4        rows 8-9        rows 12-13
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .dims import Dims
from .nested import map_leaves, spread
from .per_replica import PerReplica
from .row_marks import Arguments, mark_lists
from .rows import count_rows, cut
from .splits import proportional_sizes, split_sizes

__all__: list[str] = []


def as_arguments(inputs: Any) -> Arguments:
    """Converts ``inputs`` to the arguments of a call: a mapping to keyword arguments, a tuple to positional arguments."""
    if isinstance(inputs, Mapping):
        return Arguments((), dict(inputs))
    return Arguments(spread(inputs), {})


def count_micro_batches(rows: int, micro_batch_size: int | None, shares: int | Sequence[float]) -> int:
    """Returns the smallest number of micro-batches with at most ``micro_batch_size`` rows per device; 0 without rows.

    Args:
        rows: number of rows of the whole batch.
        micro_batch_size: largest number of rows per device; ``None`` means no limit.
        shares: number of equal devices, or the weight of each device.
    """
    if micro_batch_size is None or rows == 0:
        return min(rows, 1)
    count = -(-rows // (micro_batch_size * (shares if isinstance(shares, int) else len(shares))))
    while max(split_sizes(-(-rows // count), shares)) > micro_batch_size:  # the largest share decides
        count += 1
    return count


def cut_batch(
    arguments: Arguments, targets: tuple[Any, ...], sizes: Sequence[int], dims: tuple[int, int]
) -> list[tuple[Arguments, tuple[Any, ...]]]:
    """Splits arguments along ``dims[0]`` and targets along ``dims[1]`` into micro-batches of ``sizes[i]`` rows. Copies nothing.

    Raises:
        ValueError: if the number of rows of the targets is not that of the arguments, or a multiple of it.
    """
    target_rows = count_rows(targets, dims[1], sum(sizes), "targets")
    target_sizes = sizes if target_rows is None else proportional_sizes(target_rows, sizes)
    arguments, targets = mark_lists(arguments, dims[0]), mark_lists(targets, dims[1])
    return list(zip(cut(arguments, sizes, dims[0]), cut(targets, target_sizes, dims[1]), strict=True))


def detach_outputs(outputs: PerReplica, order: Sequence[int] | None) -> PerReplica:
    """Returns the outputs of the replicas, detached from the autograd graph. ``order`` is that of their rows."""

    def detach(leaf: Any) -> Any:
        return leaf.detach() if isinstance(leaf, Tensor) else leaf

    return outputs.map(lambda output: map_leaves(detach, output)).in_order(order)


def join_outputs(micro_batches: Sequence[PerReplica], dims: Dims) -> PerReplica:
    """Joins the outputs of all micro-batches as the outputs of one batch, in the order of the rows."""
    entries = [output for outputs in micro_batches for output in outputs]
    joined = PerReplica(entries, [size for outputs in micro_batches for size in outputs.sizes], dims)
    orders = [outputs.order for outputs in micro_batches]
    return joined.in_order(None if None in orders else [row for order in orders for row in order or ()])
