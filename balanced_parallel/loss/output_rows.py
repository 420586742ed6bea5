"""Numbers of rows in the outputs that a criterion is called with, including lists that a user made of outputs."""

from collections.abc import Sequence
from typing import Any, cast

from ..batch import nested, provenance
from ..batch.dims import Dims
from ..batch.per_replica import PerReplica
from ..batch.row_marks import Arguments
from ..batch.shards import take_rows
from ..batch.splits import proportional_sizes, split_sizes

__all__: list[str] = []


def as_per_replica(outputs: Any, dim: Dims = None) -> PerReplica:
    """Converts the outputs in a call of a criterion to a ``PerReplica``.

    Args:
        outputs: a ``PerReplica``, a list or tuple with one entry per replica, or a tuple of several ``PerReplica``, one per
            leading argument of the criterion.
        dim: dimension of the rows in a list. ``None`` means that of the outputs in the list, else 0.

    Raises:
        TypeError: if ``outputs`` has another type, such as a tensor.
        ValueError: if a list does not have one output per replica, or the dimension of its rows is unknown.
    """
    if isinstance(outputs, PerReplica) and outputs:
        return outputs
    if not isinstance(outputs, (list, tuple)) or nested.is_named_tuple(outputs) or not outputs:
        raise TypeError(
            f"the criterion was given {nested.describe(outputs)}, expected the list that DataParallelModel returns, with "
            "one output per replica; for the output of one replica write criterion([output], ...)"
        )
    if all(isinstance(part, PerReplica) for part in outputs):
        return _zipped(outputs)
    sizes = provenance.sizes_of(outputs)
    dims = provenance.dims_of(outputs) if dim is None else dim
    return PerReplica(outputs, [_rows(output, dims) for output in outputs] if sizes is None else sizes, dims)


def _zipped(parts: Sequence[PerReplica]) -> PerReplica:
    sizes = {part.sizes for part in parts}
    if len(sizes) > 1:
        raise ValueError(
            f"the criterion was given outputs with {' and '.join(str(list(each)) for each in sizes)} rows per replica, expected "
            "the same numbers of rows in each"
        )
    return PerReplica(zip(*parts, strict=True), parts[0].sizes, tuple(part.dim for part in parts))


def _rows(output: Any, dims: Dims) -> int | None:
    tensor = nested.first_tensor(output)
    if tensor is None or not isinstance(dims, int) or not -tensor.dim() <= dims < tensor.dim():
        return None
    return tensor.size(dims)


def in_order(targets: Arguments, order: Sequence[int], rows: int, dim: int) -> Arguments:
    """Returns targets in the order of outputs whose rows were cut by cost.

    Args:
        targets: in the order of the batch.
        order: position in the batch of each row of the outputs.
        rows: number of rows of the targets.
        dim: dimension of their rows.

    Raises:
        ValueError: there is not one row of the targets for each row of the outputs.
    """
    if rows != len(order):
        raise ValueError(
            f"the targets have {rows} rows, and the outputs {len(order)}, in the order of their cost, expected the same number: "
            "call criterion([outputs.gather()], targets)"
        )
    return cast(Arguments, take_rows(targets, order, dim))


def sizes_like(outputs: PerReplica, rows: int | None) -> list[int]:
    """Returns the number of rows of the targets for each output, in proportion to the rows of the outputs.

    Args:
        outputs: one output per replica.
        rows: number of rows of the targets; ``None`` if they have no rows.

    Raises:
        ValueError: if a number would not be an integer.
    """
    known = [size for size in outputs.sizes if size is not None]
    if len(known) < len(outputs):
        return [1] * len(outputs) if rows is None else split_sizes(rows, len(outputs))
    return known if rows is None else proportional_sizes(rows, known)
