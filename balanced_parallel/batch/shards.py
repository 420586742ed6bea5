"""``RowShards``: rows that are cut already. Each replica takes its shard as it is, with a length of its own."""

from collections.abc import Sequence
from typing import Any

import torch

from . import nested
from .per_replica import PerReplica
from .row_marks import Along, Arguments, Rows

__all__: list[str] = []


class RowShards(PerReplica):
    """One argument, or one part of it, in one shard per replica."""


def as_shards(parts: Sequence[Any], sizes: Sequence[int], order: Sequence[int] | None = None) -> Any:
    """Merges the arguments of the replicas into one structure. Each leaf becomes :class:`RowShards`, unless there is one replica.

    Args:
        parts: arguments of each replica, of the same structure.
        sizes: number of rows of each.
        order: position of each row in the batch, for the outputs.
    """
    if len(parts) == 1:
        return parts[0]
    return nested.zip_leaves(lambda place, leaves: RowShards(leaves, sizes).in_order(order), parts)


def find_shards(arguments: Arguments) -> RowShards | None:
    """Returns an argument that is cut already, or None. If one is, all are."""
    for value in (*arguments.inputs, *arguments.kwargs.values()):
        if type(value) is torch.Tensor:  # shortcut for the most frequent argument
            return None
        for _, leaf in nested.leaves(value):
            if isinstance(leaf, RowShards):
                return leaf
            if isinstance(leaf, torch.Tensor):
                return None
    return None


def take_rows(node: Any, rows: Sequence[int], dim: int = 0) -> Any:
    """Returns copies of some rows of ``node``, in the order of ``rows``. Values without rows stay.

    Args:
        node: arguments with marks, as :func:`cut` takes them.
        rows: indices.
        dim: dimension of the rows in tensors that are not marked.

    Raises:
        TypeError: for outputs of replicas, whose rows are on several devices.
    """
    index: dict[torch.device, torch.Tensor] = {}

    def take(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _select(leaf, dim) if leaf.dim() else leaf
        if type(leaf) is Along:
            return Along(take_rows(leaf.leaf, rows, leaf.dim), leaf.dim)
        if nested.is_row_list(leaf):
            return _entries(leaf, type(leaf))
        if isinstance(leaf, Rows):
            return Rows(_entries(leaf.entries, list))
        if isinstance(leaf, PerReplica) and not isinstance(leaf, RowShards):
            raise TypeError("rows were given as outputs of replicas, expected tensors on the host: call gather(device='cpu')")
        return leaf

    def _entries(entries: Sequence[Any], kind: Any) -> Any:
        return kind(entries[row] for row in rows)

    def _select(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        if tensor.device not in index:
            index[tensor.device] = torch.tensor(rows, dtype=torch.long, device=tensor.device)
        return tensor.index_select(dim, index[tensor.device])

    return nested.map_leaves(take, node)


def pinned(node: Any) -> Any:
    """Returns ``node`` with tensors of the host in page-locked memory, so that copies to a device do not wait."""

    def pin(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.pin_memory() if leaf.is_cpu and leaf.layout == torch.strided else leaf
        if type(leaf) is Along:
            return Along(pinned(leaf.leaf), leaf.dim)
        return Rows([pinned(entry) for entry in leaf.entries]) if isinstance(leaf, Rows) else leaf

    return nested.map_leaves(pin, node)
