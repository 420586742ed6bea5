"""Puts the replicas' pieces back together: the inverse of scatter, over devices and, under torchrun, over ranks.

torch's ``gather`` cannot put dataclasses, numbers or strings together; ``all_gather`` wants equal sizes. Here every rank
first tells the others what it has, so that sizes may differ and a mismatch is the same error on every rank, not a hang.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..runtime.collectives import gather_objects, gather_rows, world_size
from ..runtime.devices import DeviceLike, move, resolve_device, visible_devices
from . import nested, provenance
from .dims import Dims, leaf_dims

__all__: list[str] = []


def gather(outputs: Sequence[Any], device: DeviceLike | None = None, dim: int | None = None) -> Any:
    """Concatenates the outputs of the replicas, in the order of the rows.

    Tensors are concatenated along ``dim``, 0-dim tensors stacked; lists of plain values are concatenated, a plain value per
    replica becomes a list of them, ``None`` stays ``None``. Tuples, named tuples, lists, mappings and dataclasses keep their
    type. Gradients flow back to every piece. Where a process group with several ranks is running, the pieces of all ranks
    are gathered, in the order of the ranks, on every rank: each rank must call it. Sizes may differ, nothing is padded; a rank
    without rows passes an empty list.

    Args:
        outputs: one entry per replica, as :class:`DataParallelModel` returns.
        device: where the result goes; ``None`` is the device of the first output. ``"cpu"`` moves piece by piece, so that
            no accelerator ever holds the whole.
        dim: the dimension of the rows; ``None`` is that of the model's ``out_dims``, which a :class:`PerReplica` knows, else 0.

    Raises:
        TypeError: ``outputs`` is no list or tuple, or holds an object that cannot be put together.
        ValueError: there are no outputs, or their structures or shapes disagree; names the place and both. Or ``dim`` is not
            given for outputs whose rows are in another dimension than 0, and which are not in a :class:`PerReplica` any more.

    Example:
        >>> gather([torch.zeros(3, 10), torch.zeros(2, 10)]).shape
        torch.Size([5, 10])
    """
    if not isinstance(outputs, (list, tuple)) or nested.is_named_tuple(outputs):
        raise TypeError(
            f"gather was given {nested.describe(outputs)}, expected a list with one output per replica; "
            "for the output of a single one write gather([output])"
        )
    if not outputs and world_size() == 1:
        raise ValueError("gather was given no outputs, expected at least one")
    dims = provenance.dims_of(outputs) if dim is None else dim
    mine = [join(outputs, device, dims)] if outputs else []
    if world_size() == 1:
        return mine[0]
    return _gather_ranks(mine, dims, visible_devices()[0] if device is None else resolve_device(device))


def join(outputs: Sequence[Any], device: DeviceLike | None, dims: Dims) -> Any:
    """:func:`gather` within this process.

    Args:
        outputs: at least one.
        device: ``None`` is the device of the first output.
        dims: of the rows of each leaf; ``None`` for one that all replicas have alike, of which the first is taken.
    """
    first = nested.first_tensor(list(outputs))
    target = resolve_device(device) if device is not None else first.device if first is not None else torch.device("cpu")
    of_leaf = leaf_dims(outputs[0], dims, 0, "output")
    return nested.zip_leaves(lambda place, values: _join(place, values, target, next(of_leaf)), list(outputs), "output")


def _join(place: str, values: list[Any], device: torch.device, dim: int | None) -> Any:
    if all(isinstance(value, torch.Tensor) for value in values):
        return move(values[0], device) if dim is None else _join_tensors(place, values, device, dim)
    if all(value is None for value in values):
        return None
    if all(nested.is_row_list(value) for value in values):
        return type(values[0])(entry for value in values for entry in value)
    if all(nested.is_plain(value) for value in values):
        return values
    if len({type(value) for value in values}) == 1 and isinstance(values[0], Iterable):
        return _join_as_torch(place, values, device, dim)
    raise TypeError(
        f"{place} is {', '.join(dict.fromkeys(map(nested.describe, values)))}: expected tensors, plain values, lists of plain "
        "values, or containers of them, alike in every replica; pick those before gathering, as in "
        "gather([output.logits for output in outputs])"
    )


def _join_as_torch(place: str, values: list[Any], device: torch.device, dim: int | None) -> Any:
    """Joins what objects give when they are iterated over, and makes an object of that. torch's ``gather`` has this rule for
    all that it does not know, and the caches of transformers follow it (https://github.com/huggingface/transformers/pull/36373)."""
    columns = zip(*values, strict=True)
    parts = [nested.zip_leaves(lambda at, leaves: _join(at, leaves, device, dim), list(column), place) for column in columns]
    return type(values[0])(parts)


def _join_tensors(place: str, tensors: list[torch.Tensor], device: torch.device, dim: int) -> torch.Tensor:
    if all(tensor.dim() == 0 for tensor in tensors):
        return torch.stack([move(tensor, device) for tensor in tensors])
    layouts = {_layout(tensor, dim) for tensor in tensors}
    if len(layouts) > 1:
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(f"{place} has shapes {shapes}, expected shapes that differ in dimension {dim} only")
    if not -tensors[0].dim() <= dim < tensors[0].dim():
        raise ValueError(
            f"{place} has shape {tuple(tensors[0].shape)}, expected a dimension {dim} with the rows: say where they are with "
            "out_dims= at the model, or dim= here"
        )
    return torch.cat([move(tensor, device) for tensor in tensors], dim)


def _layout(tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
    """The shape with the dimension of the rows blanked."""
    shape = list(tensor.shape)
    if -len(shape) <= dim < len(shape):
        shape[dim] = -1
    return tuple(shape)


class _Header(nested.Leaf):
    """A leaf of one rank's outputs, as the other ranks are told of it before its rows are sent."""

    def __init__(self, leaf: Any, dim: int | None) -> None:
        if not (leaf is None or isinstance(leaf, torch.Tensor) or nested.is_row_list(leaf)):
            raise TypeError(
                f"{nested.describe(leaf)} cannot be gathered over ranks: pick tensors before, as in outputs.logits.gather()"
            )
        self.kind: Any = leaf.dtype if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        self.dim = dim if not isinstance(leaf, torch.Tensor) or leaf.dim() > 1 or dim is None else 0
        self.layout = _layout(leaf, len(leaf.shape) if self.dim is None else self.dim) if isinstance(leaf, torch.Tensor) else ()
        # what may differ: the rows of a tensor, the values of a list
        self.rows: Any = leaf
        if isinstance(leaf, torch.Tensor):
            self.rows = 0 if self.dim is None else leaf.size(self.dim)

    def __repr__(self) -> str:
        return f"{self.kind} {self.layout}"

    def nothing(self, device: torch.device) -> Any:
        """A leaf like it without rows."""
        if isinstance(self.kind, torch.dtype) and self.dim is None:
            raise ValueError(
                f"{self} is the same in each replica, and a rank without outputs has none: leave it out of the outputs"
            )
        if isinstance(self.kind, torch.dtype):
            return torch.empty([max(size, 0) for size in self.layout], dtype=self.kind, device=device)
        return None if self.rows is None else type(self.rows)()


def _gather_ranks(mine: list[Any], dims: Dims, device: torch.device) -> Any:
    """The rows of every rank. One exchange of layouts (and of plain values) first, then a tensor at a time.

    Args:
        mine: the whole of this rank; empty where it has no outputs.
        dims: of the rows.
        device: where a rank without outputs has those of the others.
    """
    of_leaf = (dim for whole in mine for dim in leaf_dims(whole, dims, 0))
    everyone = gather_objects([nested.map_leaves(lambda leaf: _Header(leaf, next(of_leaf)), whole) for whole in mine])
    known = [headers for rank in everyone for headers in rank]
    if not known:
        raise ValueError("gather was given no outputs on any rank, expected at least one")
    first = list(nested.leaves(known[0], "output"))
    columns: list[list[Any]] = []
    for rank, headers in enumerate(everyone):
        theirs = list(nested.leaves(headers[0], "output")) if headers else first
        if [(place, str(header)) for place, header in theirs] != [(place, str(header)) for place, header in first]:
            raise ValueError(f"the ranks' outputs differ: {first} on rank 0, {theirs} on rank {rank}; expected the same layout")
        columns.append([header.rows if headers else header.nothing(device) for _, header in theirs])
    parts = zip(*columns, strict=True)

    def join_ranks(leaf: Any, header: _Header, rows: tuple[Any, ...]) -> Any:
        if isinstance(leaf, torch.Tensor):
            sizes = [0 if isinstance(size, torch.Tensor) else size for size in rows]
            return leaf if header.dim is None else gather_rows(leaf, sizes, header.dim)
        return None if leaf is None else type(leaf)(entry for part in rows for entry in part)

    whole = mine[0] if mine else nested.map_leaves(lambda header: header.nothing(device), known[0])
    headers = iter(first)
    return nested.map_leaves(lambda leaf: join_ranks(leaf, next(headers)[1], next(parts)), whole)
