"""Lets ``torch.nn.DataParallel`` run on simulated devices, so that it can be measured beside this library.

Its copies between devices are written in C++ for CUDA alone (torch/csrc/cuda/comm.cpp). Here are the same copies, in the same
buffers. Tensors of other devices go to torch's own functions, where this build of torch has them.
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
    def transfer(flat: Tensor, device: torch.device) -> Tensor:
        copy = flat.to(device)
        labels.label([copy], Category.PARAMETERS)
        return copy

    others = [torch.device("sim", device) for device in devices[1:]]
    return [list(tensors), *coalesced.broadcast_coalesced(tensors, others, buffer_size, transfer)]


def broadcast(tensor: Tensor, devices: Sequence[int]) -> list[Tensor]:
    return [tensor.to(f"sim:{device}") for device in devices]


def scatter(tensor: Tensor, devices: Sequence[int], sizes: Sequence[int] | None, dim: int, streams: object) -> tuple[Tensor, ...]:
    pieces = tensor.split(list(sizes), dim) if sizes else tensor.chunk(len(devices), dim)
    return tuple(piece.to(f"sim:{device}") for piece, device in zip(pieces, devices, strict=False))


def gather(tensors: Sequence[Tensor], dim: int, device: int | None) -> Tensor:
    size = list(tensors[0].shape)
    size[dim] = sum(tensor.shape[dim] for tensor in tensors)
    place = "cpu" if device == -1 else "sim" if device is None else f"sim:{device}"
    whole = torch.empty(size, dtype=tensors[0].dtype, device=place)
    for part, tensor in zip(whole.split([tensor.shape[dim] for tensor in tensors], dim), tensors, strict=True):
        part.copy_(tensor)
    return whole


def no_nccl(tensors: Sequence[Tensor]) -> bool:
    return False  # torch's own answer is no as well, with a warning about its build


@contextmanager
def comm_for_simulated_devices(labels: Labels) -> Iterator[None]:
    """Puts these functions in the place of torch's, and torch's back at the end."""
    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch._C, "_broadcast_coalesced", functools.partial(broadcast_coalesced, labels)),
        (torch._C, "_broadcast", broadcast),
        (torch._C, "_scatter", scatter),
        (torch._C, "_gather", gather),
        (nccl, "is_available", no_nccl),
    ]
    originals = [(owner, name, getattr(owner, name, None)) for owner, name, _ in places]
    streams, _functions._streams = _functions._streams, None  # torch keeps one for each device that it once saw
    for owner, name, ours in places:
        setattr(owner, name, _either(ours, getattr(owner, name, None)))
    try:
        yield
    finally:
        _functions._streams = streams
        for owner, name, original in originals:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _either(ours: Callable[..., Any], theirs: Callable[..., Any] | None) -> Callable[..., Any]:
    def choose(tensors: Tensor | Sequence[Tensor], *args: Any) -> Any:
        first = tensors if isinstance(tensors, Tensor) else tensors[0]
        names_host = first.device.type == "cpu" and torch.accelerator.current_accelerator() == torch.device("sim")
        return ours(tensors, *args) if theirs is None or names_host or first.device.type == "sim" else theirs(tensors, *args)

    return choose
