"""Puts the replicas' pieces back together: the inverse of scatter, over devices and, under torchrun, over ranks.

torch's ``gather`` cannot put dataclasses, numbers or strings together; ``all_gather`` wants equal sizes. Here every rank
first tells the others what it has, so that sizes may differ and a mismatch is the same error on every rank, not a hang.
"""

from collections.abc import Sequence
from typing import Any

import torch

from . import nesting, provenance
from .devices import DeviceLike, move, resolve_device
from .dims import Dims, leaf_dims
from .ranks import gather_objects, gather_rows, world_size

__all__: list[str] = []


def gather(outputs: Sequence[Any], device: DeviceLike | None = None, dim: int | None = None) -> Any:
    """Concatenates the outputs of the replicas, in the order of the rows.

    Tensors are concatenated along ``dim``, 0-dim tensors stacked; lists of plain values are concatenated, a plain value per
    replica becomes a list of them, ``None`` stays ``None``. Tuples, named tuples, lists, mappings and dataclasses keep their
    type. Gradients flow back to every piece. Where a process group with several ranks is running, the pieces of all ranks
    are gathered, in the order of the ranks, on every rank: each rank must call it. Sizes may differ, nothing is padded.

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
    if not isinstance(outputs, (list, tuple)) or nesting.is_named_tuple(outputs):
        raise TypeError(
            f"gather was given {nesting.describe(outputs)}, expected a list with one output per replica; "
            "for the output of a single one write gather([output])"
        )
    if not outputs:
        raise ValueError("gather was given no outputs, expected at least one")
    dims = provenance.dims_of(outputs) if dim is None else dim
    whole = join(outputs, device, dims)
    return _gather_ranks(whole, list(leaf_dims(whole, dims, 0))) if world_size() > 1 else whole


def join(outputs: Sequence[Any], device: DeviceLike | None, dims: Dims) -> Any:
    """:func:`gather` within this process.

    Args:
        outputs: at least one.
        device: ``None`` is the device of the first output.
        dims: of the rows of each leaf; ``None`` for one that all replicas have alike, of which the first is taken.
    """
    first = nesting.first_tensor(list(outputs))
    target = resolve_device(device) if device is not None else first.device if first is not None else torch.device("cpu")
    of_leaf = leaf_dims(outputs[0], dims, 0, "output")
    return nesting.zip_leaves(lambda place, values: _join(place, values, target, next(of_leaf)), list(outputs), "output")


def _join(place: str, values: list[Any], device: torch.device, dim: int | None) -> Any:
    if all(isinstance(value, torch.Tensor) for value in values):
        return move(values[0], device) if dim is None else _join_tensors(place, values, device, dim)
    if all(value is None for value in values):
        return None
    if all(nesting.is_row_list(value) for value in values):
        return type(values[0])(entry for value in values for entry in value)
    if all(nesting.is_plain(value) for value in values):
        return values
    raise TypeError(
        f"{place} is {', '.join(dict.fromkeys(map(nesting.describe, values)))}: expected tensors, plain values, lists of plain "
        "values, or containers of them, alike in every replica; pick those before gathering, as in "
        "gather([output.logits for output in outputs])"
    )


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


def _gather_ranks(whole: Any, dims: list[int | None]) -> Any:
    """``whole`` with its rows of every rank. One exchange of layouts (and of plain values) first, then a tensor at a time."""
    mine = [(place, _header(leaf, dim)) for (place, leaf), dim in zip(nesting.leaves(whole, "output"), dims, strict=True)]
    everyone = gather_objects(mine)
    for rank, other in enumerate(everyone):
        if [(place, header[:2]) for place, header in other] != [(place, header[:2]) for place, header in everyone[0]]:
            raise ValueError(
                f"the ranks' outputs differ: {everyone[0]} on rank 0, {other} on rank {rank}; expected the same layout"
            )
    columns = iter([[other[index][1][2] for other in everyone] for index in range(len(mine))])
    of_leaf = iter(dims)

    def join_ranks(leaf: Any) -> Any:
        parts, dim = next(columns), next(of_leaf)
        if isinstance(leaf, torch.Tensor):
            return leaf if dim is None else gather_rows(leaf, parts, dim if leaf.dim() > 1 else 0)
        return None if leaf is None else type(leaf)(entry for part in parts for entry in part)

    return nesting.map_leaves(join_ranks, whole)


def _header(leaf: Any, dim: int | None) -> tuple[Any, ...]:
    """What must be alike on every rank, and what may differ: the rows of a tensor, the values of a list."""
    if isinstance(leaf, torch.Tensor):
        if dim is None:
            return tuple(leaf.shape), str(leaf.dtype), None
        dim = dim if leaf.dim() > 1 else 0
        return _layout(leaf, dim), str(leaf.dtype), leaf.size(dim)
    return type(leaf).__name__, "", leaf
