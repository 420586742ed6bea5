"""Rows of a batch: counts the rows of arguments, and splits arguments by rows.

torch's ``scatter`` silently drops samples if a second input has fewer rows, and passes objects of unknown types whole to every
device. Here inputs with different numbers of rows are an error, and so are ambiguous inputs.
"""

import functools
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ..runtime.devices import move
from . import nested
from .per_replica import PerReplica
from .row_marks import MARKS, Along, Arguments, Rows, Whole
from .shards import RowShards

__all__: list[str] = []


def count_rows(node: Any, dim: int = 0, expected: int | None = None, name: str = "inputs") -> int | None:
    """Returns the number of rows, which all parts of ``node`` with rows must have; None if no part has rows.

    Args:
        node: arguments, or another structure.
        dim: dimension of the rows in tensors that are not marked.
        expected: number of rows of the inputs that ``node`` belongs to. It decides if the entries of a list are rows or have rows
            each.
        name: of ``node`` in messages.

    Raises:
        ValueError: if two parts have different numbers of rows, a tensor has no dimension ``dim``, or the entries of a list may
            be rows or have rows.
        TypeError: for an array, a PackedSequence, or an object that holds tensors. Replicas would get them whole by mistake.
    """
    only = node.inputs[0] if type(node) is Arguments and len(node.inputs) == 1 and not node.kwargs else node
    only = only[0] if type(only) is tuple and len(only) == 1 else only
    if type(only) is torch.Tensor and 0 <= dim < only.dim():  # shortcut for the most frequent input
        return only.size(dim)
    known: tuple[str, Any, int] | None = None
    ambiguous: dict[str, list[Any]] = {}
    parts = [(node.inputs, name), (node.kwargs, "kwargs")] if isinstance(node, Arguments) else [(node, name)]
    for place, leaf, holder in (entry for part, called in parts for entry in _leaves(part, called)):
        rows = _leaf_rows(leaf, dim, place)
        if rows is None:
            continue
        if holder is not None and type(leaf) is not Along:
            ambiguous[holder[0]] = holder[1]
        if known is not None and known[2] != rows:
            raise ValueError(
                f"the {name} have different numbers of rows along dimension {dim}: {known[0]} is {_described(known[1])} "
                f"({known[2]} rows), {place} is {_described(leaf)} ({rows} rows); give all the same number of rows, wrap an "
                "input that every replica needs whole in Whole(...), a list with one entry per row in Rows(...), or give in_dims="
            )
        if known is None or known[0].startswith(tuple(ambiguous)):
            known = place, leaf, rows
    for place, entries in ambiguous.items():
        assert known is not None
        if (known[0].startswith(place) and known[2] != expected) or len(entries) == known[2]:
            raise ValueError(
                f"{place} is a list of {len(entries)} entries of one type (the first is {nested.describe(entries[0])}): each "
                "entry may be a row, or have all rows. Wrap the list in Rows(...) if its entries are rows, make it a tuple or "
                "give in_dims= if each entry has all rows, or wrap it in Whole(...)"
            )
    return None if known is None else known[2]


def _leaves(
    node: Any, name: str, holder: tuple[str, list[Any]] | None = None
) -> Iterator[tuple[str, Any, tuple[str, list[Any]] | None]]:
    """Yields each leaf with its key path, and with the outermost list around it whose entries could be rows."""
    container = nested.open_container(node)
    if container is None:
        yield name.removeprefix("."), node, holder
        return
    if holder is None and isinstance(node, list) and _may_be_rows(node):
        holder = name.removeprefix("."), node
    for place, child in zip(container.places, container.children, strict=True):
        yield from _leaves(child, name + place, holder)


def _may_be_rows(entries: list[Any]) -> bool:
    """Returns True if the entries have one type, and tensors among them one number of dimensions and one dtype."""
    kinds = {(type(entry), entry.dim(), entry.dtype) if isinstance(entry, torch.Tensor) else type(entry) for entry in entries}
    return len(kinds) == 1 and not kinds & {*MARKS, PerReplica, type(None)}


def _described(leaf: Any) -> str:
    leaf = leaf.leaf if type(leaf) is Along else leaf
    if isinstance(leaf, Rows):
        return f"Rows of {len(leaf.entries)} entries"
    return f"outputs of {len(leaf)} replicas" if isinstance(leaf, PerReplica) else nested.describe(leaf)


def _leaf_rows(leaf: Any, dim: int, place: str) -> int | None:
    if isinstance(leaf, torch.Tensor):
        return _tensor_rows(leaf, dim, place)
    if type(leaf) is Along:
        return _tensor_rows(leaf.leaf, leaf.dim, place) if isinstance(leaf.leaf, torch.Tensor) else len(leaf.leaf)
    if isinstance(leaf, Rows):
        return len(leaf.entries)
    if isinstance(leaf, PerReplica):
        return None if None in leaf.sizes else sum(size or 0 for size in leaf.sizes)
    if nested.is_row_list(leaf):
        return len(leaf) or None
    if isinstance(leaf, PackedSequence):
        raise TypeError(f"{place} is a PackedSequence, which cannot be split by rows: pass the padded tensor and the lengths")
    if getattr(leaf, "ndim", 0) and hasattr(leaf, "__array__"):
        raise TypeError(f"{place} is an array of shape {tuple(leaf.shape)}, expected a tensor: use torch.as_tensor")
    if _holds_tensors(leaf, 3):
        raise TypeError(
            f"{place} is {nested.describe(leaf)} that holds tensors, which cannot be split by rows: pass its tensors, or a "
            "dataclass or a mapping of them, Rows(list) for a list with one object per row, or Whole(...) to pass it whole to "
            "every replica"
        )
    return None


def _holds_tensors(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, (*MARKS, torch.nn.Module, type, functools.partial)) or inspect.isroutine(value):
        return False
    if isinstance(value, Mapping):
        children = list(value.values())
    elif isinstance(value, (list, tuple)):
        children = list(value)
    else:
        children = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in _slots(value.__class__))]
    return any(_holds_tensors(child, depth - 1) for child in children)


@functools.lru_cache
def _slots(kind: type) -> list[str]:
    """Returns the names of the attributes in ``__slots__``, of base classes too."""
    return [name for base in kind.__mro__ for name, value in vars(base).items() if inspect.ismemberdescriptor(value)]


def _tensor_rows(tensor: torch.Tensor, dim: int, place: str) -> int | None:
    if tensor.dim() == 0:
        return None
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"{place} is {nested.describe(tensor)}, expected rows in dimension {dim}: give in_dims= for arguments with rows in "
            "another dimension, or wrap it in Whole(...)"
        )
    return tensor.size(dim)


def cut(node: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    """Splits ``node`` into ``len(sizes)`` pieces of ``sizes[i]`` rows. Tensors become views, nothing is copied.

    Values without rows are in all pieces. Marks stay, so that pieces can be split again. :func:`move_leaves` removes them.
    """
    if len(sizes) == 1:
        return [node]
    if type(node) is Arguments and not node.kwargs:
        return [Arguments(inputs, {}) for inputs in cut(node.inputs, sizes, dim)]
    starts = [0, *itertools.accumulate(sizes)][: len(sizes)]

    def cut_leaf(leaf: Any) -> list[Any]:
        if isinstance(leaf, RowShards) and len(leaf) == len(sizes):
            return list(leaf)
        if isinstance(leaf, torch.Tensor):
            if leaf.layout != torch.strided or leaf.is_nested:
                layout = "nested" if leaf.is_nested else str(leaf.layout)
                raise TypeError(
                    f"a {layout} tensor cannot be split by rows, expected a dense one: pass .to_dense() of a sparse tensor, the "
                    "padded tensor and the lengths of a nested one, or wrap it in Whole(...) if every replica needs all of it"
                )
            return [leaf.narrow(dim, *at) for at in zip(starts, sizes, strict=True)] if leaf.dim() else [leaf] * len(sizes)
        if type(leaf) is Along:
            return [Along(piece, leaf.dim) for piece in cut(leaf.leaf, sizes, leaf.dim)]
        if nested.is_row_list(leaf):
            return [leaf[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        if isinstance(leaf, Rows):
            return [Rows(leaf.entries[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
        if isinstance(leaf, PerReplica) and None not in leaf.sizes:
            return [leaf.narrow(*at) for at in zip(starts, sizes, strict=True)]
        return [leaf] * len(sizes)

    return nested.unzip_leaves(cut_leaf, node, len(sizes))


def move_leaves(node: Any, device: torch.device | None) -> Any:
    """Returns ``node`` with all tensors on ``device``, or where they are if that is None, and without marks."""

    def move_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf if device is None else move(leaf, device)
        if isinstance(leaf, Whole):
            return move_leaves(leaf.value, device)
        if isinstance(leaf, Rows):
            return [move_leaves(entry, device) for entry in leaf.entries]
        if type(leaf) is Along:
            return move_leaves(leaf.leaf, device)
        return leaf.on(device) if isinstance(leaf, PerReplica) and device is not None else leaf

    return nested.map_leaves(move_leaf, node)
