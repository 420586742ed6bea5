"""Nested containers of a batch: their leaves, functions that map and merge them, and the dimensions
of the rows in them.

torch's ``scatter`` and ``gather`` support tuples, lists and dicts only, and break strings
(pytorch#41327, #62466, #13447). Here named tuples, mappings and dataclasses keep their type too,
including ``ModelOutput`` and ``BatchEncoding`` of Hugging Face.
"""

import copy
import dataclasses
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar, cast

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..runtime.values import check_number

# a nested structure, or a leaf; a function that maps leaves returns the same structure
Nested = TypeVar("Nested")


class Leaf:
    """Base class of containers that count as one leaf."""


class Container(NamedTuple):
    """A container taken apart: the keys of its children as code, such as ``[0]``, the children, and
    how to rebuild it.
    """

    places: list[str]
    children: list[object]
    rebuild: Callable[[Sequence[object]], object]


def is_plain(value: object) -> bool:
    """Returns True for a string, bytes, a number, or a bool."""
    return isinstance(value, (str, bytes, numbers.Number)) and not isinstance(value, Tensor)


def is_row_list(value: object) -> TypeGuard[list[object] | tuple[object, ...]]:
    """Returns True for a list with one plain value or None per row, or a tuple of strings, as
    ``default_collate`` makes it.
    """
    if type(value) is tuple:
        return bool(value) and all(isinstance(entry, (str, bytes)) for entry in value)
    if isinstance(value, Leaf) or not isinstance(value, list):
        return False
    return all(is_plain(entry) or entry is None for entry in value) and (
        not value or any(entry is not None for entry in value)
    )


def open_container(node: object) -> Container | None:
    """Takes a container apart.

    Returns None for a leaf: a tensor, a list of plain values, or any other object.
    """
    if _is_leaf(node):
        return None
    # A ModelOutput is a dataclass too, but its mapping has no entries that are None.
    if isinstance(node, Mapping):
        return Container(
            [f"[{key!r}]" for key in node], list(node.values()), lambda new: _with_items(node, new)
        )
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
        children = [getattr(node, name) for name in names]
        return Container(
            [f".{name}" for name in names], children, lambda new: _with_fields(node, names, new)
        )
    if is_named_tuple(node):
        return Container(
            [f".{name}" for name in node._fields], list(node), lambda new: type(node)._make(new)
        )
    if isinstance(node, (tuple, list)):
        return Container([f"[{index}]" for index in range(len(node))], list(node), type(node))
    return None


def _is_leaf(node: object) -> bool:
    # The fields of a PackedSequence have no rows. A tensordict iterates over rows, and its classes
    # keep their size.
    is_other = isinstance(node, (Tensor, PackedSequence, Leaf)) or hasattr(type(node), "batch_dims")
    return is_other or is_row_list(node)


def is_named_tuple(node: object) -> TypeGuard[NamedTuple]:
    """Returns True for an instance of a named tuple."""
    return isinstance(node, tuple) and hasattr(node, "_fields") and hasattr(node, "_make")


def _with_items(node: Any, values: Sequence[object]) -> object:
    if not hasattr(node, "__setitem__"):
        return type(node)(dict(zip(node, values, strict=True)))
    # keeps the factory of a defaultdict and the fields of a ModelOutput, which a constructor would
    # need
    new = copy.copy(node)
    for key, value in zip(list(node), values, strict=True):
        new[key] = value
    return new


def _with_fields(node: Nested, names: Sequence[str], values: Sequence[object]) -> Nested:
    # dataclasses.replace would refuse init=False fields and run __post_init__ on pieces
    new = copy.copy(node)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(new, name, value)
    return new


def leaves(node: object, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each leaf of ``node`` with its key path, such as ``inputs[0]['mask']``."""
    container = open_container(node)
    if container is None:
        yield place, node
        return
    for key, child in zip(container.places, container.children, strict=True):
        yield from leaves(child, place + key)


def map_leaves(function: Callable[[Any], object], node: Nested) -> Nested:
    """Returns a copy of ``node`` with ``function`` applied to each leaf."""
    part: Any = node
    # Shortcuts for the most frequent leaf and the two most frequent containers come first.
    if type(part) is Tensor:
        part = function(part)
    elif type(part) is tuple and not is_row_list(part):
        part = tuple([map_leaves(function, child) for child in part])
    elif type(part) is dict:
        part = {key: map_leaves(function, child) for key, child in part.items()}
    else:
        container = open_container(part)
        if container is None:
            part = function(part)
        else:
            part = container.rebuild([map_leaves(function, child) for child in container.children])
    return cast(Nested, part)


_LISTS = (
    ". A list is several outputs with all rows each: if its entries are rows, join the lists instead, as in "
    "[row for output in outputs for row in output]; rows that were cut by cost are in the order outputs.order"
)


def zip_leaves(
    function: Callable[[str, list[Any]], object], nodes: Sequence[object], place: str = ""
) -> Any:
    """Merges structures with the same entries: each leaf of the result is
    ``function(place, values)`` of the leaves at that place.
    """
    columns = [[*leaves(node, place)] for node in nodes]
    places, *others = [[at for at, _ in column] for column in columns]
    for index, names in enumerate(others, 1):
        if names != places:
            hint = _LISTS if type(nodes[0]) is type(nodes[index]) is list else ""
            raise ValueError(
                f"the structures differ at {place or 'the top'}: {', '.join(places)} in the first, {', '.join(names)} in "
                f"number {index}; expected the same entries in each{hint}"
            )
    values = ([leaf for _, leaf in entries] for entries in zip(*columns, strict=True))
    merged = map(function, places, values)
    return map_leaves(lambda _: next(merged), nodes[0])


def tensors_in(node: object) -> list[Tensor]:
    """Returns the tensors among the leaves of ``node``."""
    return [leaf for _, leaf in leaves(node) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], object], node: Nested) -> Nested:
    """Returns a copy of ``node`` with ``function`` applied to each tensor among its leaves."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, node)


def first_tensor(node: object) -> Tensor | None:
    """Returns the first tensor among the leaves of ``node``, or None."""
    return next(iter(tensors_in(node)), None)


def describe(node: object) -> str:
    """Describes a value for error messages: the shape of a tensor, the type and the entries of a
    container.
    """
    if isinstance(node, Tensor):
        return f"a tensor of shape {tuple(node.shape)}"
    if is_row_list(node):
        return f"a {type(node).__name__} of {len(node)} plain values"
    if isinstance(node, type):
        return f"the class {node.__name__}"
    container = open_container(node)
    if container is None:
        return (
            f"{type(node).__name__} {node!r}"
            if is_plain(node) or node is None
            else f"an object of type {type(node).__name__}"
        )
    return f"{type(node).__name__} with entries {', '.join(container.places) or '(none)'}"


Dims = int | None | Sequence[Any]


def check_dim(dim: object) -> None:
    """Raises ``TypeError`` if ``dim`` is neither an integer nor None."""
    if dim is not None:
        check_number("dim", dim, "an integer, the dimension of the rows", whole=True)


def check_dims(dims: object, name: str) -> None:
    """Raises ``TypeError`` if ``dims`` contains anything but integers, ``None`` and sequences."""
    for dim in _single_dims(dims):
        if isinstance(dim, bool) or not isinstance(dim, int | None):
            raise TypeError(
                f"{name} contains {dim!r}, expected the dimension of the rows, None for a value without rows, or a sequence "
                "of these in the order of the entries"
            )


def _single_dims(dims: object) -> list[object]:
    if isinstance(dims, (str, bytes)) or not isinstance(dims, Sequence):
        return [dims]
    return [dim for entry in dims for dim in _single_dims(entry)]


def leaf_dims(node: object, dims: Dims, place: str = "") -> Iterator[int | None]:
    """Yields the dimension of the rows of each leaf of ``node``, in the order of :func:`leaves`.

    ``dims`` is one dimension for all leaves, or a sequence with one entry per entry of ``node``.
    ``None`` stands for a leaf without rows.

    Example:
        >>> list(leaf_dims({"x": 1, "state": (2, 3)}, (0, (1, None))))
        [0, 1, None]
    """
    if dims is None or isinstance(dims, int):
        yield from [dims] * sum(1 for _ in leaves(node))
        return
    container = open_container(node)
    if container is None:
        raise ValueError(
            f"{place or 'the value'} is {describe(node)}, expected a container, for which the dimensions {dims!r} are"
        )
    count = len(container.children)
    if len(dims) != count:
        raise ValueError(
            f"{place or 'the value'} has {count} entries, expected {len(dims)}, one for each of the dimensions {dims!r}"
        )
    for key, child, entry in zip(container.places, container.children, dims, strict=True):
        yield from leaf_dims(child, entry, place + key)


def entry_names(container: Container) -> list[str]:
    """Returns the names of the entries as a user writes them in ``dims``: ``logits`` for
    ``.logits``, ``0`` for ``[0]``.
    """
    return [place.strip(".[]'\"") for place in container.places]


def map_rows(function: Callable[[Any, int | None], object], node: Nested, dims: Dims) -> Nested:
    """Returns a copy of ``node`` with ``function(leaf, dim)`` in place of each leaf, from the
    dimension of its rows.
    """
    dims_of_leaves = leaf_dims(node, dims, "output")
    return map_leaves(lambda leaf: function(leaf, next(dims_of_leaves)), node)


def dims_at(node: object, dims: Dims, key: object) -> Dims:
    """Returns the part of ``dims`` for the entry ``key`` of ``node``, or 0 if ``dims`` has none."""
    if dims is None or isinstance(dims, int):
        return dims
    container = open_container(node)
    names = [] if container is None else entry_names(container)
    return dims[names.index(str(key))] if str(key) in names else 0


def is_first(dims: Dims) -> bool:
    """Returns True if all rows are in dimension 0."""
    return not any(_single_dims(dims))
