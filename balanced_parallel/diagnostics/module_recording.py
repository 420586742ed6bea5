"""A copy of model and criterion that notes what each module gives, and where two of them part."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import nested
from ..loss.partial_sums import Criterion
from ..replicas.workers import current_replica
from .loss_parts import copy_of

__all__: list[str] = []


class Program:
    """A copy of model and criterion that notes the output of each module, by forward and replica."""

    def __init__(self, module: nn.Module, criterion: Criterion) -> None:
        self.module, self.criterion = copy_of(module), copy_of(criterion)
        self.output: Any = None
        for name, layer in self.module.named_modules():
            layer.register_forward_hook(self._note(name or "the model", type(layer).__name__))
        self.module.register_forward_pre_hook(self._open)
        self.module.register_forward_hook(self._close)
        self.begin()

    def begin(self) -> None:
        """Forgets the step before."""
        self.noted: dict[tuple[int, int], list[tuple[str, Tensor]]] = {}
        self._forwards: dict[int, int] = {}  # of each replica
        self._running: set[int] = set()
        for parameter in self.parameters().values():
            parameter.grad = None

    @property
    def rounds(self) -> int:
        """Forwards in this step."""
        return max(self._forwards.values(), default=0)

    def _open(self, *_: Any) -> None:
        replica = _index()
        self._forwards[replica] = self._forwards.get(replica, 0) + 1
        self._running.add(replica)

    def _close(self, *_: Any) -> None:
        self._running.discard(_index())

    def _note(self, name: str, kind: str) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: Any, output: Any) -> None:
            tensor, replica = nested.first_tensor(output), _index()
            if tensor is not None and replica in self._running:  # not what a checkpoint computes again in the backward
                noted = self.noted.setdefault((self._forwards[replica], replica), [])
                noted.append((f"{name} ({kind})", tensor.detach().clone()))

        return hook

    def parameters(self) -> dict[str, nn.Parameter]:
        own = self.criterion.named_parameters() if isinstance(self.criterion, nn.Module) else ()
        return dict(self.module.named_parameters()) | {f"criterion.{name}": parameter for name, parameter in own}

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self.parameters().items()
            if parameter.requires_grad
        }


def _index() -> int:
    replica = current_replica()
    return 0 if replica is None else replica.index


def relative_error(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Infinite where only one of them is nan: a comparison with nan would pass for small."""
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
    """The first module, in the order in which forwards end, whose pieces put together are not the plain output."""
    parts = [split.noted[place] for place in sorted(split.noted)]
    for index, (name, expected) in enumerate(plain.noted.get((1, 0), [])):
        pieces = [part[index][1].to(expected.device) for part in parts if index < len(part) and part[index][0] == name]
        if len(pieces) < len(parts):
            return f"{name}, which the replicas did not run in the same order"
        whole = _join(pieces, expected.shape, dim)
        if whole is not None and (error := relative_error(whole, expected)) > tolerance:
            return f"{name}: relative error {error:.1e}"
    return None


def _join(pieces: list[Tensor], shape: torch.Size, dim: int) -> Tensor | None:
    """The pieces in the dimension, ``dim`` first, in which they make up ``shape``; None where they do in none."""
    for along in dict.fromkeys([dim % max(len(shape), 1), *range(len(shape))]):
        rests = {(*piece.shape[:along], *piece.shape[along + 1 :]) for piece in pieces if piece.dim() == len(shape)}
        if rests == {(*shape[:along], *shape[along + 1 :])} and sum(piece.size(along) for piece in pieces) == shape[along]:
            return torch.cat(pieces, along)
    return None
