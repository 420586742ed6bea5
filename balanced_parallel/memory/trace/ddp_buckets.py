"""The gradient buckets of ``DistributedDataParallel``, whose reducer is written in C++ and does not run on fake tensors."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

__all__: list[str] = []


class DDPBuckets:
    """One flat tensor per dtype, as with ``gradient_as_bucket_view=True``.

    Without accumulation, autograd makes a gradient, and the hook of the reducer copies it into the bucket. With accumulation,
    micro-batches add to the bucket itself, so gradients exist once (``DDPSync``).

    Args:
        parameters: parameters that require a gradient.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.tensors: list[Tensor] = []
        self._views: dict[Tensor, Tensor] = {}
        self._is_reducing = True
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            group = [parameter for parameter in parameters if parameter.dtype == dtype]
            flat = torch.zeros(sum(parameter.numel() for parameter in group), dtype=dtype, device=group[0].device)
            self.tensors.append(flat)
            start = 0
            for parameter in group:
                view = flat[start : start + parameter.numel()].view(parameter.shape)
                parameter.register_post_accumulate_grad_hook(self._copy_into(view))
                self._views[parameter] = view
                start += parameter.numel()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Makes gradients in this block accumulate in the buckets. Nothing is reduced."""
        for parameter, view in self._views.items():
            if parameter.grad is None:
                parameter.grad = view.zero_()
        self._is_reducing = False
        try:
            yield
        finally:
            self._is_reducing = True

    def _copy_into(self, view: Tensor) -> Callable[[Tensor], None]:
        def copy(parameter: Tensor) -> None:
            if self._is_reducing and parameter.grad is not None and parameter.grad is not view:
                view.copy_(parameter.grad)
                parameter.grad = view

        return copy


def largest_partition(parameters: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """Returns the parameters of the rank with the most state under ``ZeroRedundancyOptimizer``.

    It assigns parameters by size, the largest first, each to the rank with the fewest elements so far.
    """
    partitions: list[list[Tensor]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for parameter in sorted(parameters, key=lambda parameter: parameter.numel(), reverse=True):
        rank = sizes.index(min(sizes))
        partitions[rank].append(parameter)
        sizes[rank] += parameter.numel()
    return partitions[sizes.index(max(sizes))]
