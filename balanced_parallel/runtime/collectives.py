"""Collectives of the running process group: sums over ranks, rows of all ranks. Without a group there is one rank, and nothing
communicates."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__: list[str] = []


def world_size() -> int:
    """The number of ranks; 1 where no process group is running."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of ``tensor`` over all ranks, on its own device, without a gradient."""
    if world_size() == 1:
        return tensor.detach().clone()
    total = _carried(tensor.detach()).clone()
    dist.all_reduce(total)
    return total.to(tensor.device)


def start_sum_over_ranks(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Starts to sum ``tensor`` over all ranks. Returns a function that waits for the sum and returns it."""
    total = _carried(tensor.detach()).clone()
    work = dist.all_reduce(total, async_op=True)

    def wait() -> torch.Tensor:
        work.wait()
        return total.to(tensor.device)

    return wait


def max_over_ranks(number: int) -> int:
    """The largest ``number`` of any rank."""
    numbers: list[int] = gather_objects(number)
    return max(numbers)


def gather_objects(value: Any) -> list[Any]:
    """What each rank passed, in the order of the ranks; anything that can be pickled."""
    everyone: list[Any] = [None] * world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def gather_rows(tensor: torch.Tensor, sizes: list[int], dim: int) -> torch.Tensor:
    """The rows of all ranks, ``sizes[rank]`` along ``dim`` from each, on this tensor's device. Differentiable."""
    gathered: torch.Tensor = _GatherRows.apply(tensor, sizes, dim)
    return gathered


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` where the group can carry it: a group that has no backend for the CPU takes only the accelerator's."""
    if tensor.device.type != "cpu" or any(name in dist.get_backend_config() for name in ("gloo", "mpi", "ucc", "fake")):
        return tensor
    return tensor.to(torch.accelerator.current_accelerator())


class _GatherRows(torch.autograd.Function):
    """Backward sums the ranks' gradients and keeps this rank's rows. As gradients are averaged over ranks afterwards
    (DistributedDataParallel), a loss that every rank computes from the gathered whole comes out exact."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, sizes: list[int], dim: int) -> torch.Tensor:
        ctx.sizes, ctx.dim = sizes, dim
        shape = list(tensor.shape)
        shape[dim] = max(sizes)  # collectives want equal sizes: pad, then drop the padding
        padded = tensor.new_zeros(shape)
        padded.narrow(dim, 0, tensor.size(dim)).copy_(tensor)
        padded = _carried(padded)
        received = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(received, padded)
        rows = [part.narrow(dim, 0, size) for part, size in zip(received, sizes, strict=True)]
        return torch.cat(rows, dim).to(tensor.device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = sum_over_ranks(gradients[0].contiguous())
        rank = dist.get_rank()
        return total.narrow(ctx.dim, sum(ctx.sizes[:rank]), ctx.sizes[rank]), None, None
