"""Recording of the outputs of all modules, and the first module whose output differs between two programs."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import nested
from ..loss.partial_sums import Criterion
from ..replicas.meeting import current_replica
from .loss_parts import copy_of

__all__: list[str] = []


class Program:
    """A copy of model and criterion that records the output of each module, by forward and replica."""

    def __init__(self, module: nn.Module, criterion: Criterion) -> None:
        self.module, self.criterion = copy_of(module), copy_of(criterion)
        self.output: Any = None
        for name, layer in self.module.named_modules():
            layer.register_forward_hook(self._recording_hook(name or "the model", type(layer).__name__))
        self.module.register_forward_pre_hook(self._start_forward)
        self.module.register_forward_hook(self._end_forward)
        self.begin()

    def begin(self) -> None:
        """Deletes the outputs and gradients of the previous step."""
        self.outputs: dict[tuple[int, int], list[tuple[str, Tensor]]] = {}
        self._forwards: dict[int, int] = {}  # number of forwards per replica
        self._running: set[int] = set()
        for parameter in self.parameters().values():
            parameter.grad = None

    @property
    def rounds(self) -> int:
        """Number of forwards in this step."""
        return max(self._forwards.values(), default=0)

    def _start_forward(self, *_: Any) -> None:
        replica = _replica_index()
        self._forwards[replica] = self._forwards.get(replica, 0) + 1
        self._running.add(replica)

    def _end_forward(self, *_: Any) -> None:
        self._running.discard(_replica_index())

    def _recording_hook(self, name: str, kind: str) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: Any, output: Any) -> None:
            tensor, replica = nested.first_tensor(output), _replica_index()
            if tensor is not None and replica in self._running:  # False for recomputation by a checkpoint in the backward
                outputs = self.outputs.setdefault((self._forwards[replica], replica), [])
                outputs.append((f"{name} ({kind})", tensor.detach().clone()))

        return hook

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters of the model, and those of the criterion with the prefix ``criterion.``."""
        own = self.criterion.named_parameters() if isinstance(self.criterion, nn.Module) else ()
        return dict(self.module.named_parameters()) | {f"criterion.{name}": parameter for name, parameter in own}

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of all trainable parameters, with zeros for a gradient that is None."""
        return {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self.parameters().items()
            if parameter.requires_grad
        }


def _replica_index() -> int:
    replica = current_replica()
    return 0 if replica is None else replica.index


def relative_error(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Returns the largest absolute difference over the largest absolute value of ``expected``.

    The error is infinite if only one of two elements is nan, because nan is not greater than any tolerance.

    Args:
        found, expected: tensors of the same shape.
        floor: smallest value to divide by.
    """
    if expected.numel() == 0:
        return 0.0
    found, expected = found.to(expected.device).double(), expected.double()
    same = (found == expected) | (found.isnan() & expected.isnan())
    difference = float(torch.where(same, 0.0, found - expected).abs().max())
    scale = max(float(expected.abs().max()), floor)
    if difference == 0:
        return 0.0
    return difference / scale if scale and math.isfinite(difference / scale) else math.inf


def first_difference(plain: Program, split: Program, dim: int, tolerance: float) -> str | None:
    """Returns the first module, in the order in which forwards end, whose joined outputs differ from the plain output."""
    parts = [split.outputs[key] for key in sorted(split.outputs)]
    for index, (name, expected) in enumerate(plain.outputs.get((1, 0), [])):
        shards = [part[index][1].to(expected.device) for part in parts if index < len(part) and part[index][0] == name]
        if len(shards) < len(parts):
            return f"{name}, which the replicas did not run in the same order"
        joined = _join(shards, expected.shape, dim)
        if joined is not None and (error := relative_error(joined, expected)) > tolerance:
            return f"{name}: relative error {error:.1e}"
    return None


def _join(shards: list[Tensor], shape: torch.Size, dim: int) -> Tensor | None:
    """Concatenates shards along the first dimension that gives ``shape``, ``dim`` before others; None if there is none."""
    if not shape:
        return None  # a loss inside of the model
    for along in dict.fromkeys([dim % len(shape), *range(len(shape))]):
        rests = {(*shard.shape[:along], *shard.shape[along + 1 :]) for shard in shards if shard.dim() == len(shape)}
        if rests == {(*shape[:along], *shape[along + 1 :])} and sum(shard.size(along) for shard in shards) == shape[along]:
            return torch.cat(shards, along)
    return None
