"""Elementwise operations on lists of tensors, in one kernel for a whole list.

A loop over tensors launches one kernel for each of them. torch's optimizers avoid this with ``torch._foreach_*``, which torch
2.11 to 2.13 keep private. pytorch#193607 adds the same operations as ``torch.foreach``. Unlike ``torch._foreach_*``
(pytorch#162911), these functions accept empty lists.
"""

import torch
from torch import Tensor

from .devices import move

__all__: list[str] = []

# The stubs of torch ask for tuples or lists; the operations take both.
Tensors = list[Tensor] | tuple[Tensor, ...]


def add(tensors: Tensors, others: Tensors) -> list[Tensor]:
    """Returns the sums of ``tensors[i]`` and ``others[i]``. No argument is changed."""
    return list(torch._foreach_add(tensors, others)) if tensors else []


def add_(tensors: Tensors, others: Tensors) -> None:
    """Adds ``others[i]`` to ``tensors[i]`` in place."""
    if tensors:
        torch._foreach_add_(tensors, others)


def multiply_(tensors: Tensors, factor: float | Tensor) -> None:
    """Multiplies all tensors by one factor in place. A factor with one element moves to each of their devices."""
    if not isinstance(factor, Tensor):
        if tensors:
            torch._foreach_mul_(tensors, factor)
        return
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        torch._foreach_mul_([tensor for tensor in tensors if tensor.device == device], move(factor, device))


def copy_(targets: Tensors, sources: Tensors, *, non_blocking: bool = False) -> None:
    """Copies ``sources[i]`` into ``targets[i]``, which may be on another device."""
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def zero_(tensors: Tensors) -> None:
    """Fills all tensors with zeros in place."""
    if tensors:
        torch._foreach_zero_(tensors)
