"""Marks on the arguments of a call that say where their rows are: :class:`Whole`, :class:`Rows`, and ``in_dims``."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from . import nesting
from .dims import Dims, leaf_dims
from .per_replica import PerReplica

__all__: list[str] = []


class Arguments(NamedTuple):
    """The arguments of one call, so that messages can name them: ``inputs[0]``, ``kwargs['mask']``."""

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]


class Whole:
    """Hands ``value`` to every replica as it is, with its tensors on the replica's device.

    Args:
        value: anything; its tensors are not cut.

    Example:
        >>> outputs = model(images, Whole(anchors))  # doctest: +SKIP
    """

    def __init__(self, value: Any) -> None:
        self.value: Any = value.value if isinstance(value, Whole) else value


class Rows:
    """A list whose entries are the rows of the batch: images of different sizes, one mapping per image, names.

    Each replica gets a list of its entries.

    Args:
        entries: one per row, of any kind.

    Example:
        >>> losses = model(Rows(images), Rows(targets))  # doctest: +SKIP
    """

    def __init__(self, entries: Sequence[Any]) -> None:
        if isinstance(entries, torch.Tensor) or not isinstance(entries, Sequence):
            raise TypeError(f"Rows was given {nesting.describe(entries)}, expected a list with one entry per row")
        self.entries = list(entries)


class Along:
    """Marks a tensor, or a list of plain values, with its rows in dimension ``dim``."""

    def __init__(self, leaf: Any, dim: int) -> None:
        self.leaf = leaf
        self.dim = dim


MARKS = (Whole, Rows, Along)


def without_mark(value: Any) -> Any:
    """What the caller has wrapped in a mark."""
    if isinstance(value, Rows):
        return value.entries
    return value.value if isinstance(value, Whole) else value


def mark(arguments: Arguments, dims: Dims, function: Callable[..., Any], *, first: int = 0, unnamed: int = 0) -> Arguments:
    """``arguments`` with the dimensions of their rows, for who counts and cuts them.

    Args:
        arguments: of a call.
        dims: by position, as a sequence; by position or name, as a mapping; one for all. ``None`` marks nothing.
        function: its signature says which position a name has.
        first: the position in the call of the first of ``arguments.inputs``.
        unnamed: how many more arguments of the function than of the call stand before it.

    Raises:
        ValueError: ``dims`` names an argument that there is not.
    """
    if dims is None:
        return arguments
    of_place: dict[int | str, Dims] = {}
    if isinstance(dims, int):
        of_place = dict.fromkeys([*range(first, first + len(arguments.inputs)), *arguments.kwargs], dims)
    elif isinstance(dims, Mapping):
        names = _positional_names(function) if any(isinstance(key, str) for key in dims) else None
        for key, of_argument in dims.items():
            if names is None or key in arguments.kwargs or not isinstance(key, str):
                of_place[key] = of_argument
            elif key in names:
                of_place[names.index(key) - unnamed] = of_argument
            else:
                raise ValueError(f"the dimensions name {key!r}, expected one of the arguments {', '.join(names)}")
    elif len(dims) > first + len(arguments.inputs):
        raise ValueError(
            f"the dimensions {dims!r} are those of {len(dims)} arguments, but {first + len(arguments.inputs)} were given by "
            "position; name the others, as in {'mask': None}"
        )
    else:
        of_place = dict(enumerate(dims))
    beyond = [place for place in of_place if isinstance(place, int) and place >= first + len(arguments.inputs)]
    if beyond and isinstance(dims, Mapping) and beyond[0] in dims:
        raise ValueError(
            f"the dimensions {dims!r} name position {beyond[0]}, but {first + len(arguments.inputs)} arguments were given"
        )
    inputs = [
        _marked(value, of_place[place], f"inputs[{place - first}]") if place in of_place else value
        for place, value in enumerate(arguments.inputs, first)
    ]
    kwargs = {
        name: _marked(value, of_place[name], f"kwargs[{name!r}]") if name in of_place else value
        for name, value in arguments.kwargs.items()
    }
    return Arguments(tuple(inputs), kwargs)


def _positional_names(function: Callable[..., Any]) -> list[Any] | None:
    """The names of a function's arguments; None where it takes any, or has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def _marked(value: Any, dims: Dims, place: str) -> Any:
    if isinstance(value, (*MARKS, PerReplica)):  # they say it themselves
        return value
    if dims is None:
        return Whole(value)
    of_leaf = leaf_dims(value, dims, 0, place)

    def mark_leaf(leaf: Any) -> Any:
        dim = next(of_leaf)
        if isinstance(leaf, (*MARKS, PerReplica)):
            return leaf
        has_rows = (isinstance(leaf, torch.Tensor) and leaf.dim() > 0) or nesting.is_row_list(leaf)
        return Whole(leaf) if dim is None else Along(leaf, dim) if has_rows else leaf

    return nesting.map_leaves(mark_leaf, value)
