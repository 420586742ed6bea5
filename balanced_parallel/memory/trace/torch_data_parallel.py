"""The forward of ``nn.DataParallel`` on fake devices: torch's own refuses CPUs."""

from typing import Any

import torch
from torch import Tensor, nn

from ...batch.row_marks import Arguments
from ...batch.rows import count_rows, cut, move_leaves
from ...batch.splits import split_sizes
from ...runtime.torch_comm import broadcast_coalesced, reduce_add_coalesced
from .fake_devices import HOME

__all__: list[str] = []

BUFFER = 10 * 2**20  # bytes: torch/nn/parallel/_functions.py, comm.py


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
        tensors = dict(zip(names, copied[index * size : (index + 1) * size], strict=True))
        tensors |= {name: buffer.to(device) for name, buffer in module.named_buffers()}
        outputs.append(torch.func.functional_call(module, tensors, inputs, kwargs))
    return outputs


class _Broadcast(torch.autograd.Function):
    """``comm.broadcast_coalesced``, and in the backward ``comm.reduce_add_coalesced``."""

    @staticmethod
    def forward(ctx: Any, devices: list[torch.device], *parameters: Tensor) -> tuple[Tensor, ...]:
        """Returns the parameters, and copies of them on each other device."""
        ctx.size = len(parameters)
        copies = broadcast_coalesced(parameters, devices[1:], BUFFER)
        return (*(parameter.detach() for parameter in parameters), *(copy for tensors in copies for copy in tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Returns the sums of the gradients over the devices."""
        replicas = [gradients[start : start + ctx.size] for start in range(0, len(gradients), ctx.size)]
        return (None, *(gradients if len(replicas) == 1 else reduce_add_coalesced(replicas, HOME, BUFFER)))
