"""Two functions of ``torch.nn.parallel.comm``, which has them in C++ and for CUDA alone, with buffers of the same sizes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# no public API: comm.py and DistributedDataParallel import them from here too
from torch._utils import _flatten_dense_tensors, _reorder_tensors_as, _take_tensors, _unflatten_dense_tensors

__all__: list[str] = []

_split_by_size: Any = _take_tensors
_reorder: Any = _reorder_tensors_as


def broadcast_coalesced(
    tensors: Sequence[Tensor],
    devices: Sequence[torch.device],
    buffer_size: int,
    transfer: Callable[[Tensor, torch.device], Tensor] = Tensor.to,
) -> list[list[Tensor]]:
    """Returns copies of the tensors on each of ``devices``. Copies that came in one buffer share its memory.

    Args:
        buffer_size: bytes.
        transfer: copies a flat buffer to a device.
    """
    copies: list[dict[int, Tensor]] = [{} for _ in devices]
    for chunk in _split_by_size(tensors, buffer_size):
        flat = _flatten_dense_tensors(chunk)
        for by_tensor, device in zip(copies, devices, strict=True):
            pieces = _unflatten_dense_tensors(transfer(flat, device), chunk)
            # .data: a write to one copy does not move the version counter of the others
            by_tensor.update((id(tensor), piece.data) for tensor, piece in zip(chunk, pieces, strict=True))
    return [[by_tensor[id(tensor)] for tensor in tensors] for by_tensor in copies]


def reduce_add_coalesced(replicas: Sequence[Sequence[Tensor]], device: torch.device, buffer_size: int) -> list[Tensor]:
    """Returns the sums of ``replicas[r][i]`` over the replicas, on ``device``, where the first replica is."""
    sums: list[Tensor] = []
    for chunks in zip(*(_split_by_size(tensors, buffer_size) for tensors in replicas), strict=True):
        flat, *others = [_flatten_dense_tensors(chunk) for chunk in chunks]
        total = flat + others[0].to(device)
        for other in others[1:]:
            total.add_(other.to(device))
        sums += _unflatten_dense_tensors(total, chunks[0])
    reordered: Sequence[Tensor] = _reorder(sums, replicas[0])
    return list(reordered)
