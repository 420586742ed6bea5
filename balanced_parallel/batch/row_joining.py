"""Joins pieces of a batch again: arguments of several replicas, micro-batches and ranks, with the marks of their rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..runtime.collectives import gather_objects, rank, world_size
from ..runtime.devices import move
from . import nested
from .gathering import gather
from .per_replica import PerReplica
from .row_marks import Along, Rows, mark_leaves

__all__: list[str] = []


def join_rows(pieces: Sequence[Any], device: torch.device, dim: int = 0) -> Any:
    """Returns the pieces as one structure, with its tensors on ``device``. Values without rows are those of the first piece.

    Args:
        pieces: marked structures of the same form, in the order of their rows.
        device: of the result.
        dim: dimension of the rows in tensors that are not marked.
    """
    return nested.zip_leaves(lambda place, values: _join(place, values, device, dim), pieces, "the batch")


def _join(place: str, values: list[Any], device: torch.device, dim: int) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor) and first.dim():
        return Along(_concatenate(place, values, device, dim), dim)
    if isinstance(first, Along) and isinstance(first.leaf, torch.Tensor):
        return Along(_concatenate(place, [value.leaf for value in values], device, first.dim), first.dim)
    if isinstance(first, PerReplica):
        sizes = [size for value in values for size in value.sizes]
        outputs = PerReplica([entry for value in values for entry in value], sizes, first.dim)
        return mark_leaves(outputs.on(device), outputs.dim, place)
    if isinstance(first, Rows):
        return Rows([entry for value in values for entry in value.entries])
    if isinstance(first, Along):
        first, values = first.leaf, [value.leaf for value in values]
    if nested.is_row_list(first):
        kind: Any = type(first)
        return kind(entry for value in values for entry in value)
    return move(first, device) if isinstance(first, torch.Tensor) else first


def _concatenate(place: str, tensors: list[torch.Tensor], device: torch.device, dim: int) -> torch.Tensor:
    layouts = {(tensor.dim(), *tensor.shape[:dim], *tensor.shape[dim:][1:]) for tensor in tensors}
    if len(layouts) > 1:
        shapes = " and ".join(dict.fromkeys(str(tuple(tensor.shape)) for tensor in tensors))
        raise ValueError(f"{place} has shapes {shapes}, expected shapes that differ in dimension {dim} only")
    return torch.cat([move(tensor, device) for tensor in tensors], dim)


class RankRows(NamedTuple):
    """The rows of all ranks.

    Args:
        batch: all rows; None on a rank that has passed none.
        starts: the place of this rank's rows in each tensor with rows, in the order of the leaves.
        ranks: the ranks that have rows.
    """

    batch: Any
    starts: list[int]
    ranks: list[int]


def gather_ranks(batch: Any, device: torch.device, refusal: str | None = None) -> RankRows:
    """Gathers the result of :func:`join_rows` of every rank, in the order of the ranks. All ranks call this. Differentiable.

    Args:
        batch: of this rank; None without rows.
        device: of the result.
        refusal: error of this rank, which all ranks raise.
    """
    if refusal and world_size() == 1:
        raise ValueError(refusal)
    found = [] if batch is None else [leaf for _, leaf in nested.leaves(batch)]
    along = [leaf for leaf in found if isinstance(leaf, Along)]
    if world_size() == 1:
        return RankRows(batch, [0] * len(along), [0])
    lists = [leaf.entries if isinstance(leaf, Rows) else leaf for leaf in found if _is_list(leaf)]
    layout = None if batch is None else ([leaf.leaf.size(leaf.dim) for leaf in along], lists)
    layouts, refusals = zip(*gather_objects((layout, refusal)), strict=True)
    for message in filter(None, refusals):
        raise ValueError(message)
    known = {number: layout for number, layout in enumerate(layouts) if layout is not None}
    tensors: Any = ()
    if any(sizes for sizes, _ in known.values()):
        dims = tuple(leaf.dim for leaf in along)
        tensors = gather([] if batch is None else PerReplica([tuple(leaf.leaf for leaf in along)], [None], dims), device)
    ranks = [number for number, (sizes, _) in known.items() if any(sizes)] or [*known]
    if batch is None:
        return RankRows(None, [], ranks)
    before = [sizes for number, (sizes, _) in known.items() if number < rank()]
    starts = [sum(sizes[place] for sizes in before) for place in range(len(along))]
    joined = iter(tensors)
    entries = iter([[entry for _, parts in known.values() for entry in parts[place]] for place in range(len(lists))])

    def replace(leaf: Any) -> Any:
        if isinstance(leaf, Along):
            return Along(next(joined), leaf.dim)
        if _is_list(leaf):
            return Rows(next(entries)) if isinstance(leaf, Rows) else type(leaf)(next(entries))
        return leaf

    return RankRows(nested.map_leaves(replace, batch), starts, ranks)


def _is_list(leaf: Any) -> bool:
    return isinstance(leaf, Rows) or nested.is_row_list(leaf)
