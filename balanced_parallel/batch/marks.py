"""Marks for the rows of arguments, and the number of rows of arguments that may have marks.

torch's ``scatter`` silently drops samples if a second input has fewer rows. Here inputs with
different numbers of rows, and ambiguous ones, are errors.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..runtime.values import naming_arguments
from . import containers
from .containers import Dims, Nested, leaf_dims
from .outputs import PerReplica


class Arguments(NamedTuple):
    """Arguments of one call. Error messages name them ``inputs[0]`` or ``kwargs['mask']``."""

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]


class Whole:
    """Marks an argument that every replica gets whole.

    Its tensors are copied to the device of each replica.

    Args:
        value: any value.

    Example:
        >>> images, anchors = torch.zeros(5, 3), torch.zeros(7, 4)
        >>> pieces = scatter((images, Whole(anchors)), ["cpu", "cpu"])
        >>> [(shard.shape, whole.shape) for shard, whole in pieces]
        [(torch.Size([3, 3]), torch.Size([7, 4])), (torch.Size([2, 3]), torch.Size([7, 4]))]
    """

    @naming_arguments
    def __init__(self, value: object) -> None:
        self.value: Any = value.value if isinstance(value, Whole) else value


class Rows:
    """Marks a list with one entry per row: images of different sizes, one mapping per image, names.

    It is split by entries.

    Args:
        entries: a sequence, with one entry of any type per row.

    Example:
        >>> images = [torch.zeros(3, 20, 30), torch.zeros(3, 40, 40), torch.zeros(3, 10, 60)]
        >>> [len(shard) for shard in scatter(Rows(images), ["cpu", "cpu"])]
        [2, 1]
    """

    @naming_arguments
    def __init__(self, entries: Sequence[object]) -> None:
        if isinstance(entries, Tensor) or not isinstance(entries, Sequence):
            raise TypeError(
                f"Rows was given {containers.describe(entries)}, expected a list with one entry per row"
            )
        self.entries = list(entries)


class Along:
    """Marks a tensor, or a list of plain values, with its rows in dimension ``dim``.

    Args:
        leaf: a tensor, or a list with one plain value per row.
        dim: the dimension of its rows.

    Example:
        >>> images, state = torch.zeros(5, 3), torch.zeros(2, 5, 4)
        >>> pieces = scatter((images, Along(state, 1)), ["cpu", "cpu"])
        >>> [(shard.shape, state.shape) for shard, state in pieces]
        [(torch.Size([3, 3]), torch.Size([2, 3, 4])), (torch.Size([2, 3]), torch.Size([2, 2, 4]))]
    """

    @naming_arguments
    def __init__(self, leaf: Any, dim: int) -> None:
        if isinstance(leaf, (tuple, Mapping)) and not containers.is_row_list(leaf):
            raise TypeError(
                f"Along was given {containers.describe(leaf)}, expected a tensor: mark each one, as in (Along(h, 1), Along(c, 1))"
            )
        self.leaf = leaf
        self.dim = dim


MARKS = (Whole, Rows, Along)


def without_mark(value: object) -> Any:
    """Returns the value inside a mark, or ``value`` itself if it has none."""
    if isinstance(value, Rows):
        return value.entries
    if type(value) is Along:
        return value.leaf
    return value.value if isinstance(value, Whole) else value


def map_marked(function: Callable[[Any], object], node: Nested) -> Nested:
    """Returns a copy of ``node`` with ``function`` applied to each leaf, also to those inside of
    marks, which stay.
    """

    def apply(leaf: object) -> object:
        if isinstance(leaf, Along):
            return Along(map_marked(function, leaf.leaf), leaf.dim)
        if isinstance(leaf, (Whole, Rows)):
            return type(leaf)(map_marked(function, without_mark(leaf)))
        return function(leaf)

    return containers.map_leaves(apply, node)


def mark(arguments: Arguments, dim: int) -> Arguments:
    """Marks all arguments with the dimension of their rows. Marks that they have stay."""
    inputs = [mark_leaves(value, dim, f"inputs[{at}]") for at, value in enumerate(arguments.inputs)]
    kwargs = {
        name: mark_leaves(value, dim, f"kwargs[{name!r}]")
        for name, value in arguments.kwargs.items()
    }
    return Arguments(tuple(inputs), kwargs)


def parameters_of(function: Callable[..., object]) -> list[inspect.Parameter] | None:
    """Returns the arguments in the signature of a function, or None if it has none."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def mark_leaves(value: Nested, dims: Dims, place: str) -> Nested | Whole:
    """Returns a value with its leaves marked, as :func:`mark` marks those of an argument.

    Marks that it has stay.
    """
    if isinstance(value, (*MARKS, PerReplica)):  # they carry their own dimensions
        return value
    if dims is None:
        return Whole(value)
    dims_of_leaves = leaf_dims(value, dims, place)

    def mark_leaf(leaf: object) -> object:
        dim = next(dims_of_leaves)
        if isinstance(leaf, (*MARKS, PerReplica)):
            return leaf
        has_rows = (isinstance(leaf, Tensor) and leaf.dim() > 0) or (
            containers.is_row_list(leaf) and leaf
        )
        return Whole(leaf) if dim is None else Along(leaf, dim) if has_rows else leaf

    return containers.map_leaves(mark_leaf, value)


def count_marked_rows(node: object, dim: int, expected: int | None, name: str) -> int | None:
    """Returns the number of rows of all leaves, as ``count_rows`` does."""
    parts = (
        [(name, node.inputs), ("kwargs", node.kwargs)]
        if isinstance(node, Arguments)
        else [(name, node)]
    )
    counts: dict[str, tuple[object, int]] = {}
    lists: dict[str, Sequence[object]] = {}
    for label, part in parts:
        for place, leaf in containers.leaves(part, label):
            place = place.removeprefix(".")
            if (rows := _leaf_rows(leaf, dim, place)) is not None:
                counts[place] = leaf, rows
        lists |= {
            place.removeprefix("."): entries for place, entries in _lists_of_one_type(part, label)
        }
    return _common_rows(
        counts, lists, expected, f"the {name} have different numbers of rows along dimension {dim}"
    )


def _common_rows(
    counts: Mapping[str, tuple[object, int]],
    lists: Mapping[str, Sequence[object]],
    expected: int | None,
    difference: str,
) -> int | None:
    """Returns the number of rows of all leaves, from their places and those of the lists around
    them.
    """
    clear = [place for place in counts if not place.startswith(tuple(lists))]
    first = next(iter([*clear, *counts]), "")
    leaf, rows = counts.get(first, (None, expected or 0))
    for place, (other, count) in counts.items():
        if count != rows:
            raise ValueError(
                f"{difference}: {first} is {_described(leaf)} ({rows} rows), {place} is {_described(other)} ({count} "
                "rows); give all the same number of rows, wrap an input that every replica needs whole in Whole(...), a "
                "list with one entry per row in Rows(...), and a tensor with rows in dimension 1 in Along(x, 1)"
            )
    for place, entries in lists.items():
        is_longer = type(entries) is tuple and 1 < rows < len(entries)
        if len(entries) == rows or is_longer or (rows != expected and first.startswith(place)):
            entry = containers.describe(entries[0])
            raise ValueError(
                f"{place} is a {type(entries).__name__} of {len(entries)} entries of one type (the first is {entry}): each entry "
                "may be a row, or have all rows, or be a batch; wrap it in Rows(...) if its entries are rows, make it a tuple if "
                "each entry has all rows, or wrap it in Whole(...); pass batches one by one: for inputs, targets in loader"
            )
    return rows if counts else None


def _lists_of_one_type(node: Any, name: str) -> Iterator[tuple[str, Sequence[object]]]:
    """Yields the outermost lists whose entries could be rows, other sequences, and tuples of numbers
    and other values without rows, with their key paths.
    """
    container = containers.open_container(node)
    if container is None:
        if isinstance(node, Sequence) and not isinstance(node, (str, bytes, list, tuple)) and node:
            yield name, node
        return
    is_inner_tuple = type(node) is tuple and "[" in name
    if (isinstance(node, list) or is_inner_tuple) and _are_alike(node):
        leaves = [leaf for _, leaf in containers.leaves(node)]
        marks = [
            type(leaf) is Along or (is_inner_tuple and getattr(leaf, "ndim", 0)) for leaf in leaves
        ]
        if not any(marks):
            yield name, node
            return
    for place, child in zip(container.places, container.children, strict=True):
        yield from _lists_of_one_type(child, name + place)


def _are_alike(entries: Sequence[object]) -> bool:
    kinds = {
        (type(entry), entry.dim(), entry.dtype) if isinstance(entry, Tensor) else type(entry)
        for entry in entries
    }
    return len(kinds) == 1 and not kinds & {*MARKS, PerReplica, type(None)}


def _described(leaf: object) -> str:
    if isinstance(leaf, Rows):
        return f"Rows of {len(leaf.entries)} entries"
    leaf = without_mark(leaf)
    return (
        f"outputs of {len(leaf)} replicas"
        if isinstance(leaf, PerReplica)
        else containers.describe(leaf)
    )


def _leaf_rows(leaf: object, dim: int, place: str) -> int | None:
    if isinstance(leaf, Along):
        return _leaf_rows(leaf.leaf, leaf.dim, place)
    if isinstance(leaf, Tensor):
        if leaf.dim() and not -leaf.dim() <= dim < leaf.dim():
            raise ValueError(
                f"{place} is {containers.describe(leaf)}, expected rows in dimension {dim}: wrap it in Along(x, 1) "
                "for rows in dimension 1, or in Whole(...)"
            )
        return leaf.size(dim) if leaf.dim() else None
    if isinstance(leaf, Rows):
        return len(leaf.entries)
    if isinstance(leaf, PerReplica):
        return None if None in leaf.sizes else sum(size or 0 for size in leaf.sizes)
    if containers.is_row_list(leaf):
        return len(leaf) or None
    _refuse_objects(leaf, place)
    return None


def _refuse_objects(leaf: object, place: str) -> None:
    """Raises ``TypeError`` for an object with tensors that have rows."""
    if isinstance(leaf, PackedSequence):
        raise TypeError(
            f"{place} is a PackedSequence, which cannot be split by rows: pass the padded tensor and the lengths"
        )
    if getattr(leaf, "ndim", 0) and hasattr(leaf, "__array__"):
        shape = tuple(getattr(leaf, "shape", ()))
        raise TypeError(
            f"{place} is an array of shape {shape}, expected a tensor: use torch.as_tensor"
        )
    if holds_tensors(leaf, 3):
        raise TypeError(
            f"{place} is {containers.describe(leaf)} that holds tensors, which cannot be split by rows: pass its tensors, a "
            "dataclass or a mapping of them, Rows(list) for a list with one object per row, or Whole(...) for every replica"
        )


def holds_tensors(value: object, depth: int) -> bool:
    """Returns True for a value with tensors in it, down to a depth of objects."""
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, (*MARKS, torch.nn.Module, type)) or inspect.isroutine(value):
        return False
    # The state of an object is its attributes, or also those in slots.
    state = tuple(value) if isinstance(value, tuple) else object.__getstate__(value)
    return any(holds_tensors(leaf, depth - 1) for _, leaf in containers.leaves(state))


def objects_in(node: object) -> list[object]:
    """Returns the leaves that have tensors inside, such as distributions, and are none."""
    leaves = (leaf for _, leaf in containers.leaves(node) if not isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if holds_tensors(leaf, 3)]
