"""Marks on the arguments of a call that say where their rows are: :class:`Whole`, :class:`Rows`, and ``in_dims``."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from . import nested
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
            raise TypeError(f"Rows was given {nested.describe(entries)}, expected a list with one entry per row")
        self.entries = list(entries)


class Along:
    """Marks a tensor, or a list of plain values, with its rows in dimension ``dim``."""

    def __init__(self, leaf: Any, dim: int) -> None:
        self.leaf = leaf
        self.dim = dim


MARKS = (Whole, Rows, Along)


def without_mark(value: Any) -> Any:
    """Returns the value inside of a mark."""
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
    count = first + len(arguments.inputs)
    of_place: dict[int | str, Dims] = {}
    if isinstance(dims, int):
        of_place = dict.fromkeys([*range(first, count), *arguments.kwargs], dims)
    elif isinstance(dims, Mapping):
        names = _names(function)
        for key, of_argument in dims.items():
            of_place[_place_of(key, names, unnamed, count, arguments.kwargs)] = of_argument
    elif len(dims) > count:
        raise ValueError(
            f"the dimensions {dims!r} are those of {len(dims)} arguments, but {count} were given by position; name the others, "
            "as in {'mask': None}"
        )
    else:
        of_place = dict(enumerate(dims))
    inputs = [
        _marked(value, of_place[place], f"inputs[{place - first}]") if place in of_place else value
        for place, value in enumerate(arguments.inputs, first)
    ]
    kwargs = {
        name: _marked(value, of_place[name], f"kwargs[{name!r}]") if name in of_place else value
        for name, value in arguments.kwargs.items()
    }
    return Arguments(tuple(inputs), kwargs)


def dims_of_method(dims: Dims, method: Callable[..., Any], name: str) -> Dims:
    """Returns the part of ``in_dims`` that names arguments of another method than ``forward``.

    Raises:
        ValueError: ``in_dims`` gives positions, which are those of ``forward``.
    """
    if dims is None or isinstance(dims, int):
        return dims
    if not isinstance(dims, Mapping) or any(isinstance(key, int) for key in dims):
        raise ValueError(
            f"in_dims={dims!r} gives positions in forward, which say nothing about {name!r}: give in_dims by name, as in "
            "{'mask': None}, or wrap arguments in Whole(...) or Rows(...) at the call"
        )
    names = _names(method)
    return {key: of_argument for key, of_argument in dims.items() if names is None or key in names}


def mark_lists(node: Any, dim: int) -> Any:
    """Marks what lists hold, of which it is known that each entry has the rows. Their pieces may have as many rows as entries."""
    if isinstance(node, list) and nested.open_container(node) is not None:
        return _marked(node, dim, "")
    container = None if isinstance(node, torch.Tensor) else nested.open_container(node)
    if container is None:
        return node
    children = [mark_lists(child, dim) for child in container.children]
    changed = any(one is not other for one, other in zip(children, container.children, strict=True))
    return container.rebuild(children) if changed else node


def _place_of(key: Any, names: list[str] | None, unnamed: int, count: int, kwargs: Mapping[str, Any]) -> int | str:
    """The position of an argument in the call, or its name where it is given by name."""
    if names is None or key in kwargs:
        return key if isinstance(key, int) else str(key)
    if isinstance(key, str) and key in names:
        return names.index(key) - unnamed
    if not isinstance(key, int) or not 0 <= key + unnamed < len(names):
        raise ValueError(f"the dimensions name {key!r}, expected one of the arguments {', '.join(names)}, or its position")
    return names[key + unnamed] if key >= count else key


def _names(function: Callable[..., Any]) -> list[str] | None:
    """The names of a function's arguments; None where it takes any, or has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) for parameter in parameters):
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
        has_rows = (isinstance(leaf, torch.Tensor) and leaf.dim() > 0) or nested.is_row_list(leaf)
        return Whole(leaf) if dim is None else Along(leaf, dim) if has_rows else leaf

    return nested.map_leaves(mark_leaf, value)
