"""Outputs of rows that were cut by cost: shards have lengths of their own, and rows another order than the batch."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..runtime.devices import move
from . import nested
from .dims import Dims, leaf_dims

__all__: list[str] = []


def pad_alike(outputs: Sequence[Any], dims: Dims) -> list[Any]:
    """Returns the outputs with zeros at the end of the tensors that are shorter than those of other replicas."""
    dims_of_leaves = leaf_dims(outputs[0], dims, 0, "output")

    def pad(leaves: list[Any]) -> list[Any]:
        dim = next(dims_of_leaves)
        if dim is None or not all(isinstance(leaf, torch.Tensor) for leaf in leaves) or len({leaf.dim() for leaf in leaves}) > 1:
            return leaves
        sizes = [max(each) for each in zip(*(leaf.shape for leaf in leaves), strict=True)]
        return [pad_to(leaf, sizes, dim) for leaf in leaves]

    # a Leaf of lists: each leaf of the result is the list of that leaf of all replicas
    columns = nested.zip_leaves(lambda place, leaves: _Column(pad(leaves)), list(outputs), "output")
    return nested.unzip_leaves(lambda column: column.leaves, columns, len(outputs))


class _Column(nested.Leaf):
    def __init__(self, leaves: list[Any]) -> None:
        self.leaves = leaves


def pad_to(tensor: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
    """Returns a tensor padded with zeros to ``sizes``, in all dimensions but that of the rows."""
    rows = dim % max(tensor.dim(), 1)
    missing = [0 if at == rows else size - own for at, (size, own) in enumerate(zip(sizes, tensor.shape, strict=True))]
    return F.pad(tensor, [each for size in reversed(missing) for each in (0, size)]) if any(missing) else tensor


def reorder(gathered: Any, order: Sequence[int], dims: Dims, replicas: int) -> Any:
    """Returns gathered outputs in the order of the batch.

    Args:
        gathered: outputs of all replicas.
        order: position in the batch of each row of the outputs.
        dims: dimension of the rows.
        replicas: number of outputs that were gathered. Values with one entry for each stay.

    Raises:
        ValueError: a tensor does not have one row for each row of the batch.
        TypeError: an object whose rows are not known.
    """
    positions = sorted(range(len(order)), key=order.__getitem__)
    dims_of_leaves = leaf_dims(gathered, dims, 0, "output")

    def put(leaf: Any) -> Any:
        dim = next(dims_of_leaves)
        if leaf is None or dim is None:
            return leaf
        if nested.is_row_list(leaf):
            kind: Any = type(leaf)
            return kind(leaf[position] for position in positions) if len(leaf) == len(order) else leaf
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"{nested.describe(leaf)} cannot be put in order: select tensors first, as in outputs.logits.gather()"
            )
        if leaf.dim() == 1 and len(leaf) == replicas != len(order):
            return leaf
        if leaf.size(dim) != len(order):
            raise ValueError(
                f"an output has {leaf.size(dim)} rows for {len(order)} rows of the batch, expected as many: they are not in the "
                "order of the batch, since rows were cut by cost"
            )
        index = torch.tensor(positions, dtype=torch.long)
        return leaf.index_select(dim, move(index if leaf.is_cpu else index.pin_memory(), leaf.device))

    return nested.map_leaves(put, gathered)
