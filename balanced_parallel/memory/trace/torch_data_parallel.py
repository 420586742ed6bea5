"""The forward of ``nn.DataParallel`` on fake devices: torch's own refuses CPUs."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from ...batch.row_marks import Arguments
from ...batch.rows import count_rows, cut, move_leaves
from ...batch.scattering import split_sizes
from .fake_devices import HOME

__all__: list[str] = []


def run_replicas(module: nn.Module, arguments: Arguments, devices: list[torch.device], dim: int) -> list[Any]:
    """Copies the parameters to each device, runs the module on its rows there, and returns the outputs."""
    names = [name for name, _ in module.named_parameters()]
    rows = count_rows(arguments, dim)
    sizes = [size for size in split_sizes(rows or 1, len(devices)) if size]
    pieces = cut(arguments, sizes, dim) if rows else [arguments]
    size, copied = len(names), _Broadcast.apply(devices[: len(pieces)], *module.parameters())
    outputs = []
    for index, (piece, device) in enumerate(zip(pieces, devices, strict=False)):
        inputs, kwargs = move_leaves(piece, device)
        mine = dict(zip(names, copied[index * size : (index + 1) * size], strict=True))
        mine |= {name: buffer.to(device) for name, buffer in module.named_buffers()}
        outputs.append(torch.func.functional_call(module, mine, inputs, kwargs))
    return outputs


class _Broadcast(torch.autograd.Function):
    """As ``comm.broadcast_coalesced`` and ``comm.reduce_add_coalesced``: both flatten by 10 MiB."""

    @staticmethod
    def forward(ctx: Any, devices: list[torch.device], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.size = len(parameters)
        copies: list[dict[int, Tensor]] = [{} for _ in devices[1:]]
        for chunk in _take_tensors(list(parameters), 10 * 2**20):
            flat = _flatten_dense_tensors(chunk)
            for held, device in zip(copies, devices[1:], strict=True):
                pieces = _unflatten_dense_tensors(flat.to(device), chunk)  # which live as long as one of them
                held.update((id(parameter), piece.detach()) for parameter, piece in zip(chunk, pieces, strict=True))
        first = [parameter.detach() for parameter in parameters]
        return (*first, *(held[id(parameter)] for held in copies for parameter in parameters))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        replicas = [gradients[start : start + ctx.size] for start in range(0, len(gradients), ctx.size)]
        if len(replicas) == 1:
            return (None, *gradients)
        summed: list[Tensor] = []
        for chunks in zip(*(_take_tensors(list(mine), 10 * 2**20) for mine in replicas), strict=True):
            flat, *others = [_flatten_dense_tensors(chunk) for chunk in chunks]
            total = flat + others[0].to(HOME)
            for other in others[1:]:
                total.add_(other.to(HOME))
            summed += _unflatten_dense_tensors(total, chunks[0])
        return (None, *summed)
