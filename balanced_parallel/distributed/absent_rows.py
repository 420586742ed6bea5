"""The forward of a rank without rows: one row runs in their place, and nothing of it is left but the structure of the output.

Many modules refuse inputs without rows, such as ``nn.InstanceNorm2d`` and attention with a mask.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..batch.nested import leaves, map_leaves
from ..batch.row_marks import Along, Arguments, Rows
from ..batch.rows import cut
from ..runtime.random_numbers import RandomState

__all__: list[str] = []


def first_row(arguments: Arguments, rows: int, dim: int) -> Arguments:
    """Returns a copy of the first row."""
    row: Arguments = map_leaves(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, cut(arguments, [1, rows - 1], dim)[0]
    )
    return row


def row_of_ones(arguments: Arguments, dim: int) -> Arguments | None:
    """Returns a row of ones for arguments without rows, or None if they have more than tensors."""
    if any(isinstance(leaf, (Rows, list)) for _, leaf in leaves(arguments)):
        return None

    def ones(leaf: Any, along: int = dim) -> Any:
        if isinstance(leaf, Along):
            return Along(ones(leaf.leaf, leaf.dim), leaf.dim)
        is_tensor = isinstance(leaf, Tensor) and leaf.dim() > 0
        return (
            leaf.new_ones([1 if at == along % leaf.dim() else size for at, size in enumerate(leaf.shape)]) if is_tensor else leaf
        )

    row: Arguments = map_leaves(ones, arguments)
    return row


@contextlib.contextmanager
def undone(module: nn.Module, devices: Sequence[torch.device]) -> Iterator[None]:
    """Undoes what a forward changes: random numbers, and buffers, which are replaced by copies in the block."""
    random_numbers = RandomState(devices)
    buffers = [(part, name, buffer) for part in module.modules() for name, buffer in part.named_buffers(recurse=False)]
    for part, name, buffer in buffers:
        setattr(part, name, buffer.clone())
    try:
        yield
    finally:
        random_numbers.restore()
        for part, name, buffer in buffers:
            setattr(part, name, buffer)
