"""Programs that record what their modules compute, the first difference between two of them, and
weights of parts of a batch.
"""

import collections
import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .. import DataParallelCriterion, DataParallelModel, PerReplica, scatter
from ..batch.containers import tensors_in
from ..batch.marks import Arguments
from ..batch.outputs import layout_of
from ..batch.rows import move_arguments, spread
from ..loss.copies import Criterion
from ..loss.entries import plain_loss
from ..replicas.workers import current_replica
from ..runtime.random_numbers import forward_by_row

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
Copied = TypeVar("Copied")
# name and type of each module, as forwards end, with what is kept of its tensors
ModuleCalls = list[tuple[str, list[Any]]]


class Program:
    """A copy of model and criterion that records each call of a module, by row, forward and replica."""

    def __init__(self, module: nn.Module, criterion: Criterion | None = None) -> None:
        self.module = copy_of(module)
        self.criterion: Any = copy_of(criterion)
        self.output: object = None
        self.module.register_forward_pre_hook(self._start_forward)
        for name, layer in self.module.named_modules():
            label = f"{name or 'the model'} ({type(layer).__name__})"
            layer.register_forward_hook(partial(self._record, label))
        self.module.register_forward_hook(self._end_forward)
        self.dtype = next(
            (parameter.dtype for parameter in self.module.parameters()), torch.float32
        )
        self.optimizer = _NoUpdate([*self.learning().values()] or [torch.zeros(())])
        self.begin(0)

    def begin(self, seed: int) -> None:
        """Deletes the calls and gradients of the previous step, and seeds the next."""
        self._calls: dict[tuple[int, int, int], ModuleCalls] = {}
        # replicas in a forward, not in a recomputation by a checkpoint
        self._running = set[int]()
        self._forwards = collections.Counter[int]()  # per replica
        self.optimizer.zero_grad()
        torch.manual_seed(seed)

    @property
    def calls(self) -> list[ModuleCalls]:
        """The calls of each shard, in the order of the rows."""
        return [self._calls[place] for place in sorted(self._calls)]

    @property
    def rounds(self) -> int:
        """Number of forwards in this step."""
        return max(self._forwards.values(), default=0)

    def _start_forward(self, *_: object) -> None:
        if (forward := forward_by_row.get()) is not None and forward.expected is None:
            return  # it finds the draws
        replica = _replica_index()
        self._forwards[replica] += 1
        self._running.add(replica)

    def _end_forward(self, module: nn.Module, inputs: object, output: object) -> None:
        self._running.discard(_replica_index())
        self.output = output

    def _record(self, label: str, layer: nn.Module, inputs: object, output: object) -> None:
        replica = _replica_index()
        if replica in self._running:
            first_row = getattr(forward_by_row.get(), "first_row", 0)
            place = (first_row, self._forwards[replica], replica)
            self.keep(self._calls.setdefault(place, []), label, output)

    def keep(self, calls: ModuleCalls, label: str, output: object) -> None:
        """Adds a call. Its tensors are copied, because a later module may write to them."""
        calls.append((label, [tensor.detach().clone() for tensor in tensors_in(output)]))

    def forward(self, arguments: Arguments, device: torch.device, seed: int = 0) -> ModuleCalls:
        """Runs the model on one device, and returns its calls."""
        self.begin(seed)
        inputs, kwargs = move_arguments(arguments, device)
        self.module.to(device)(*inputs, **kwargs)
        return self.calls[0] if self.calls else []

    def run(
        self,
        arguments: Arguments,
        targets: tuple[object, ...],
        device: torch.device,
    ) -> Tensor:
        """Runs a step of the plain program on one device. Returns the loss."""
        self.forward(arguments, device)
        criterion = (
            self.criterion.to(device) if isinstance(self.criterion, nn.Module) else self.criterion
        )
        moved, _ = move_arguments(Arguments(targets, {}), device)
        loss = plain_loss(criterion, self.output, moved)
        loss.backward()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of all parameters and buffers that require them, with zeros for a
        gradient that is None.
        """
        tensors = self.learning().items()
        return {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in tensors
        }

    def learning(self) -> dict[str, Tensor]:
        """Returns the parameters and buffers that require gradients, those of the criterion with
        the prefix ``criterion.``.
        """
        parts = {"": self.module, "criterion.": self.criterion}
        return {
            f"{prefix}{name}": tensor
            for prefix, part in parts.items()
            if isinstance(part, nn.Module)
            for name, tensor in (*part.named_parameters(), *part.named_buffers())
            if tensor.requires_grad
        }


class _NoUpdate(torch.optim.Optimizer):
    """An optimizer without updates. SGD with a learning rate of 0 would write nan for nan."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        pass


class Comparison(NamedTuple):
    """The plain and the split program after their steps on a batch, and what they were made of."""

    module: nn.Module
    plain: Program
    split: Program
    model: DataParallelModel  # The split program runs it.
    losses: DataParallelCriterion  # No step has called it.
    inputs: Arguments
    targets: tuple[object, ...]
    limit: float


def _replica_index() -> int:
    replica = current_replica()
    return 0 if replica is None else replica.index


def relative_error(value: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Returns the largest difference over the largest absolute value of ``expected``, or over
    ``floor`` if that is larger.

    It is infinite if only one of two elements is nan, because nan is not greater than any
    tolerance.
    """
    if expected.numel() == 0:
        return 0.0
    # complex ones stay complex
    dtype = torch.promote_types(torch.promote_types(value.dtype, expected.dtype), torch.float64)
    # some devices have no float64
    value, expected = (tensor.detach().cpu().to(dtype) for tensor in (value, expected))
    same = (value == expected) | (value.isnan() & expected.isnan())
    difference = float(torch.where(same, 0.0, value - expected).abs().max())
    scale = max(float(expected.abs().max()), floor)
    if difference == 0:
        return 0.0
    return difference / scale if scale and math.isfinite(difference / scale) else math.inf


class Difference(NamedTuple):
    """A difference between the outputs of two programs."""

    label: str  # name and type of the first module whose output differs
    error: float
    previous: str  # the last module before it whose output is equal

    @property
    def place(self) -> str:
        """Part of the forward in which the difference begins."""
        return f"{self.label}, or between it and {self.previous}"

    def __str__(self) -> str:
        return f"{self.label}: relative error {self.error:.1e}; equal up to {self.previous}"


def first_difference(
    expected: ModuleCalls,
    parts: Sequence[ModuleCalls],
    dim: int,
    tolerance: float,
) -> Difference | None:
    """Returns the first module, in the order in which forwards end, whose joined outputs differ."""
    previous = "the inputs"
    for label, error in errors_of_calls(expected, parts, dim):
        if error is not None and error > tolerance:
            return Difference(label, error, previous)
        previous = previous if error is None else label
    return None


def errors_of_calls(
    expected: ModuleCalls,
    parts: Sequence[ModuleCalls],
    dim: int,
) -> Iterator[tuple[str, float | None]]:
    """Yields the relative error of the joined outputs of each module, or None if they cannot be
    joined.

    It is infinite for a module that the replicas did not run in the same order.
    """
    for index, (label, tensors) in enumerate(expected):
        shards = [
            shard for part in parts for name, shard in part[index : index + 1] if name == label
        ]
        if len(shards) < len(parts):
            yield label, math.inf
            return
        columns = zip(tensors, *shards, strict=False)
        errors = [_joined_error(pieces, tensor, dim) for tensor, *pieces in columns]
        yield label, max((error for error in errors if error is not None), default=None)


def _joined_error(shards: Sequence[Tensor], expected: Tensor, dim: int) -> float | None:
    """Joins shards along the first dimension that gives the expected shape, ``dim`` before others;
    None if there is none.
    """
    dims = range(expected.dim())
    # The loss of a model has no rows.
    for along in dict.fromkeys([dim % len(dims), *dims] if dims else []):
        layouts = {layout_of(tensor, along) for tensor in (expected, *shards)}
        if len(layouts) == 1 and sum(shard.size(along) for shard in shards) == expected.size(along):
            return relative_error(
                torch.cat([shard.to(expected.device) for shard in shards], along), expected
            )
    return None


def copy_of(criterion: Copied) -> Copied:
    """Returns a deep copy, or the object itself if it is not a module and cannot be copied."""
    try:
        return copy.deepcopy(criterion)
    except TypeError:  # a lock or a generator inside, for example
        if isinstance(criterion, nn.Module):
            raise
        return criterion


def weight_in_parts(comparison: Comparison) -> Iterator[str]:
    """Yields a reason if the results of ``weight=`` for two parts of the rows do not add up to that
    for all rows.

    Equal parts hide a wrong divisor: the mean of their means is right.
    """
    output = comparison.plain.output
    dims = comparison.model.out_dims
    dim = dims if isinstance(dims, int) else 0
    rows = tensors_in(output)[0].size(dim)
    device = comparison.model.devices[0]

    def weights(sizes: list[int]) -> list[float]:
        """Returns the weight of each part."""
        pieces = scatter(output, [device] * len(sizes), dim, split=sizes)
        parts = PerReplica(pieces, sizes, dim)
        return comparison.losses.weights_of(parts, *comparison.targets)

    (whole,) = weights([rows])
    first, others = weights([1, rows - 1])
    if abs(first + others - whole) > comparison.limit * whole:
        entries = len(spread(output))
        reason = (
            f"; the output is a tuple, whose {entries} entries fill its first {entries} arguments"
            if entries > 1
            else ""
        )
        yield (
            f"weight= does not add up: it returned {whole:g} for {rows} rows, {first:g} for the first of them and "
            f"{others:g} for the others, expected the number of terms that the mean divides by{reason}"
        )
