"""Collectives between the devices of one process.

Each device has one flat tensor, all of one dtype.

Between distinct GPUs they are those of ``torch.cuda.nccl``, which ``nn.DataParallel`` uses too.
Other devices, such as simulated ones, or a GPU and the CPU, have copies. Memory is given by the
caller, so it belongs to the stream that the caller has chosen.

A device takes part in one copy at a time, because a copy runs on a stream of its source, for which
one of its target waits. So copies between all devices are made in rounds of disjoint pairs: 0-3 and
1-2, then 0-1 and 2-3, then 0-2 and 1-3. Sums are taken in the order of the tensors.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.cuda import nccl

from . import torch_private
from .devices import NO_BLOCK, Devices, is_accelerator, move

# torch has one communicator for each list of devices, and NCCL takes one call at a time on it.
_communicating = threading.Lock()


def broadcast(tensor: Tensor, targets: Sequence[Tensor]) -> None:
    """Copies ``tensor`` to ``targets``, one on each other device.

    None sends it twice: the first sends it to the second.
    """
    if _have_nccl([tensor, *targets]):
        _run(nccl.broadcast, [*map(_bits, (tensor, *targets))])
    else:
        for source, target in itertools.pairwise([tensor, *targets]):
            copy(target, source)


def reduce(tensors: Sequence[Tensor], output: Tensor) -> None:
    """Sums ``tensors`` of several devices into ``output``."""
    places = [tensor.device for tensor in tensors]
    with torch_private.profiled("reduction") if torch_private.is_profiled() else NO_BLOCK:
        if output.device in places and _have_nccl(tensors):
            root = places.index(output.device)
            _run(nccl.reduce, [*map(_real, tensors)], _real(output), root=root)
            return
        if output is not tensors[0]:
            copy(output, tensors[0])
        for tensor in tensors[1:]:
            output.add_(move(tensor, output.device))


def reduce_scatter(tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Sums ``tensors``, and puts one slice of the sum into each of ``outputs``.

    Equal slices in their order are fastest.
    """
    in_order = [tensor.device for tensor in tensors] == [output.device for output in outputs]
    sizes = [output.numel() for output in outputs]
    has_nccl = _have_nccl(tensors)
    if in_order and has_nccl and len(set(sizes)) == 1:
        with torch_private.profiled("reduction") if torch_private.is_profiled() else NO_BLOCK:
            _run(nccl.reduce_scatter, [*map(_real, tensors)], [*map(_real, outputs)])
        return
    # One list for each output.
    slices = [
        list(parts) for parts in zip(*(tensor.split(sizes) for tensor in tensors), strict=True)
    ]
    if in_order and not has_nccl:
        for left, right in pairs(len(tensors)):
            slices[left][right] = move(slices[left][right], outputs[left].device)
            slices[right][left] = move(slices[right][left], outputs[right].device)
    for output, parts in zip(outputs, slices, strict=True):
        reduce(parts, output)


def all_gather(outputs: Sequence[Tensor], sizes: list[int]) -> None:
    """Completes tensors of slices of these ``sizes``.

    Each has the slice that it sends, the one at its own place.
    """
    slices = [output.split(sizes) for output in outputs]
    sent = [parts[place] for place, parts in enumerate(slices)]
    # nccl.broadcast ignores its root, so it does not do for unequal sizes
    if _have_nccl(sent) and len(set(sizes)) == 1:
        _run(nccl.all_gather, [*map(_bits, sent)], [*map(_bits, outputs)])
        return
    for left, right in pairs(len(sent)):
        copy(slices[left][right], sent[right])
        copy(slices[right][left], sent[left])


def _have_nccl(tensors: Sequence[Tensor]) -> bool:
    return (
        tensors[0].is_cuda
        and torch_private.has_nccl()
        and tensors[0].numel() > 0
        and nccl.is_available(tensors)
    )


def _run(collective: Callable[..., None], *arguments: object, **settings: object) -> None:
    with _communicating:
        collective(*arguments, **settings)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)  # NCCL knows neither int16 nor complex numbers


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


BUFFER_BYTES = 25 * 2**20  # DistributedDataParallel's buckets have this size.


class MemoryLayout(NamedTuple):
    """Order of a tensor's elements in a buffer: that of its memory, or row by row if its memory has
    gaps.
    """

    shape: torch.Size
    strides: tuple[int, ...] | None = None  # None for row by row
    order: tuple[int, ...] = ()  # dimensions in the order of the memory
    is_dense: bool = True  # False if the memory has gaps

    def flatten(self, tensor: Tensor) -> Tensor:
        """Returns the elements of a tensor of this shape, without a copy if its memory has this
        layout.
        """
        return (tensor if self.strides is None else tensor.permute(self.order)).reshape(-1)

    def restore(self, row: Tensor) -> Tensor:
        """Returns a view with shape and strides."""
        return (
            row.view(self.shape)
            if self.strides is None
            else row.as_strided(self.shape, self.strides)
        )


def layout_of(tensor: Tensor) -> MemoryLayout:
    """Returns the layout of a tensor."""
    if tensor.is_contiguous():
        return MemoryLayout(tensor.shape)
    order = tuple(
        sorted(
            range(tensor.dim()),
            key=lambda dim: (tensor.stride(dim), tensor.size(dim)),
            reverse=True,
        )
    )
    is_dense = tensor.permute(order).is_contiguous()
    if not is_dense:
        return MemoryLayout(tensor.shape, is_dense=False)
    return MemoryLayout(tensor.shape, tensor.stride(), order)


def pack(layouts: Sequence[MemoryLayout], tensors: Sequence[Tensor], size: int = 0) -> Tensor:
    """Returns the tensors in one flat tensor, followed by zeros up to ``size`` elements.

    A single tensor is not copied.
    """
    rows = [layout.flatten(tensor) for layout, tensor in zip(layouts, tensors, strict=True)]
    missing = size - sum(map(torch.numel, rows))
    if missing > 0:
        rows.append(tensors[0].new_zeros(missing))
    flat = rows[0] if len(rows) == 1 else torch.cat(rows)
    # torch notes both lazily, and NCCL reads the memory as it is
    return flat.resolve_conj().resolve_neg()


def unpack(layouts: Sequence[MemoryLayout], flat: Tensor) -> list[Tensor]:
    """Returns views of a flat tensor. They have version counters of their own."""
    sizes = [layout.shape.numel() for layout in layouts]
    rows = flat[: sum(sizes)].split(sizes) if sizes else ()
    return [layout.restore(row.data) for layout, row in zip(layouts, rows, strict=True)]


def copy_coalesced(
    targets: Sequence[Sequence[Tensor]],
    sources: Sequence[Tensor],
    buffer_bytes: int = BUFFER_BYTES,
) -> None:
    """Copies ``sources[i]`` to ``targets[d][i]`` of each other device ``d``, all dense.

    ``buffer_bytes=0`` is without buffers.
    """
    for chunk in chunks(sources, buffer_bytes):
        layouts = [layout_of(sources[i]) for i in chunk]
        flat = pack(layouts, [sources[i] for i in chunk])
        selected = [[tensors[i] for i in chunk] for tensors in targets]
        is_single = len(chunk) == 1 and layouts[0].is_dense
        is_direct = is_single and all(layout_of(tensors[0]) == layouts[0] for tensors in selected)
        if is_direct:
            buffers = [layouts[0].flatten(tensors[0]) for tensors in selected]
        else:
            buffers = [torch.empty_like(flat, device=tensors[0].device) for tensors in selected]
        broadcast(flat, buffers)
        for tensors, buffer in zip(selected, buffers, strict=True):
            if is_direct:
                torch.autograd.graph.increment_version(tensors)
            else:
                torch_private.foreach_copy_(tensors, unpack(layouts, buffer))


def copies(tensors: Sequence[Tensor], devices: Devices, buffer_bytes: int) -> list[list[Tensor]]:
    """Returns copies of dense tensors for each of ``devices``, which may repeat.

    Copies from one buffer share its memory.
    """
    copied = [[*tensors] for _ in devices]  # The copies replace the tensors in these lists.
    for chunk in chunks(tensors, buffer_bytes):
        layouts = [layout_of(tensors[i]) for i in chunk]
        flat = pack(layouts, [tensors[i] for i in chunk])
        for device, on_device in zip(devices, copied, strict=True):
            buffer = flat.to(device, non_blocking=is_accelerator(device), copy=True)
            for i, piece in zip(chunk, unpack(layouts, buffer), strict=True):
                on_device[i] = piece
    return copied


def chunks(tensors: Sequence[Tensor], limit: int) -> Iterator[list[int]]:
    """Yields indices of tensors of one dtype with at most ``limit`` bytes, or of one larger tensor."""
    open_chunks: dict[torch.dtype, tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        chunk, size = open_chunks.get(tensor.dtype, ([], 0))
        if chunk and size + tensor.nbytes > limit:
            yield chunk
            chunk = []
            size = 0
        chunk.append(i)
        open_chunks[tensor.dtype] = chunk, size + tensor.nbytes
    yield from (chunk for chunk, _ in open_chunks.values())


def pairs(count: int) -> Iterator[tuple[int, int]]:
    """Yields each pair of ``count`` devices once, round by round."""
    # the last of an even number of devices; if ``count`` is odd, nobody's
    last = count - 1 + count % 2
    for turn in range(last):
        for left in range(last):
            right = (turn - left) % last
            right = last if right == left else right
            if left < right < count:
                yield left, right


def copy(target: Tensor, source: Tensor) -> None:
    """Copies values. Only copies to an accelerator are asynchronous, as in :func:`move`."""
    target.copy_(source, non_blocking=is_accelerator(target.device))
