"""Cuts an effective batch over time: as few micro-batches as fit, their sizes differing by at most one row."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .dims import Dims
from .nested import map_leaves, spread
from .per_replica import PerReplica
from .row_marks import Arguments, mark_lists
from .rows import count_rows, cut
from .scattering import proportional_sizes, split_sizes

__all__: list[str] = []


def as_arguments(inputs: Any) -> Arguments:
    """The call of a model with ``inputs``: a mapping is spread over its keyword arguments, a tuple over its positional ones."""
    if isinstance(inputs, Mapping):
        return Arguments((), dict(inputs))
    return Arguments(spread(inputs), {})


def count_micro_batches(rows: int, micro_batch_size: int | None, shares: int | Sequence[float]) -> int:
    """How many micro-batches give no device more than ``micro_batch_size`` rows at once; none for no rows.

    Args:
        rows: of the whole batch.
        micro_batch_size: rows per device at most; ``None`` is no limit.
        shares: how many equal devices there are, or the weight of each.
    """
    if micro_batch_size is None or rows == 0:
        return min(rows, 1)
    count = -(-rows // (micro_batch_size * (shares if isinstance(shares, int) else len(shares))))
    while max(split_sizes(-(-rows // count), shares)) > micro_batch_size:  # of unequal devices the largest share decides
        count += 1
    return count


def cut_batch(
    arguments: Arguments, targets: tuple[Any, ...], sizes: Sequence[int], dims: tuple[int, int]
) -> list[tuple[Arguments, tuple[Any, ...]]]:
    """Views of ``sizes[i]`` rows of the arguments along ``dims[0]``, and of as many of the targets along ``dims[1]``.

    Raises:
        ValueError: the targets' rows are not those of the arguments, or a multiple of them.
    """
    target_rows = count_rows(targets, dims[1], sum(sizes))
    target_sizes = sizes if target_rows is None else proportional_sizes(target_rows, sizes)
    arguments, targets = mark_lists(arguments, dims[0]), mark_lists(targets, dims[1])
    return list(zip(cut(arguments, sizes, dims[0]), cut(targets, target_sizes, dims[1]), strict=True))


def detach_outputs(outputs: PerReplica) -> PerReplica:
    """The replicas' outputs without their graph."""

    def detach(leaf: Any) -> Any:
        return leaf.detach() if isinstance(leaf, Tensor) else leaf

    return outputs.map(lambda output: map_leaves(detach, output))


def join_outputs(micro_batches: Sequence[PerReplica], dims: Dims) -> PerReplica:
    """The outputs of all micro-batches as those of one batch, in the order of the rows."""
    entries = [output for outputs in micro_batches for output in outputs]
    return PerReplica(entries, [size for outputs in micro_batches for size in outputs.sizes], dims)
