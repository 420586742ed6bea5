"""Recording of the inputs and outputs of all modules of a program."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..batch import nested
from ..batch.microbatches import as_arguments
from ..batch.rows import move_leaves
from ..loss.partial_sums import Criterion
from ..replicas.meeting import current_replica
from ..runtime.tensors import versions
from .loss_parts import copy_of

__all__: list[str] = []


class Call(NamedTuple):
    """One forward of a module.

    Attributes:
        name: name of the module, empty for the model.
        label: name and type of the module.
        inputs: tensors of the inputs, without copies.
        versions: their version counters before the forward.
        output: copy of the first tensor of the output.
    """

    name: str
    label: str
    inputs: list[Tensor]
    versions: list[int]
    output: Tensor


class Program:
    """A copy of model and criterion that records each call of a module, by forward and replica."""

    def __init__(self, module: nn.Module, criterion: Criterion | None = None) -> None:
        self.module, self.criterion = copy_of(module), copy_of(criterion)
        self.output: Any = None
        self.module.register_forward_pre_hook(self._start_forward)
        for name, layer in self.module.named_modules():
            layer.register_forward_pre_hook(self._input_hook(name), with_kwargs=True)
            layer.register_forward_hook(self._output_hook(name, f"{name or 'the model'} ({type(layer).__name__})"))
        self.module.register_forward_hook(self._end_forward)
        self.begin()

    def begin(self) -> None:
        """Deletes the calls and gradients of the previous step."""
        self.calls: dict[tuple[int, int], list[Call]] = {}
        self._open: dict[int, list[tuple[str, list[Tensor], list[int]]]] = {}  # calls that have not ended, per replica
        self._forwards: dict[int, int] = {}  # number of forwards per replica
        self._running: set[int] = set()
        for tensor in self._learning().values():
            tensor.grad = None

    @property
    def rounds(self) -> int:
        """Number of forwards in this step."""
        return max(self._forwards.values(), default=0)

    def _start_forward(self, *_: Any) -> None:
        replica = _replica_index()
        self._forwards[replica] = self._forwards.get(replica, 0) + 1
        self._running.add(replica)
        self._open[replica] = []

    def _end_forward(self, *_: Any) -> None:
        self._running.discard(_replica_index())

    def _input_hook(self, name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, *inputs: Any) -> None:
            if (replica := _replica_index()) in self._running:  # False for recomputation by a checkpoint in the backward
                tensors = [leaf for _, leaf in nested.leaves(inputs) if isinstance(leaf, Tensor)]
                self._open[replica].append((name, tensors, versions(tensors)))

        return hook

    def _output_hook(self, name: str, label: str) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: Any, output: Any) -> None:
            tensor, replica = nested.first_tensor(output), _replica_index()
            if replica not in self._running:
                return
            opened = self._open[replica].pop()
            while opened[0] != name:  # a call that failed, and whose error the model has caught
                opened = self._open[replica].pop()
            if tensor is not None:
                calls = self.calls.setdefault((self._forwards[replica], replica), [])
                calls.append(Call(name, label, *opened[1:], tensor.detach().clone()))

        return hook

    def forward(self, inputs: Any, device: torch.device, seed: int) -> Any:
        """Runs the model on all rows, on one device."""
        self.begin()
        torch.manual_seed(seed)
        arguments = move_leaves(as_arguments(inputs), device)
        self.output = self.module.to(device)(*arguments.inputs, **arguments.kwargs)
        return self.output

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters of the model, and those of the criterion with the prefix ``criterion.``."""
        own = self.criterion.named_parameters() if isinstance(self.criterion, nn.Module) else ()
        return dict(self.module.named_parameters()) | {f"criterion.{name}": parameter for name, parameter in own}

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of all parameters and buffers that require them, with zeros for a gradient that is None."""
        tensors = self._learning().items()
        return {name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for name, tensor in tensors}

    def _learning(self) -> dict[str, Tensor]:
        buffers = self.criterion.named_buffers() if isinstance(self.criterion, nn.Module) else ()
        tensors = {
            **self.parameters(),
            **dict(self.module.named_buffers()),
            **{f"criterion.{name}": one for name, one in buffers},
        }
        return {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}


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
    dtype = torch.promote_types(torch.promote_types(found.dtype, expected.dtype), torch.float64)  # complex ones stay complex
    found, expected = found.detach().to(expected.device, dtype), expected.detach().to(dtype)
    same = (found == expected) | (found.isnan() & expected.isnan())
    difference = float(torch.where(same, 0.0, found - expected).abs().max())
    scale = max(float(expected.abs().max()), floor)
    if difference == 0:
        return 0.0
    return difference / scale if scale and math.isfinite(difference / scale) else math.inf
