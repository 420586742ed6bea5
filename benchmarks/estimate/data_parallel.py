"""``nn.DataParallel`` as a layout of ``memory.estimate``, the one that the others are measured against.

Its forward runs on fake devices, of CPUs, which torch's own refuses. Copies and sums go through buffers of the same sizes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _reorder_tensors_as, _take_tensors, _unflatten_dense_tensors

from balanced_parallel import Precision, gather
from balanced_parallel.batch.marks import Arguments
from balanced_parallel.batch.plan import consecutive, split_sizes
from balanced_parallel.batch.rows import Shard, count_rows, cut, move_leaves
from balanced_parallel.loss.copies import ShardLoss
from balanced_parallel.memory.trace.fakes import HOME, fake_devices
from balanced_parallel.memory.trace.layouts import LAYOUTS, SingleDevice


class TorchDataParallel(SingleDevice):
    """``nn.DataParallel``, the layout that the others are measured against.

    Parameters are copied at each forward and outputs are gathered on the first device. The loss, the gradients and the
    optimizer's state are there too.
    """

    name = "torch_data_parallel"
    batch_on_host = True

    def loss(self, part: Shard) -> Tensor:
        """Runs the forward of one micro-batch."""
        devices, (dim, _) = fake_devices(self.request.devices), self.request.batch.dims
        with Precision(self.request.precision).autocast([HOME]):
            output = gather(run_replicas(self.module, part.inputs, devices, dim), HOME, dim)
            loss: Tensor = ShardLoss(self.criterion, 1, output, move_leaves(part.targets.inputs, HOME), {}).call()
            return loss


BUFFER = 10 * 2**20  # bytes: torch/nn/parallel/_functions.py, comm.py


def run_replicas(module: nn.Module, arguments: Arguments, devices: list[torch.device], dim: int) -> list[Any]:
    """Copies the parameters to each device, runs the module on its rows there, and returns the outputs."""
    names = [name for name, _ in module.named_parameters()]
    rows = count_rows(arguments, dim)
    sizes = [size for size in split_sizes(rows or 1, len(devices)) if size]
    pieces = cut(arguments, consecutive(sizes), dim) if rows else [arguments]
    size, copied = len(names), Broadcast.apply(devices[: len(pieces)], *module.parameters())
    outputs = []
    for index, (piece, device) in enumerate(zip(pieces, devices, strict=False)):
        inputs, kwargs = move_leaves(piece, device)
        tensors = dict(zip(names, copied[index * size : (index + 1) * size], strict=True))
        tensors |= {name: buffer.to(device) for name, buffer in module.named_buffers()}
        outputs.append(torch.func.functional_call(module, tensors, inputs, kwargs))
    return outputs


class Broadcast(torch.autograd.Function):
    """``comm.broadcast_coalesced``, and in the backward ``comm.reduce_add_coalesced``."""

    @staticmethod
    def forward(ctx: Any, devices: list[torch.device], *parameters: Tensor) -> tuple[Tensor, ...]:
        """Returns the parameters, and copies of them on each other device."""
        ctx.size = len(parameters)
        copies = broadcast_coalesced(parameters, devices[1:])
        return (*(parameter.detach() for parameter in parameters), *(copy for tensors in copies for copy in tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Returns the sums of the gradients over the devices."""
        replicas = [gradients[start : start + ctx.size] for start in range(0, len(gradients), ctx.size)]
        return (None, *(gradients if len(replicas) == 1 else reduce_add_coalesced(replicas)))


def broadcast_coalesced(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """Returns copies of the tensors on each of ``devices``. Copies that came in one buffer share its memory."""
    copies: list[dict[int, Tensor]] = [{} for _ in devices]
    for chunk in _take_tensors(tensors, BUFFER):
        flat = _flatten_dense_tensors(chunk)
        for by_tensor, device in zip(copies, devices, strict=True):
            pieces = _unflatten_dense_tensors(flat.to(device), chunk)
            by_tensor.update((id(tensor), piece.data) for tensor, piece in zip(chunk, pieces, strict=True))
    return [[by_tensor[id(tensor)] for tensor in tensors] for by_tensor in copies]


def reduce_add_coalesced(replicas: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Returns the sums of ``replicas[r][i]`` over the replicas, on the first device."""
    sums: list[Tensor] = []
    for chunks in zip(*(_take_tensors(tensors, BUFFER) for tensors in replicas), strict=True):
        flat, *others = [_flatten_dense_tensors(chunk) for chunk in chunks]
        total = flat + others[0].to(HOME)
        for other in others[1:]:
            total.add_(other.to(HOME))
        sums += _unflatten_dense_tensors(total, chunks[0])
    return list(_reorder_tensors_as(sums, replicas[0]))


LAYOUTS[TorchDataParallel.name] = TorchDataParallel
