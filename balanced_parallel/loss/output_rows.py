"""The rows of a criterion's outputs, found again where a list of them was made by hand."""

from collections.abc import Sequence
from typing import Any

from ..batch import nested, provenance
from ..batch.dims import Dims
from ..batch.per_replica import PerReplica
from ..batch.scattering import proportional_sizes, split_sizes

__all__: list[str] = []


def as_per_replica(outputs: Any, dim: Dims = None) -> PerReplica:
    """The outputs of a criterion's call, one per replica.

    Args:
        outputs: a ``PerReplica``, a list or tuple with one entry per replica, or a tuple of ``PerReplica``, which fill the
            criterion's leading arguments.
        dim: the dimension of the rows in a list; ``None`` is 0, unless the outputs that it was made of say otherwise.

    Raises:
        TypeError: something else, such as a tensor.
        ValueError: a list that does not hold one output of each replica, or whose rows are nobody knows where.
    """
    if isinstance(outputs, PerReplica) and outputs:
        return outputs
    if not isinstance(outputs, (list, tuple)) or nested.is_named_tuple(outputs) or not outputs:
        raise TypeError(
            f"the criterion was given {nested.describe(outputs)}, expected the list that DataParallelModel returns, with "
            "one output per replica; for a single output write criterion([output], ...)"
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
            f"the criterion was given outputs with {' and '.join(str(list(one)) for one in sizes)} rows per replica, expected "
            "the same rows in each"
        )
    return PerReplica(zip(*parts, strict=True), parts[0].sizes, tuple(part.dim for part in parts))


def _rows(output: Any, dims: Dims) -> int | None:
    tensor = nested.first_tensor(output)
    if tensor is None or not isinstance(dims, int) or not -tensor.dim() <= dims < tensor.dim():
        return None
    return tensor.size(dims)


def sizes_like(outputs: PerReplica, rows: int | None) -> list[int]:
    """The rows of the targets for each output, in proportion to the rows that its replica was given.

    Args:
        outputs: one per replica.
        rows: of the targets; ``None`` where these have none.

    Raises:
        ValueError: they do not divide so.
    """
    known = [size for size in outputs.sizes if size is not None]
    if len(known) < len(outputs):
        return [1] * len(outputs) if rows is None else split_sizes(rows, len(outputs))
    return known if rows is None else proportional_sizes(rows, known)
