"""Sums of the replicas' gradients on one device, in the order of the replicas and with the strides that autograd would use."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime import multi_tensor
from ..runtime.tensors import get_gradient, set_gradient

__all__: list[str] = []

Gradients = list[Tensor | None]  # one replica's, in the order of a bucket's parameters


def accumulate(leaf: Tensor, gradient: Tensor) -> None:
    """Adds a gradient to ``grad`` as autograd does, in place if both are dense."""
    before = get_gradient(leaf)
    if before is not None and _is_dense(before) and _is_dense(gradient):
        before.add_(gradient)
    else:
        set_gradient(leaf, _with_strides_of(leaf, gradient) if before is None else before + gradient)


def _with_strides_of(leaf: Tensor, gradient: Tensor) -> Tensor:
    """Returns ``gradient`` with the strides of its leaf, as autograd does, or contiguous if the memory of the leaf has gaps."""
    if not _is_dense(gradient) or _have_same_strides(gradient, leaf):
        return gradient
    copy = torch.empty_like(leaf, dtype=gradient.dtype)
    return gradient if _have_same_strides(gradient, copy) else copy.copy_(gradient)


def _have_same_strides(one: Tensor, other: Tensor) -> bool:
    return one.stride() == other.stride() or all(
        size <= 1 or left == right for size, left, right in zip(one.shape, one.stride(), other.stride(), strict=True)
    )


def add_up(replicas: Sequence[Gradients], device: torch.device, *, own: bool = False) -> Gradients:
    """Returns the sums over the replicas, in their order, on ``device``; None if no replica has a gradient.

    Args:
        own: the results share no memory with the gradients. Autograd may have given the same tensor to two parameters, so the
            gradient of a single replica is cloned.
    """
    totals: list[Any] = [None] * len(replicas[0])
    new: set[int] = set()  # totals made here, which may be changed in place
    given: set[int] = set()  # totals that are the gradient of a replica
    for gradients in replicas:
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        moved = dict(zip(present, move_together([gradients[i] for i in present], device), strict=True))
        first, again = [i for i in present if totals[i] is None], [i for i in present if i in new]
        second = [i for i in present if totals[i] is not None and i not in new]
        for i, total in zip(second, add([totals[i] for i in second], [moved[i] for i in second]), strict=True):
            totals[i] = total
        if again and all(_is_dense(tensor) for i in again for tensor in (totals[i], moved[i])):
            multi_tensor.add_([totals[i] for i in again], [moved[i] for i in again])
        else:
            for i in again:
                totals[i] = totals[i] + moved[i]
        new.update(second)
        for i in first:
            totals[i] = moved[i]
            if own and moved[i] is gradients[i]:
                given.add(i)
    for i in given.difference(new):
        totals[i] = totals[i].clone()
    return totals


def add(left: list[Any], right: list[Any]) -> list[Tensor]:
    """Returns elementwise sums, in one call if all tensors are dense. No argument is changed."""
    if left and all(map(_is_dense, (*left, *right))):
        return multi_tensor.add(left, right)
    return [one + other for one, other in zip(left, right, strict=True)]


def _is_dense(tensor: Any) -> bool:
    return bool(tensor.layout == torch.strided)


def move_together(tensors: list[Any], device: torch.device) -> list[Tensor]:
    """Returns tensors of one dtype on one device, moved to ``device``. Dense tensors keep their strides and move in one copy."""
    if not tensors or tensors[0].device == device:
        return tensors
    if len(tensors) == 1 or any(tensor.layout != torch.strided for tensor in tensors):
        return [tensor.to(device, non_blocking=device.type != "cpu") for tensor in tensors]
    strides = [_packed_strides(tensor) for tensor in tensors]
    rows = [
        tensor.reshape(-1) if stride is None else tensor.as_strided((tensor.numel(),), (1,))
        for tensor, stride in zip(tensors, strides, strict=True)
    ]
    pieces = torch.cat(rows).to(device, non_blocking=device.type != "cpu").split([row.numel() for row in rows])
    return [
        piece.view(tensor.shape) if stride is None else piece.as_strided(tensor.shape, stride)
        for piece, tensor, stride in zip(pieces, tensors, strides, strict=True)
    ]


def _packed_strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Returns the strides of a tensor without gaps whose memory is not in row-major order, else None."""
    if tensor.is_contiguous():
        return None
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return None
            expected *= size
    return tensor.stride()
