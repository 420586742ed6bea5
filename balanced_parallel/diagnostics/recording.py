"""Programs that record what their modules compute, the first difference between two of them, and losses of parts of a batch."""

import collections
import copy
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..batch import containers
from ..batch.containers import Dims
from ..batch.outputs import PerReplica
from ..batch.plan import consecutive
from ..batch.rows import as_arguments, cut, move_leaves, spread
from ..loss.copies import Criterion, ShardLoss, call_spread, loss_of
from ..loss.criterion import DataParallelCriterion
from ..loss.kinds import call_weight
from ..loss.rules import is_known
from ..loss.sums import flat_weights
from ..replicas.workers import current_replica
from ..runtime import row_random

Copied = TypeVar("Copied")


class Program:
    """A copy of model and criterion that records each call of a module, by forward and replica."""

    def __init__(self, module: nn.Module, criterion: Criterion | None = None) -> None:
        self.module = copy_of(module)
        self.criterion: Any = copy_of(criterion)
        self.output: object = None
        self.module.register_forward_pre_hook(self._start_forward)
        for name, layer in self.module.named_modules():
            label = f"{name or 'the model'} ({type(layer).__name__})"
            layer.register_forward_hook(functools.partial(self._record, label))
        self.module.register_forward_hook(self._end_forward)
        self.begin()

    def begin(self) -> None:
        """Deletes the calls and gradients of the previous step."""
        self.calls: dict[tuple[int, int], list[tuple[str, Tensor]]] = {}  # name and type of each module, with its first tensor
        self._running: set[int] = set()  # replicas in a forward, not in a recomputation by a checkpoint
        self._forwards: collections.Counter[int] = collections.Counter()  # per replica
        for tensor in self.learning().values():
            tensor.grad = None

    @property
    def rounds(self) -> int:
        """Number of forwards in this step."""
        return max(self._forwards.values(), default=0)

    def _start_forward(self, *_: object) -> None:
        if (forward := row_random.running.get()) is not None and forward.expected is None:
            return  # it finds the draws
        replica = _replica_index()
        self._forwards[replica] += 1
        self._running.add(replica)

    def _end_forward(self, module: nn.Module, inputs: object, output: object) -> None:
        self._running.discard(_replica_index())
        self.output = output

    def _record(self, label: str, layer: nn.Module, inputs: object, output: object) -> None:
        tensor, replica = containers.first_tensor(output), _replica_index()
        if tensor is not None and replica in self._running:
            calls = self.calls.setdefault((self._forwards[replica], replica), [])
            calls.append((label, tensor.detach().clone()))

    def forward(self, inputs: object, device: torch.device, seed: int) -> object:
        """Runs the model on all rows, on one device."""
        self.begin()
        torch.manual_seed(seed)
        arguments = move_leaves(as_arguments(inputs), device)
        return self.module.to(device)(*arguments.inputs, **arguments.kwargs)

    def backward(self, targets: object, device: torch.device) -> Tensor:
        """Computes the loss of the last output, and its gradients."""
        criterion = self.criterion.to(device) if isinstance(self.criterion, nn.Module) else self.criterion
        loss = scalar_of(call_spread(criterion, self.output, move_leaves(spread(targets), device), {}))
        loss.backward()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of all parameters and buffers that require them, with zeros for a gradient that is None."""
        tensors = self.learning().items()
        return {name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for name, tensor in tensors}

    def learning(self) -> dict[str, Tensor]:
        """Returns the parameters and buffers that require gradients, those of the criterion with the prefix ``criterion.``."""
        tensors: dict[str, Tensor] = {}
        for prefix, part in (("", self.module), ("criterion.", self.criterion)):
            if isinstance(part, nn.Module):
                tensors |= {f"{prefix}{name}": tensor for name, tensor in (*part.named_parameters(), *part.named_buffers())}
        return {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}


def _replica_index() -> int:
    replica = current_replica()
    return 0 if replica is None else replica.index


def relative_error(value: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Returns the largest difference over the largest absolute value of ``expected``, or over ``floor`` if that is larger.

    It is infinite if only one of two elements is nan, because nan is not greater than any tolerance.
    """
    if expected.numel() == 0:
        return 0.0
    dtype = torch.promote_types(torch.promote_types(value.dtype, expected.dtype), torch.float64)  # complex ones stay complex
    value, expected = (tensor.detach().cpu().to(dtype) for tensor in (value, expected))  # some devices have no float64
    same = (value == expected) | (value.isnan() & expected.isnan())
    difference = float(torch.where(same, 0.0, value - expected).abs().max())
    scale = max(float(expected.abs().max()), floor)
    if difference == 0:
        return 0.0
    return difference / scale if scale and math.isfinite(difference / scale) else math.inf


class Difference(NamedTuple):
    """A difference between the outputs of two programs."""

    label: str  # name and type of the first module whose output differs
    effect: str
    previous: str  # the last module before it whose output is equal

    @property
    def place(self) -> str:
        """Part of the forward in which the difference begins."""
        return f"{self.label}, or between it and {self.previous}"

    def __str__(self) -> str:
        return f"{self.label}{self.effect}; equal up to {self.previous}"


def first_difference(plain: Program, split: Program, dim: int, tolerance: float) -> Difference | None:
    """Returns the first module, in the order in which forwards end, whose joined outputs differ from the plain output."""
    parts = [split.calls[key] for key in sorted(split.calls)]
    previous = "the inputs"
    for index, (label, expected) in enumerate(plain.calls.get((1, 0), [])):
        shards = [shard for part in parts for name, shard in part[index : index + 1] if name == label]
        if len(shards) < len(parts):
            return Difference(label, ", which the replicas did not run in the same order", previous)
        error = _joined_error(shards, expected, dim)
        if error is not None and error > tolerance:
            return Difference(label, f": relative error {error:.1e}", previous)
        previous = previous if error is None else label
    return None


def _joined_error(shards: Sequence[Tensor], expected: Tensor, dim: int) -> float | None:
    """Joins shards along the first dimension that gives the expected shape, ``dim`` before others; None if there is none."""
    shape = expected.shape
    if not shape:
        return None  # a loss inside of the model
    for along in dict.fromkeys([dim % len(shape), *range(len(shape))]):
        rests = {(*shard.shape[:along], *shard.shape[along + 1 :]) for shard in shards if shard.dim() == len(shape)}
        if rests == {(*shape[:along], *shape[along + 1 :])} and sum(shard.size(along) for shard in shards) == shape[along]:
            return relative_error(torch.cat([shard.to(expected.device) for shard in shards], along), expected)
    return None


_HALF = (torch.bfloat16, torch.float16)
_ROUNDING = 1e-4


def scalar_of(result: object) -> Tensor:
    """Returns the loss in the result of a criterion: a tensor, the attribute ``loss``, or the sum of several terms."""
    result = loss_of(result)
    if isinstance(result, Tensor):
        return result
    terms = [leaf for _, leaf in containers.leaves(result)]
    if not terms or not all(isinstance(term, Tensor) and term.numel() == 1 for term in terms):
        raise TypeError(f"the criterion returned {containers.describe(result)}, expected a scalar or several")
    return torch.stack([term.reshape(()) for term in terms]).sum()


def copy_of(criterion: Copied) -> Copied:
    """Returns a deep copy, or the object itself if it is not a module and cannot be copied."""
    try:
        return copy.deepcopy(criterion)
    except TypeError:  # a lock or a generator inside, for example
        if isinstance(criterion, nn.Module):
            raise
        return criterion


def loss_in_parts(output: object, wrapped: DataParallelCriterion, targets: object, dims: Dims) -> Iterator[str]:
    """Yields a reason if the loss computed from uneven parts of the rows differs from that of all rows, or raises an error."""
    if is_known(wrapped.module) and wrapped.weight is None:
        return  # a rule gives the divisor
    wrapped = copy_of(wrapped)
    if any(tensor.dtype in _HALF for tensor in (*wrapped.parameters(), *wrapped.buffers())):
        wrapped.float()
    output, targets = containers.map_leaves(_in_float32, (output, spread(targets)))
    whole, *cuts = _cuts(output, dims)
    expected = scalar_of(wrapped.cut(whole, targets, {}).run(ShardLoss.call)[0])
    try:
        losses = [scalar_of(copy_of(wrapped)(parts, *targets)).to(expected) for parts in cuts]
    except Exception:  # noqa: BLE001 - a criterion may raise any error for a part
        losses = []
    if not losses or not all(torch.allclose(loss, expected, rtol=_ROUNDING, equal_nan=True) for loss in losses):
        yield (
            "the loss: computed in parts it differs from the loss of the whole batch: its rows depend on each other, or weight= "
            "or reduction= is not that of the loss: give DataParallelCriterion neither for a loss of torch, reduction='sum' for "
            "a sum, weight='rows' for a mean over rows, weight=, a function (output, *targets) -> scalar that returns the "
            "divisor, for another mean, and whole=True or AdditiveLoss(statistics, finish) for any other loss"
        )


def weight_in_parts(output: object, wrapped: DataParallelCriterion, targets: object, dims: Dims) -> Iterator[str]:
    """Yields a reason if the results of ``weight=`` for two parts of the rows do not add up to that for all rows.

    Equal parts hide a wrong divisor: the mean of their means is right.
    """
    weigh = functools.partial(call_weight, wrapped.weight)
    all_rows, first_row, *_ = _cuts(output, dims)
    whole, first, others = (
        sum(flat_weights(count))
        for parts in (all_rows, first_row)
        for count in wrapped.cut(parts, spread(targets), {}).run(weigh)
    )
    if abs(first + others - whole) > _ROUNDING * whole:
        entries = len(spread(output))
        reason = f"; the output is a tuple, whose {entries} entries fill its first {entries} arguments" if entries > 1 else ""
        yield (
            f"weight= does not add up: it returned {whole:g} for {all_rows.sizes[0]} rows, {first:g} for the first of them and "
            f"{others:g} for the others, expected the number of terms that the mean divides by{reason}"
        )


def _cuts(output: object, dims: Dims) -> list[PerReplica]:
    """Returns an output in one part, and in two uneven parts of its rows in several ways."""
    tensor, dim = containers.first_tensor(output), dims if isinstance(dims, int) else 0
    if tensor is None or not -tensor.dim() <= dim < tensor.dim() or tensor.size(dim) < 2:
        raise ValueError("the output does not have several rows")
    rows = tensor.size(dim)
    third = max(rows // 3, 1)
    ways = [[rows], [1, rows - 1], [third, rows - third], [rows - third, third]]
    return [PerReplica(cut(output, consecutive(sizes), dim), sizes, dim) for sizes in ways]


def _in_float32(leaf: object) -> object:
    """Returns a tensor in half precision as float32, in which the losses of parts show more than rounding."""
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _HALF else leaf
