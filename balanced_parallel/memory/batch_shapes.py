"""Turns ``3x224x224``, ``mask=128:int64`` and ``pair.0=4`` into a batch on the meta device."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []


def parse_shape(text: str, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Returns the sizes and the dtype of one row, such as ``"3x224x224"`` or ``"128:int64"``.

    Without sizes, as in ``":int64"``, a row is one number.

    Raises:
        ValueError: the text is not a shape, or torch has no such dtype.
    """
    sizes, colon, name = text.partition(":")
    if colon and not name:
        raise ValueError(
            f"{text!r} has no dtype after the colon, expected :float32 or :int64 for one number per row, or 128:int64"
        )
    if colon:
        found = getattr(torch, name, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{text!r} has the dtype {name!r}, expected one of torch's, such as float32, bfloat16 or int64")
        dtype = found
    numbers = [int(size) for size in sizes.split("x")] if re.fullmatch(r"\d+(x\d+)*", sizes) else []
    if (not numbers and (sizes or not colon)) or 0 in numbers:
        raise ValueError(
            f"{text!r} is not the shape of a row, expected sizes such as 3x224x224, 128:int64, or :int64 for one number"
        )
    return tuple(numbers), dtype


def build_batch(texts: Sequence[str], rows: int, dim: int, dtype: torch.dtype) -> Any:
    """Returns a tensor for one shape and a tuple for several, on the meta device.

    Shapes may have key paths, as in ``mask=128`` or ``pair.0=4``. A name is a key of a mapping, a number an index of a tuple.

    Args:
        texts: shapes of one row, as for :func:`parse_shape`: all with a key path, or none.
        dim: the dimension of the rows, which the shapes leave out.

    Raises:
        ValueError: a shape or a key path is malformed, or key paths contradict each other.

    Example:
        >>> {name: tuple(tensor.shape) for name, tensor in build_batch(["ids=128", "mask=128"], 4, 0, torch.int64).items()}
        {'ids': (4, 128), 'mask': (4, 128)}
    """
    named = [text.partition("=") for text in texts]
    places = [place for place, equals, _ in named if equals]
    if places and len(places) < len(texts):
        bare = next(text for text, equals, _ in named if not equals)
        raise ValueError(f"{bare!r} has no name where {places[0]!r} has one, expected a name for each, or for none")
    tensors = [_tensor(text if equals else place, rows, dim, dtype) for place, equals, text in named]
    if not places:
        return tensors[0] if len(tensors) == 1 else tuple(tensors)
    tree: dict[str, Any] = {}
    for place, tensor in zip(places, tensors, strict=True):
        _put(tree, place, tensor)
    return _close(tree, "")


def _tensor(text: str, rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    sizes, dtype = parse_shape(text, dtype)
    if dim > len(sizes):
        raise ValueError(f"{text!r} has {len(sizes)} sizes without the rows, expected at least {dim} for rows in dimension {dim}")
    return torch.empty((*sizes[:dim], rows, *sizes[dim:]), dtype=dtype, device="meta")


def _put(tree: dict[str, Any], place: str, tensor: Tensor) -> None:
    *above, last = place.split(".")
    if not all(part.isidentifier() or part.isdecimal() for part in (*above, last)):
        raise ValueError(
            f"{place!r} is not a place in the input, expected names and numbers with dots between, as mask or pair.0"
        )
    for part in above:
        tree = tree.setdefault(part, {})
        if isinstance(tree, Tensor):
            raise ValueError(f"{place!r} lies in {part!r}, which has a shape of its own")
    if last in tree:
        raise ValueError(f"{place!r} is given twice")
    tree[last] = tensor


def _close(tree: Any, place: str) -> Any:
    """Replaces mappings whose keys are numbers by tuples."""
    if isinstance(tree, Tensor):
        return tree
    closed = {key: _close(value, f"{place}{key}.") for key, value in tree.items()}
    if not any(key.isdecimal() for key in closed):
        return closed
    if set(closed) != set(map(str, range(len(closed)))):
        where = f"in {place[:-1]!r} " if place else ""
        raise ValueError(f"the places {where}are {', '.join(closed)}, expected names, or the numbers from 0 on")
    return tuple(closed[str(index)] for index in range(len(closed)))
