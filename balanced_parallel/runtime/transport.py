"""Collectives between the devices of one process. Each device has one flat tensor, all of one dtype.

Between distinct GPUs they are those of ``torch.cuda.nccl``, which ``nn.DataParallel`` uses too. Simulated devices provide the
same functions. Other devices, such as a GPU and the CPU, have copies in rounds. Memory is given by the caller, so it belongs to
the stream that the caller has chosen.
"""

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.cuda import nccl

from . import copy_rounds

__all__: list[str] = []

# NCCL copies these dtypes in every version. It knows neither int16 nor complex numbers.
_BITS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
# torch has one communicator for each list of devices, and NCCL takes one call at a time on it.
_communicating = threading.Lock()


def broadcast(tensor: Tensor, targets: Sequence[Tensor]) -> None:
    """Copies ``tensor`` to ``targets``, one on each other device."""
    if not _have_nccl([tensor, *targets]):
        copy_rounds.broadcast(tensor, targets)
    elif tensor.numel():
        _run(nccl.broadcast, [_bits(one) for one in (tensor, *targets)])


def reduce(tensors: Sequence[Tensor], output: Tensor) -> None:
    """Sums ``tensors`` of several devices into ``output``."""
    places = [tensor.device for tensor in tensors]
    if output.device not in places or not _have_nccl(tensors):
        copy_rounds.reduce(tensors, output)
    elif output.numel():
        _run(nccl.reduce, [_real(one) for one in tensors], _real(output), root=places.index(output.device))


def reduce_scatter(tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Sums ``tensors``, and puts one slice of the sum into each of ``outputs``.

    Fastest if the outputs are on the devices of the tensors, in their order, and have equal sizes.
    """
    in_order = [one.device for one in tensors] == [one.device for one in outputs]
    if in_order and not _have_nccl(tensors):
        copy_rounds.reduce_scatter(tensors, outputs)
    elif in_order and _have_equal_sizes(outputs):
        _run(nccl.reduce_scatter, [_real(one) for one in tensors], [_real(one) for one in outputs])
    else:
        slices = [tensor.split([output.numel() for output in outputs]) for tensor in tensors]
        for output, parts in zip(outputs, zip(*slices, strict=True), strict=True):
            reduce(parts, output)


def all_gather(tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Concatenates ``tensors`` in each of ``outputs``, which are on the same devices. A tensor may be a slice of its output."""
    if _have_nccl(tensors) and _have_equal_sizes(tensors):  # nccl.broadcast ignores its root, so it does not do for other sizes
        _run(nccl.all_gather, [_bits(one) for one in tensors], [_bits(one) for one in outputs])
    else:
        copy_rounds.all_gather(tensors, outputs)


def _have_nccl(tensors: Sequence[Tensor]) -> bool:
    # is_available() warns where torch was built without NCCL
    return hasattr(torch._C, "_nccl_reduce") and tensors[0].device.type != "cpu" and nccl.is_available(tensors)


def _have_equal_sizes(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.numel() for tensor in tensors}) == 1 and tensors[0].numel() > 0


def _run(collective: Callable[..., None], *arguments: object, **settings: object) -> None:
    with _communicating:
        collective(*arguments, **settings)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.itemsize])


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
