"""The dimension of the rows in a tensor. A reduction along it is a sum for each column.

Rows are outermost in the memory of an output, so they have the largest stride, also in a transposed
view. A copy of such a view has another order in the memory::

    p                                        (rows, classes, height, width)
    p.sum((0, 2, 3))                         a sum for each class
    p.transpose(0, 1).reshape(classes, -1)   the rows are part of the last dimension
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .formula import flatten

MEANS = {"mean", "nanmean"}
REDUCTIONS = {"sum", "nansum", "count_nonzero", "mean"}
PRODUCTS = {"matmul", "mm", "einsum"}
SCATTERS = {"index_add", "scatter_add", "bincount"}  # Sums of rows in places that an index tells.
TRANSPOSES = {"T", "mT", "H", "mH"}
_VIEWS = TRANSPOSES | {"t", "permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims"}
_MOVES = _VIEWS | {"reshape", "view", "flatten", "contiguous", "clone"}
_PREPENDING = {"stack", "unsqueeze", "getitem", "__getitem__"}
_BROADCASTS = {"add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum"}
_STACKED = -1  # No dimension has the rows.


def moves_rows(name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor) -> bool:
    """Returns True for a function that reduces the rows, or after which they may be in another
    dimension than the first.
    """
    if name == "einsum" or name.strip("_") in SCATTERS:
        return True
    if name in REDUCTIONS:
        return is_strided(args) and is_along(dim_of(args[0]), args, kwargs)
    if name not in _MOVES:
        return prepends(name, args, kwargs)
    # A copy of one row may be a view with other strides.
    return is_strided(args) and any(map(dim_of, (args[0], result)))


def prepends(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns True for a function that puts a dimension before that of the rows."""
    if name not in _PREPENDING:
        return False
    if not args:  # The tensor has a name, and its memory tells.
        return name == "stack"
    place = kwargs.get("dim", 0 if len(args) == 1 else args[-1])
    if name in ("stack", "unsqueeze"):
        first = args[0][0] if name == "stack" else args[0]
        return place in (0, -1 - first.dim())
    first = place[0] if isinstance(place, tuple) and place else place
    return first is None


def rows_taken(name: str, values: Sequence[Any], rows: int | None) -> list[int]:
    """Returns the places of the rows that a function takes out of the first dimension, one by one."""
    name = name.strip("_")
    if name not in ("getitem", "select", "unbind") or values[0].shape[:1] != (rows,):
        return []
    table, *places = values
    if name in ("select", "unbind") and places and places[0] != 0:
        return []  # Another dimension is the first argument.
    if name == "unbind":
        return [*range(len(table))]
    place = places[-1]
    if isinstance(place, tuple) and place:
        place = place[0]
    return [place % len(table)] if type(place) is int else []


def dim_behind(name: str, rows: Tensor, before: int | None, result: Tensor) -> int | None:
    """Returns the dimension of the rows in the result of a function, or None if its memory tells.

    ``before`` is that in the argument ``rows``, likewise.
    """
    if name not in _MOVES or not is_strided([rows]):
        return _dim_beside(name, rows, before, result)
    dim = first_dim_of(rows) if before is None else before
    if name in _VIEWS:
        return dim_of(result) if before is None and dim == 0 else _STACKED
    if dim == _STACKED:
        return _STACKED
    # As many elements are before the rows as in the argument.
    count = rows.shape[:dim].numel()
    counts = [result.shape[:place].numel() for place in range(result.dim())]
    return counts.index(count) if count in counts else _STACKED


def _dim_beside(name: str, rows: Tensor, before: int | None, result: Tensor) -> int | None:
    """Returns the result of :func:`dim_behind` for a function that does not move dimensions."""
    if rows.shape == result.shape:
        return before
    added = result.dim() - rows.dim()
    dim = first_dim_of(rows) if before is None else before
    if name in _BROADCASTS and dim != _STACKED and (added or before):
        return dim + added
    return _STACKED if before else None


def broadcasts(name: str, args: Sequence[Any], result: Tensor) -> bool:
    """Returns True for a function that may put a dimension of another tensor before the rows."""
    dims = [each.dim() for each in args if isinstance(each, Tensor)]
    return name.strip("_") in _BROADCASTS and any(0 < dim < result.dim() for dim in dims)


def is_strided(args: Sequence[Any]) -> bool:
    """Returns True if the first argument is a tensor whose memory has strides."""
    return bool(args) and getattr(args[0], "layout", None) == torch.strided


def dim_of(rows: Tensor) -> int:
    """Returns the dimension of the rows, which have the largest stride."""
    strides = rows.stride()
    return strides.index(max(strides)) if strides else _STACKED


def first_dim_of(rows: Tensor) -> int:
    """Returns 0 for a tensor whose first dimension has the largest stride.

    The second one of an LSTM's output has, with ``batch_first``, so those may be positions.
    """
    return _STACKED if dim_of(rows) else 0


def is_along(dim: int, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns True for arguments of a reduction along a dimension."""
    dims = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    return dim >= 0 and not {dim, dim - args[0].dim()}.isdisjoint(flatten([dims]))


def contracts(name: str, args: Sequence[Any], dims: Sequence[int]) -> bool:
    """Returns True for a product of tensors that is summed along the rows of all, as ``x.T @ y``.

    ``dims`` are their dimensions of the rows.
    """
    if isinstance(args[0], Tensor):
        return dims == [1, 0] and args[0].dim() == 2
    inputs, arrow, output = args[0].replace(" ", "").partition("->")
    letters = {text[dim] for text, dim in zip(inputs.split(","), dims, strict=True)}
    is_known = bool(arrow) and _STACKED not in dims and len(letters) == 1
    return is_known and letters.isdisjoint(output + "...")
