"""Many tensors in few flat buffers, so that few large transfers take the place of many small ones."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import multi_tensor, transport

__all__: list[str] = []

BUFFER_BYTES = 25 * 2**20  # as the buckets of DistributedDataParallel


class Layout(NamedTuple):
    """Order of a tensor's elements in a buffer: that of its memory, or row by row if its memory has gaps."""

    shape: torch.Size
    strides: tuple[int, ...] | None = None  # None for row by row
    order: tuple[int, ...] = ()  # dimensions in the order of the memory

    @property
    def has_gaps(self) -> bool:
        """True if the memory has gaps or overlaps."""
        return self.strides is None and self.order != ()

    def flatten(self, tensor: Tensor) -> Tensor:
        """Returns the elements of a tensor of this shape, without a copy if its memory has this layout."""
        return (tensor if self.strides is None else tensor.permute(self.order)).reshape(-1)

    def restore(self, row: Tensor) -> Tensor:
        """Returns a view with shape and strides."""
        return row.view(self.shape) if self.strides is None else row.as_strided(self.shape, self.strides)


def layout_of(tensor: Tensor) -> Layout:
    """Returns the layout of a tensor."""
    if tensor.is_contiguous():
        return Layout(tensor.shape)
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.size(dim)), reverse=True))
    is_dense = tensor.permute(order).is_contiguous()
    return Layout(tensor.shape, tensor.stride() if is_dense else None, order)


def pack(layouts: Sequence[Layout], tensors: Sequence[Tensor], size: int = 0) -> Tensor:
    """Returns the tensors in one flat tensor, followed by zeros up to ``size`` elements. A single tensor is not copied."""
    rows = [layout.flatten(tensor) for layout, tensor in zip(layouts, tensors, strict=True)]
    missing = size - sum(row.numel() for row in rows)
    if missing > 0:
        rows.append(tensors[0].new_zeros(missing))
    flat = rows[0] if len(rows) == 1 else torch.cat(rows)
    return flat.resolve_conj().resolve_neg()  # torch notes both lazily, and NCCL reads the memory as it is


def unpack(layouts: Sequence[Layout], flat: Tensor) -> list[Tensor]:
    """Returns views of a flat tensor. They have version counters of their own."""
    sizes = [layout.shape.numel() for layout in layouts]
    rows = flat[: sum(sizes)].split(sizes) if sizes else ()
    return [layout.restore(row.data) for layout, row in zip(layouts, rows, strict=True)]


def copy_(targets: Sequence[Sequence[Tensor]], sources: Sequence[Tensor], buffer_bytes: int | None = None) -> None:
    """Copies ``sources[i]`` to ``targets[d][i]`` of each other device ``d``, all dense tensors.

    Args:
        buffer_bytes: size of the buffers, 25 MiB by default. With 0 no buffer is needed where strides are equal.
    """
    for chunk in _chunks(sources, BUFFER_BYTES if buffer_bytes is None else buffer_bytes):
        layouts = [layout_of(sources[i]) for i in chunk]
        flat = pack(layouts, [sources[i] for i in chunk])
        chosen = [[tensors[i] for i in chunk] for tensors in targets]
        if len(chunk) == 1 and not layouts[0].has_gaps and all(layout_of(tensor) == layouts[0] for (tensor,) in chosen):
            transport.broadcast(flat, [layouts[0].flatten(tensor) for (tensor,) in chosen])
            torch.autograd.graph.increment_version([tensor for (tensor,) in chosen])
            continue
        received = [torch.empty_like(flat, device=tensors[0].device) for tensors in chosen]
        transport.broadcast(flat, received)
        for tensors, one in zip(chosen, received, strict=True):
            multi_tensor.copy_(tensors, unpack(layouts, one))


def copies(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """Returns copies of dense tensors for each of ``devices``, which may repeat. Copies from one buffer share its memory."""
    copied: list[list[Any]] = [[None] * len(tensors) for _ in devices]
    for chunk in _chunks(tensors, BUFFER_BYTES) if devices else ():
        layouts = [layout_of(tensors[i]) for i in chunk]
        flat = pack(layouts, [tensors[i] for i in chunk])
        others = [device for device in dict.fromkeys(devices) if device != flat.device]
        received = {device: torch.empty_like(flat, device=device) for device in others}
        transport.broadcast(flat, list(received.values()))
        received[flat.device] = flat
        fresh = set(others) if len(chunk) == 1 else {*others, flat.device}  # a single tensor was not copied yet
        for device, found in zip(devices, copied, strict=True):
            buffer = received[device] if device in fresh else received[device].clone()
            fresh.discard(device)
            for i, piece in zip(chunk, unpack(layouts, buffer), strict=True):
                found[i] = piece
    return copied


def _chunks(tensors: Sequence[Tensor], limit: int) -> Iterator[list[int]]:
    """Yields indices of tensors of one dtype with at most ``limit`` bytes, or of one larger tensor."""
    open_chunks: dict[torch.dtype, tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        chunk, size = open_chunks.get(tensor.dtype, ([], 0))
        if chunk and size + tensor.nbytes > limit:
            yield chunk
            chunk, size = [], 0
        chunk.append(i)
        open_chunks[tensor.dtype] = chunk, size + tensor.nbytes
    yield from (chunk for chunk, _ in open_chunks.values())
