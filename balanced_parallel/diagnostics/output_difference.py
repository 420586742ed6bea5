"""The first module whose output differs between two programs, and the module that causes the difference."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.tensors import versions
from .module_recording import Call, Program, relative_error

__all__: list[str] = []


class Difference(NamedTuple):
    """A difference between the outputs of two programs.

    Attributes:
        label: name and type of the first module whose output differs.
        effect: the difference in words.
        parent: module whose forward computes other inputs for this module; None if the inputs are equal or not comparable.
    """

    label: str
    effect: str
    parent: str | None = None

    @property
    def place(self) -> str:
        """Name of the module, or of the part of a forward, where the difference begins."""
        return self.label if self.parent is None else f"{self.parent}, before {self.label.rpartition(' (')[0]}"

    def __str__(self) -> str:
        if self.parent is None:
            return f"{self.label}{self.effect}"
        return f"{self.label}: its inputs differ already, so the cause is in forward of {self.place}{self.effect}"


def first_difference(plain: Program, split: Program, dim: int, tolerance: float) -> Difference | None:
    """Returns the first module, in the order in which forwards end, whose joined outputs differ from the plain output."""
    parts = [split.calls[key] for key in sorted(split.calls)]
    calls = plain.calls.get((1, 0), [])
    for index, call in enumerate(calls):
        shards = [part[index] for part in parts if index < len(part) and part[index].label == call.label]
        if len(shards) < len(parts):
            return Difference(call.label, ", which the replicas did not run in the same order")
        error = _joined_error([shard.output for shard in shards], call.output, dim)
        if error is not None and error > tolerance:
            effect = f": relative error {error:.1e}"
            if _inputs_equal(call, shards, dim, tolerance):
                return Difference(call.label, effect)
            for later, other in enumerate(calls[index + 1 :], index + 1):  # a caller ends after its callees
                is_caller = not other.name or call.name.startswith(f"{other.name}.")
                others = [part[later] for part in parts if later < len(part) and part[later].name == other.name]
                if is_caller and (not other.name or _inputs_equal(other, others, dim, tolerance)):
                    return Difference(call.label, effect, other.label)
            return Difference(call.label, effect)
    return None


def _inputs_equal(call: Call, shards: Sequence[Call], dim: int, tolerance: float) -> bool:
    """Returns True if no input differs. Inputs that were overwritten, or whose shards do not join, are not compared."""
    if not all(len(shard.inputs) == len(call.inputs) for shard in shards):
        return True
    for index, expected in enumerate(call.inputs):
        records = [call, *shards]
        if all(versions([record.inputs[index]]) == [record.versions[index]] for record in records):
            error = _joined_error([shard.inputs[index].detach() for shard in shards], expected.detach(), dim)
            if error is not None and error > tolerance:
                return False
    return True


def _joined_error(shards: Sequence[Tensor], expected: Tensor, dim: int) -> float | None:
    joined = _join([shard.to(expected.device) for shard in shards], expected.shape, dim)
    return None if joined is None else relative_error(joined, expected)


def _join(shards: list[Tensor], shape: torch.Size, dim: int) -> Tensor | None:
    """Concatenates shards along the first dimension that gives ``shape``, ``dim`` before others; None if there is none."""
    if not shape:
        return None  # a loss inside of the model
    for along in dict.fromkeys([dim % len(shape), *range(len(shape))]):
        rests = {(*shard.shape[:along], *shard.shape[along + 1 :]) for shard in shards if shard.dim() == len(shape)}
        if rests == {(*shape[:along], *shape[along + 1 :])} and sum(shard.size(along) for shard in shards) == shape[along]:
            return torch.cat(shards, along)
    return None
