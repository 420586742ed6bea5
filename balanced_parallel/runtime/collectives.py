"""Collectives of all ranks: sums over ranks, rows of all ranks.

Without a process group there is one rank, and no function communicates.
"""

import datetime
import weakref
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

__all__: list[str] = []

Number = TypeVar("Number", int, float)
Group: TypeAlias = "dist.ProcessGroup | None"  # None is the default group

_more_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]]" = weakref.WeakKeyDictionary()


def world_size() -> int:
    """Returns the number of ranks, which is 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Returns the number of this rank, which is 0 without a process group."""
    return dist.get_rank() if world_size() > 1 else 0


def statistics_group() -> Group:
    """Returns a second process group of all ranks, for the statistics of layers. All ranks make it together in the first call.

    Ranks must call the collectives of one group in the same order. In a group of their own, the statistics may come before or
    after the gradients.
    """
    return _group_for("statistics", None)


def checkpoint_group() -> Group:
    """Returns a process group of all ranks for the thread that writes checkpoints, with the CPU's backend: it moves objects."""
    return _group_for("checkpoints", "gloo")


def _group_for(purpose: str, backend: str | None) -> Group:
    world = dist.group.WORLD if world_size() > 1 else None
    if world is None:
        return None
    groups = _more_groups.setdefault(world, {})
    if purpose not in groups:
        groups[purpose] = dist.new_group(backend=backend, timeout=_timeout(world))
    return groups[purpose]


def _timeout(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """Returns the timeout that a group was made with. There is no public name, and ``new_group`` takes torch's default."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout: datetime.timedelta | None = getattr(options, "_timeout", None)
    return timeout


def sum_over_ranks(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Returns the sum of ``tensor`` over all ranks, on the device of ``tensor``. The sum has no gradient."""
    if world_size() == 1:
        return tensor.detach().clone()
    total = _to_backend_device(tensor.detach()).clone()
    dist.all_reduce(total, group=group)
    return total.to(tensor.device)


def max_over_ranks(number: Number) -> Number:
    """Returns the largest ``number`` of all ranks."""
    numbers: list[Number] = gather_objects(number)
    return max(numbers)


def gather_objects(value: Any, group: Group = None) -> list[Any]:
    """Returns the ``value`` of each rank, in the order of the ranks. Values must be picklable."""
    values: list[Any] = [value] * world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def gather_rows(tensor: torch.Tensor, sizes: list[int], dim: int, group: Group = None) -> torch.Tensor:
    """Concatenates the rows of all ranks on the device of ``tensor``. The result is differentiable.

    Args:
        tensor: the rows of this rank.
        sizes: number of rows of each rank along ``dim``.
        dim: dimension of the rows.
        group: runs the collectives of forward and backward.
    """
    gathered: torch.Tensor = _GatherRows.apply(tensor, sizes, dim, group)
    return gathered


def _to_backend_device(tensor: torch.Tensor) -> torch.Tensor:
    """Moves a CPU tensor to the accelerator if the process group has no backend for the CPU."""
    if tensor.device.type != "cpu" or any(name in dist.get_backend_config() for name in ("gloo", "mpi", "ucc", "fake")):
        return tensor
    return tensor.to(torch.accelerator.current_accelerator())


class _GatherRows(torch.autograd.Function):
    """All-gather of rows. Backward sums the gradients over the ranks and keeps the rows of this rank.

    DistributedDataParallel averages gradients over ranks afterwards. So a loss that each rank computes from all rows has the
    exact gradient.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, sizes: list[int], dim: int, group: Group) -> torch.Tensor:
        ctx.sizes, ctx.dim, ctx.group = sizes, dim, group
        shape = list(tensor.shape)
        shape[dim] = max(sizes)  # all_gather needs equal sizes: pad, then drop the padding
        padded = tensor.new_zeros(shape)
        padded.narrow(dim, 0, tensor.size(dim)).copy_(tensor)
        padded = _to_backend_device(padded)
        received = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(received, padded, group=group)
        rows = [part.narrow(dim, 0, size) for part, size in zip(received, sizes, strict=True)]
        return torch.cat(rows, dim).to(tensor.device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        total = sum_over_ranks(gradients[0].contiguous(), ctx.group)
        rank = dist.get_rank()
        return total.narrow(ctx.dim, sum(ctx.sizes[:rank]), ctx.sizes[rank]), None, None, None
