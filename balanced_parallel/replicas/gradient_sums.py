"""Sums of the replicas' gradients on one device, with the strides that autograd would use.

They are taken in the order of the replicas, except by NCCL.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime import coalesced, multi_tensor, transport
from ..runtime.devices import move
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


class GradientSum:
    """The sum of a bucket's gradients over the replicas.

    Memory is allocated here, on the current streams. :meth:`compute` may run on side streams, and allocates nothing that stays.
    Gradients that some replicas do not have, sparse ones, and those with a graph are added at once.

    Args:
        leaves: parameters of the bucket, whose strides the results get.
        replicas: gradients of each replica.
        device: where the sum is needed.
        own: the results share no memory with the gradients. Autograd may have given the same tensor to two parameters.
    """

    def __init__(
        self, leaves: Sequence[Tensor], replicas: Sequence[Gradients], device: torch.device, *, own: bool = False
    ) -> None:
        together = len(replicas) > 1 and not torch.is_grad_enabled()
        self._places = [i for i in range(len(leaves)) if together and all(_is_dense(gradients[i]) for gradients in replicas)]
        self._layouts = [coalesced.layout_of(leaves[i]) for i in self._places]
        others = set(range(len(leaves))).difference(self._places)
        self._sums = [
            _add_in_turn([one[i] for one in replicas], device, own) if i in others else None for i in range(len(leaves))
        ]
        if self._places:
            self._flat = [coalesced.pack(self._layouts, [one[i] for i in self._places]) for one in replicas]  # type: ignore[misc]
            self._total = torch.empty_like(self._flat[0], device=device)

    def compute(self) -> Gradients:
        """Returns the sums; None if no replica has a gradient."""
        if self._places:
            transport.reduce(self._flat, self._total)
            for i, total in zip(self._places, coalesced.unpack(self._layouts, self._total), strict=True):
                self._sums[i] = total
        return self._sums


def add_up(leaves: Sequence[Tensor], replicas: Sequence[Gradients], device: torch.device) -> Gradients:
    """Returns the sums over the replicas, in their order, on ``device``; None if no replica has a gradient."""
    return GradientSum(leaves, replicas, device).compute()


def _add_in_turn(gradients: Gradients, device: torch.device, own: bool) -> Tensor | None:
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return None
    total = move(present[0], device)
    for gradient in present[1:]:
        total = total + move(gradient, device)
    return total.clone() if own and total is present[0] else total


def add(left: list[Any], right: list[Any]) -> list[Tensor]:
    """Returns elementwise sums, in one call if all tensors are dense. No argument is changed."""
    if left and all(map(_is_dense, (*left, *right))):
        return multi_tensor.add(left, right)
    return [one + other for one, other in zip(left, right, strict=True)]


def _is_dense(tensor: Any) -> bool:
    return tensor is not None and bool(tensor.layout == torch.strided)
