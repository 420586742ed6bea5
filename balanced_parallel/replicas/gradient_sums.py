"""Sums of the replicas' gradients, always in the same order, on one device and with the strides that autograd would give them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []

own_gradient: Any = torch.Tensor.grad  # the slot that autograd fills, whatever a class makes of the attribute

Gradients = list[Tensor | None]  # one replica's, in the order of a bucket's parameters


def accumulate(leaf: Tensor, gradient: Tensor) -> None:
    """Adds to ``grad`` as autograd does: in place where that can be."""
    before = own_gradient.__get__(leaf)
    if before is not None and _is_dense(before) and _is_dense(gradient):
        before.add_(gradient)
    else:
        own_gradient.__set__(leaf, _laid_out_for(leaf, gradient) if before is None else before + gradient)


def _laid_out_for(leaf: Tensor, gradient: Tensor) -> Tensor:
    """Returns ``gradient`` with the strides of its leaf, as autograd does, or row by row where the leaf has gaps."""
    if not _is_dense(gradient) or _have_same_strides(gradient, leaf):
        return gradient
    laid_out = torch.empty_like(leaf, dtype=gradient.dtype)
    return gradient if _have_same_strides(gradient, laid_out) else laid_out.copy_(gradient)


def _have_same_strides(one: Tensor, other: Tensor) -> bool:
    return one.stride() == other.stride() or all(
        size <= 1 or mine == theirs for size, mine, theirs in zip(one.shape, one.stride(), other.stride(), strict=True)
    )


def add_up(replicas: Sequence[Gradients], device: torch.device, *, own: bool = False) -> Gradients:
    """The sum over the replicas, in their order, on ``device``; None where no replica has a gradient.

    Args:
        own: whether nobody else may have what is returned: where only one replica has a gradient, a copy of it. Autograd may
            have given the same tensor to two parameters.
    """
    totals: list[Any] = [None] * len(replicas[0])
    ours: set[int] = set()  # made here, so that nobody else sees them change
    theirs: set[int] = set()
    for gradients in replicas:
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        moved = dict(zip(present, move_together([gradients[i] for i in present], device), strict=True))
        first, again = [i for i in present if totals[i] is None], [i for i in present if i in ours]
        second = [i for i in present if totals[i] is not None and i not in ours]
        for i, total in zip(second, add([totals[i] for i in second], [moved[i] for i in second]), strict=True):
            totals[i] = total
        if again and all(_is_dense(tensor) for i in again for tensor in (totals[i], moved[i])):
            torch._foreach_add_([totals[i] for i in again], [moved[i] for i in again])
        else:
            for i in again:
                totals[i] = totals[i] + moved[i]
        ours.update(second)
        for i in first:
            totals[i] = moved[i]
            if own and moved[i] is gradients[i]:
                theirs.add(i)
    for i in theirs.difference(ours):
        totals[i] = totals[i].clone()
    return totals


def add(left: list[Any], right: list[Any]) -> list[Tensor]:
    """Elementwise sums, in one call for all that are dense. Nothing is overwritten."""
    if left and all(map(_is_dense, (*left, *right))):
        return list(torch._foreach_add(left, right))
    return [one + other for one, other in zip(left, right, strict=True)]


def _is_dense(tensor: Any) -> bool:
    return bool(tensor.layout == torch.strided)


def move_together(tensors: list[Any], device: torch.device) -> list[Tensor]:
    """Returns ``tensors``, all on one device and of one dtype, on ``device``: dense ones in a single copy, with their strides."""
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
    """Returns the strides of a tensor that fills its memory in another order than row by row, else None."""
    if tensor.is_contiguous():
        return None
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return None
            expected *= size
    return tensor.stride()
