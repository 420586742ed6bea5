"""``torch.cuda.comm`` on simulated devices, which ``torch.nn.DataParallel`` uses.

torch implements it for CUDA only (torch/csrc/cuda/comm.cpp). The functions here copy the same bytes between the same devices.
Tensors of other devices go to torch's own functions, if this build of torch has them.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.cuda import nccl
from torch.nn.parallel import _functions

from .categories import Category, MemoryLabels


def broadcast_coalesced(
    labels: MemoryLabels, tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[Tensor]]:
    """Copies tensors to all devices through buffers of ``buffer_size`` bytes. Copies from one buffer share its memory."""
    results: list[list[Tensor]] = [list(tensors)]
    for device in devices[1:]:
        copies: dict[int, Tensor] = {}
        for chunk in _take_tensors(tensors, buffer_size):
            flat = _flatten_dense_tensors(chunk).to(f"sim:{device}")
            labels.label([flat], Category.PARAMETERS)
            # .data: a write to one copy does not move the version counter of the others
            pieces = [piece.data for piece in _unflatten_dense_tensors(flat, chunk)]
            copies.update(zip(map(id, chunk), pieces, strict=True))
        results.append([copies[id(tensor)] for tensor in tensors])
    return results


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


@contextmanager
def comm_for_simulated_devices(labels: MemoryLabels) -> Iterator[None]:
    """Replaces torch's functions by these for the duration of the block."""
    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch._C, "_broadcast_coalesced", functools.partial(broadcast_coalesced, labels)),
        (torch._C, "_broadcast", lambda tensor, devices: [tensor.to(f"sim:{device}") for device in devices]),
        (torch._C, "_scatter", scatter),
        (torch._C, "_gather", gather),
        (nccl, "is_available", lambda tensors: False),  # gradients are added by copies
    ]
    with ExitStack() as undo:
        undo.callback(setattr, _functions, "_streams", _functions._streams)
        _functions._streams = None  # torch caches one stream per device
        for owner, name, function in places:
            original = getattr(owner, name, None)
            undo.callback(*((delattr, owner, name) if original is None else (setattr, owner, name, original)))
            setattr(owner, name, _dispatch(function, original))
        yield


def _dispatch(function: Callable[..., Any], original: Callable[..., Any] | None) -> Callable[..., Any]:
    """Returns a function that calls ``original`` for tensors of other devices than simulated ones and the CPU."""

    def call(tensors: Tensor | Sequence[Tensor], *args: Any) -> Any:
        first = tensors if isinstance(tensors, Tensor) else tensors[0]
        is_host = first.device.type == "cpu" and torch.accelerator.current_accelerator() == torch.device("sim")
        is_simulated = is_host or first.device.type == "sim"
        return function(tensors, *args) if original is None or is_simulated else original(tensors, *args)

    return call
