"""Puts the replicas' pieces back together: the inverse of scatter, over devices and, under torchrun, over ranks.

torch's ``gather`` cannot put dataclasses, numbers or strings together; ``all_gather`` wants equal sizes. Here every rank
first tells the others what it has, so that sizes may differ and a mismatch is the same error on every rank, not a hang.
"""

from collections.abc import Sequence
from typing import Any

import torch

from . import nesting
from .devices import DeviceLike, move, resolve_device
from .ranks import gather_objects, gather_rows, world_size

__all__: list[str] = []


def gather(outputs: Sequence[Any], device: DeviceLike | None = None, dim: int = 0) -> Any:
    """Concatenates the outputs of the replicas, in the order of the rows.

    Tensors are concatenated along ``dim``, 0-dim tensors stacked; lists of plain values are concatenated, a plain value per
    replica becomes a list of them, ``None`` stays ``None``. Tuples, named tuples, lists, mappings and dataclasses keep their
    type. Gradients flow back to every piece. Where a process group with several ranks is running, the pieces of all ranks
    are gathered, in the order of the ranks, on every rank: each rank must call it. Sizes may differ, nothing is padded.

    Args:
        outputs: one entry per replica, as :class:`DataParallelModel` returns.
        device: where the result goes; ``None`` is the device of the first output. ``"cpu"`` moves piece by piece, so that
            no accelerator ever holds the whole.
        dim: the dimension of the rows.

    Raises:
        TypeError: ``outputs`` is no list or tuple, or holds an object that cannot be put together.
        ValueError: there are no outputs, or their structures or shapes disagree; names the place and both.
    """
    if not isinstance(outputs, (list, tuple)) or nesting.is_named_tuple(outputs):
        raise TypeError(
            f"gather was given {nesting.describe(outputs)}, expected a list with one output per replica; "
            "for the output of a single one write gather([output])"
        )
    if not outputs:
        raise ValueError("gather was given no outputs, expected at least one")
    first = nesting.first_tensor(outputs)
    target = resolve_device(device) if device is not None else first.device if first is not None else torch.device("cpu")
    whole = nesting.zip_leaves(lambda place, values: _join(place, values, target, dim), outputs, "output")
    return _gather_ranks(whole, dim) if world_size() > 1 else whole


def _join(place: str, values: list[Any], device: torch.device, dim: int) -> Any:
    if all(isinstance(value, torch.Tensor) for value in values):
        return _join_tensors(place, values, device, dim)
    if all(value is None for value in values):
        return None
    if all(isinstance(value, list) for value in values):
        return [entry for value in values for entry in value]
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
    return torch.cat([move(tensor, device) for tensor in tensors], dim)


def _layout(tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
    """The shape with the dimension of the rows blanked."""
    shape = list(tensor.shape)
    if -len(shape) <= dim < len(shape):
        shape[dim] = -1
    return tuple(shape)


def _gather_ranks(whole: Any, dim: int) -> Any:
    """``whole`` with its rows of every rank. One exchange of layouts (and of plain values) first, then a tensor at a time."""
    mine = [(place, _header(leaf, dim)) for place, leaf in nesting.leaves(whole, "output")]
    everyone = gather_objects(mine)
    for rank, other in enumerate(everyone):
        if [(place, header[:2]) for place, header in other] != [(place, header[:2]) for place, header in everyone[0]]:
            raise ValueError(
                f"the ranks' outputs differ: {everyone[0]} on rank 0, {other} on rank {rank}; expected the same layout"
            )
    columns = iter([[other[index][1][2] for other in everyone] for index in range(len(mine))])

    def join(leaf: Any) -> Any:
        parts = next(columns)
        if isinstance(leaf, torch.Tensor):
            return gather_rows(leaf, parts, dim if leaf.dim() > 1 else 0)
        return None if leaf is None else [entry for part in parts for entry in part]

    return nesting.map_leaves(join, whole)


def _header(leaf: Any, dim: int) -> tuple[Any, ...]:
    """What must be alike on every rank, and what may differ: the rows of a tensor, the values of a list."""
    if isinstance(leaf, torch.Tensor):
        dim = dim if leaf.dim() > 1 else 0
        return _layout(leaf, dim), str(leaf.dtype), leaf.size(dim)
    return type(leaf).__name__, "", leaf
