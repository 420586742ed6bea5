"""Marks for the rows of arguments: :class:`Whole`, :class:`Rows`, and the dimensions of ``in_dims``."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from . import nested
from .dims import Dims, leaf_dims
from .per_replica import PerReplica

__all__: list[str] = []


class Arguments(NamedTuple):
    """Arguments of one call. Error messages name them ``inputs[0]`` or ``kwargs['mask']``."""

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]


class Whole:
    """Marks an argument that every replica gets whole. Its tensors are copied to the device of each replica.

    Args:
        value: any value.

    Example:
        >>> images, anchors = torch.zeros(5, 3), torch.zeros(7, 4)
        >>> pieces = scatter((images, Whole(anchors)), ["cpu", "cpu"])
        >>> [(shard.shape, whole.shape) for shard, whole in pieces]
        [(torch.Size([3, 3]), torch.Size([7, 4])), (torch.Size([2, 3]), torch.Size([7, 4]))]
    """

    def __init__(self, value: Any) -> None:
        self.value: Any = value.value if isinstance(value, Whole) else value


class Rows:
    """Marks a list with one entry per row: images of different sizes, one mapping per image, names.

    Each replica gets a list of its entries.

    Args:
        entries: one entry per row, of any type.

    Raises:
        TypeError: if ``entries`` is a tensor or not a sequence.

    Example:
        >>> images = [torch.zeros(3, 20, 30), torch.zeros(3, 40, 40), torch.zeros(3, 10, 60)]
        >>> [len(shard) for shard in scatter(Rows(images), ["cpu", "cpu"])]
        [2, 1]
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
    """Returns the value inside a mark, or ``value`` itself if it has none."""
    if isinstance(value, Rows):
        return value.entries
    return value.value if isinstance(value, Whole) else value


def mark(arguments: Arguments, dims: Dims, function: Callable[..., Any], *, first: int = 0, unnamed: int = 0) -> Arguments:
    """Marks ``arguments`` with the dimensions of their rows.

    Args:
        arguments: arguments of a call.
        dims: a sequence by position, a mapping by position or name, or one dimension for all. ``None`` marks nothing.
        function: the function that is called. Its signature gives the position of a name.
        first: position in the call of ``arguments.inputs[0]``.
        unnamed: number of further arguments that the function has before ``arguments.inputs[0]``. An output that is a tuple fills
            several arguments of a criterion, but is one argument of the call.

    Raises:
        ValueError: if ``dims`` has an entry for an argument that does not exist.
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
            f"the dimensions {dims!r} are given for {len(dims)} arguments, but {count} were passed by position; give the others "
            "by name, as in {'mask': None}"
        )
    else:
        of_place = dict(enumerate(dims))
    inputs = [
        mark_leaves(value, of_place[place], f"inputs[{place - first}]") if place in of_place else value
        for place, value in enumerate(arguments.inputs, first)
    ]
    kwargs = {
        name: mark_leaves(value, of_place[name], f"kwargs[{name!r}]") if name in of_place else value
        for name, value in arguments.kwargs.items()
    }
    return Arguments(tuple(inputs), kwargs)


def dims_of_method(dims: Dims, method: Callable[..., Any], name: str) -> Dims:
    """Returns the part of ``in_dims`` for the arguments of a method other than ``forward``.

    Raises:
        ValueError: if ``in_dims`` has positions, which are those of ``forward``.
    """
    if dims is None or isinstance(dims, int):
        return dims
    if not isinstance(dims, Mapping) or any(isinstance(key, int) for key in dims):
        raise ValueError(
            f"in_dims={dims!r} has positions of arguments of forward, which do not apply to {name!r}: give in_dims by name, as "
            "in {'mask': None}, or wrap arguments in Whole(...) or Rows(...) at the call"
        )
    names = _names(method)
    return {key: of_argument for key, of_argument in dims.items() if names is None or key in names}


def mark_lists(node: Any, dim: int) -> Any:
    """Marks the entries of lists whose entries are known to have rows each.

    Without marks, a shard with as many rows as the list has entries would be ambiguous.
    """
    if isinstance(node, list) and nested.open_container(node) is not None:
        return mark_leaves(node, dim, "")
    container = None if isinstance(node, torch.Tensor) else nested.open_container(node)
    if container is None:
        return node
    children = [mark_lists(child, dim) for child in container.children]
    changed = any(new is not old for new, old in zip(children, container.children, strict=True))
    return container.rebuild(children) if changed else node


def _place_of(key: Any, names: list[str] | None, unnamed: int, count: int, kwargs: Mapping[str, Any]) -> int | str:
    """Returns the position of an argument in the call, or its name if it is passed by name."""
    if names is None or key in kwargs:
        return key if isinstance(key, int) else str(key)
    if isinstance(key, str) and key in names:
        return names.index(key) - unnamed
    if not isinstance(key, int) or not 0 <= key + unnamed < len(names):
        raise ValueError(
            f"dimensions are given for {key!r}, expected one of the arguments {', '.join(names)}, or the position of one"
        )
    return names[key + unnamed] if key >= count else key


def _names(function: Callable[..., Any]) -> list[str] | None:
    """Returns the names of a function's arguments, or None if it accepts any arguments or has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def mark_leaves(value: Any, dims: Dims, place: str) -> Any:
    """Returns a value with its leaves marked, as :func:`mark` marks those of an argument. Marks that it has stay."""
    if isinstance(value, (*MARKS, PerReplica)):  # they carry their own dimensions
        return value
    if dims is None:
        return Whole(value)
    dims_of_leaves = leaf_dims(value, dims, 0, place)

    def mark_leaf(leaf: Any) -> Any:
        dim = next(dims_of_leaves)
        if isinstance(leaf, (*MARKS, PerReplica)):
            return leaf
        has_rows = (isinstance(leaf, torch.Tensor) and leaf.dim() > 0) or nested.is_row_list(leaf)
        return Whole(leaf) if dim is None else Along(leaf, dim) if has_rows else leaf

    return nested.map_leaves(mark_leaf, value)
