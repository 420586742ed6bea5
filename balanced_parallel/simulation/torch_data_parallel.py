"""Support for ``torch.nn.DataParallel`` on simulated devices, for comparisons with this library.

torch implements its copies between devices for CUDA only (torch/csrc/cuda/comm.cpp). The functions here make the same copies, in
buffers of the same size. Tensors of other devices go to torch's own functions, if this build of torch has them.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.cuda import nccl
from torch.nn.parallel import _functions

from ..runtime import coalesced
from .categories import Category, Labels

__all__: list[str] = []


def broadcast_coalesced(
    labels: Labels, tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[Tensor]]:
    """Copies tensors to all devices through buffers of ``buffer_size`` bytes."""

    def transfer(flat: Tensor, device: torch.device) -> Tensor:
        copy = flat.to(device)
        labels.label([copy], Category.PARAMETERS)
        return copy

    others = [torch.device("sim", device) for device in devices[1:]]
    return [list(tensors), *coalesced.broadcast_coalesced(tensors, others, buffer_size, transfer)]


def broadcast(tensor: Tensor, devices: Sequence[int]) -> list[Tensor]:
    """Copies a tensor to all devices."""
    return [tensor.to(f"sim:{device}") for device in devices]


def scatter(tensor: Tensor, devices: Sequence[int], sizes: Sequence[int] | None, dim: int, streams: object) -> tuple[Tensor, ...]:
    """Splits a tensor over the devices."""
    shards = tensor.split(list(sizes), dim) if sizes else tensor.chunk(len(devices), dim)
    return tuple(shard.to(f"sim:{device}") for shard, device in zip(shards, devices, strict=False))


def gather(tensors: Sequence[Tensor], dim: int, device: int | None) -> Tensor:
    """Concatenates tensors on a device, or on the CPU for -1."""
    size = list(tensors[0].shape)
    size[dim] = sum(tensor.shape[dim] for tensor in tensors)
    target = "cpu" if device == -1 else "sim" if device is None else f"sim:{device}"
    result = torch.empty(size, dtype=tensors[0].dtype, device=target)
    for view, tensor in zip(result.split([tensor.shape[dim] for tensor in tensors], dim), tensors, strict=True):
        view.copy_(tensor)
    return result


def no_nccl(tensors: Sequence[Tensor]) -> bool:
    """Returns False, as torch's own function does, but without its warning."""
    return False


@contextmanager
def comm_for_simulated_devices(labels: Labels) -> Iterator[None]:
    """Replaces torch's functions by these for the duration of the block."""
    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch._C, "_broadcast_coalesced", functools.partial(broadcast_coalesced, labels)),
        (torch._C, "_broadcast", broadcast),
        (torch._C, "_scatter", scatter),
        (torch._C, "_gather", gather),
        (nccl, "is_available", no_nccl),
    ]
    originals = [(owner, name, getattr(owner, name, None)) for owner, name, _ in places]
    streams, _functions._streams = _functions._streams, None  # torch caches one stream per device
    for owner, name, function in places:
        setattr(owner, name, _dispatch(function, getattr(owner, name, None)))
    try:
        yield
    finally:
        _functions._streams = streams
        for owner, name, original in originals:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _dispatch(function: Callable[..., Any], original: Callable[..., Any] | None) -> Callable[..., Any]:
    """Returns a function that calls ``original`` for tensors of other devices than simulated ones and the CPU."""

    def call(tensors: Tensor | Sequence[Tensor], *args: Any) -> Any:
        first = tensors if isinstance(tensors, Tensor) else tensors[0]
        is_host = first.device.type == "cpu" and torch.accelerator.current_accelerator() == torch.device("sim")
        is_simulated = is_host or first.device.type == "sim"
        return function(tensors, *args) if original is None or is_simulated else original(tensors, *args)

    return call
