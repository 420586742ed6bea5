"""Programs that record what their modules compute, the first difference between two of them, and losses of parts of a batch."""

import collections
import copy
import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..batch import containers
from ..batch.containers import Dims
from ..batch.outputs import PerReplica
from ..batch.plan import consecutive, proportional_sizes
from ..batch.rows import as_arguments, count_rows, cut, move_leaves
from ..loss.criterion import DataParallelCriterion
from ..loss.rules import is_known
from ..loss.sums import Criterion, ShardLoss, call_spread, call_weight, flat_weights, loss_of
from ..replicas.workers import current_replica
from ..runtime import row_random


class Program:
    """A copy of model and criterion that records each call of a module, by forward and replica."""

    def __init__(self, module: nn.Module, criterion: Criterion | None = None) -> None:
        self.module, self.criterion = copy_of(module), copy_of(criterion)
        self.output: Any = None
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

    def _start_forward(self, *_: Any) -> None:
        if (forward := row_random.running.get()) is not None and forward.expected is None:
            return  # it finds the draws
        replica = _replica_index()
        self._forwards[replica] += 1
        self._running.add(replica)

    def _end_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._running.discard(_replica_index())
        self.output = output

    def _record(self, label: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        tensor, replica = containers.first_tensor(output), _replica_index()
        if tensor is not None and replica in self._running:
            calls = self.calls.setdefault((self._forwards[replica], replica), [])
            calls.append((label, tensor.detach().clone()))

    def forward(self, inputs: Any, device: torch.device, seed: int) -> Any:
        """Runs the model on all rows, on one device."""
        self.begin()
        torch.manual_seed(seed)
        arguments = move_leaves(as_arguments(inputs), device)
        return self.module.to(device)(*arguments.inputs, **arguments.kwargs)

    def backward(self, targets: Any, device: torch.device) -> Tensor:
        """Computes the loss of the last output, and its gradients."""
        criterion = self.criterion.to(device) if isinstance(self.criterion, nn.Module) else self.criterion
        loss = scalar_of(call_spread(criterion, self.output, move_leaves(containers.spread(targets), device), {}))
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
    effect: str  # in words
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
_WEIGHT = "give DataParallelCriterion weight=, a function (output, *targets) -> scalar that returns the divisor"
_OTHER_WEIGHT = "weight= is not its divisor: give a function (output, *targets) -> scalar that returns it"
_WHOLE = "give DataParallelCriterion whole=True, which computes criterion(gather(outputs), targets)"
_ROUNDING = 1e-4


def scalar_of(result: Any) -> Tensor:
    """Returns the loss in the result of a criterion: a tensor, the attribute ``loss``, or the sum of several terms."""
    result = loss_of(result)
    if isinstance(result, Tensor):
        return result
    terms = [leaf for _, leaf in containers.leaves(result)]
    if not terms or not all(isinstance(term, Tensor) and term.numel() == 1 for term in terms):
        raise TypeError(f"the criterion returned {containers.describe(result)}, expected a scalar or several")
    return torch.stack([term.reshape(()) for term in terms]).sum()


def copy_of(criterion: Any) -> Any:
    """Returns a deep copy, or the object itself if it is not a module and cannot be copied."""
    try:
        return copy.deepcopy(criterion)
    except TypeError:  # a lock or a generator inside, for example
        if isinstance(criterion, nn.Module):
            raise
        return criterion


def loss_in_parts(output: Any, criterion: Criterion, wrapped: DataParallelCriterion, targets: Any, dims: Dims) -> Iterator[str]:
    """Yields a reason if the loss computed in parts differs from the loss of the whole batch."""
    if not is_known(criterion) or wrapped.weight is not None:  # else a rule gives the divisor
        single_output, single_targets = _single((output, containers.spread(targets)))
        if reason := _Parts(_single(criterion), _single(wrapped), single_output, single_targets, dims).reason():
            yield reason


def weight_in_parts(output: Any, wrapped: DataParallelCriterion, targets: Any, dims: Dims) -> Iterator[str]:
    """Yields a reason if the results of ``weight=`` for two parts of the rows do not add up to that for all rows.

    Equal parts hide a wrong divisor: the mean of their means is right.
    """
    count: Any = wrapped.weight
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        try:
            parts = _Parts(count, wrapped, output, containers.spread(targets), dims)
            shards = *parts.arguments([parts.rows]), *parts.arguments([1, parts.rows - 1])
            losses = [ShardLoss(wrapped, 0, *shard, {}) for shard in shards]
            whole, first, others = (sum(flat_weights(call_weight(count, loss))) for loss in losses)
        except Exception:  # noqa: BLE001 - no function, or one that may raise any error
            return
    if abs(first + others - whole) > _ROUNDING * whole:
        entries = len(containers.spread(output))
        spread = f"; the output is a tuple, whose {entries} entries fill its first {entries} arguments" if entries > 1 else ""
        yield (
            f"weight= does not add up: it returned {whole:g} for {parts.rows} rows, {first:g} for the first of them and "
            f"{others:g} for the others, expected the number of terms that the mean divides by{spread}"
        )


def _single(value: Any) -> Any:
    """Returns a copy whose tensors in half precision are float32, so that the losses of parts show more than rounding."""
    if isinstance(value, nn.Module):
        is_half = any(tensor.dtype in _HALF for tensor in (*value.parameters(), *value.buffers()))
        return copy_of(value).float() if is_half else value
    return containers.map_leaves(lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _HALF else leaf, value)


class _Parts:
    """Losses of contiguous parts of the rows."""

    def __init__(
        self, criterion: Criterion, wrapped: DataParallelCriterion, output: Any, targets: tuple[Any, ...], dims: Dims
    ) -> None:
        tensor, dim = containers.first_tensor(output), dims if isinstance(dims, int) else 0
        if tensor is None or not -tensor.dim() <= dim < tensor.dim() or tensor.size(dim) < 2:
            raise ValueError("the output does not have several rows")
        self.criterion, self.wrapped = criterion, wrapped
        self.output, self.dim, self.rows, self.device = output, dim, tensor.size(dim), tensor.device
        marked, self.target_dim = wrapped.mark(targets, {}, dim, len(containers.spread(output)))
        self.targets = marked.inputs
        self.counted = count_rows(self.targets, self.target_dim) if targets else None

    def arguments(self, sizes: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        """Returns output and targets of each part of ``sizes[i]`` rows."""
        outputs = cut(self.output, consecutive(sizes), self.dim)
        targets = [self.targets] * len(sizes)
        if self.counted is not None:
            targets = cut(self.targets, consecutive(proportional_sizes(self.counted, sizes)), self.target_dim)
        return zip(outputs, [move_leaves(target, self.device) for target in targets], strict=True)

    def losses(self, sizes: Sequence[int]) -> list[Tensor]:
        """Returns the loss of each part of ``sizes[i]`` rows, computed separately."""
        parts = self.arguments(sizes)
        return [scalar_of(copy_of(self.criterion)(*containers.spread(output), *targets)) for output, targets in parts]

    def reason(self) -> str | None:
        """Returns the reason for a difference, or None if the split program has the loss of the whole batch."""
        third, rows = max(self.rows // 3, 1), self.rows
        cuts = [[third, rows - third], [rows - third, third], [1, rows - 1]]  # uneven: the mean of the parts differs
        (whole,) = self.losses([rows])
        if all(_close(self._combined(sizes, whole), whole) for sizes in cuts):
            return None
        if isinstance(self.criterion, nn.Module) and is_known(self.criterion):
            return f"the loss: weight= is not its divisor: leave it out, because that of {type(self.criterion).__name__} is known"
        try:
            parts = [self.losses(sizes) for sizes in cuts]
        except Exception as error:  # noqa: BLE001 - a criterion may raise any error for a part
            name = type(error).__name__
            return f"the loss: it raises {name} for a part of the rows, so its rows seem to depend on each other: {_WHOLE}"
        if all(_close(first + second, whole) for first, second in parts):
            return 'the loss is a sum (its parts add up to the whole): give DataParallelCriterion reduction="sum"'
        if all(_close((pair[0] * sizes[0] + pair[1] * sizes[1]) / rows, whole) for pair, sizes in zip(parts, cuts, strict=True)):
            return 'the loss is a mean over rows: give DataParallelCriterion weight="rows"'
        is_mean, advice = self._is_weighted_mean(whole), _WEIGHT if self.wrapped.weight is None else _OTHER_WEIGHT
        if is_mean is None:
            return (
                "the loss: computed in parts it differs from the loss of the whole batch, so its rows depend on each other "
                f"({_WHOLE}), or {advice}"
            )
        if is_mean:
            return f"the loss is a mean, {'but not over rows:' if self.wrapped.weight is None else 'and'} {advice}"
        return (
            "the loss: its rows depend on each other, or it is a sum plus a mean, so it cannot be computed in parts: "
            f"{_WHOLE}, or AdditiveLoss(statistics, finish), if it is a function of sums"
        )

    def _combined(self, sizes: Sequence[int], whole: Tensor) -> Tensor:
        """Returns the loss that ``wrapped`` computes from the parts, or a different value if it raises an error."""
        try:
            parts = PerReplica(cut(self.output, consecutive(sizes), self.dim), sizes, self.dim)
            return scalar_of(copy_of(self.wrapped)(parts, *self.targets))
        except Exception:  # noqa: BLE001 - a criterion may raise any error for a part
            return torch.full_like(whole, torch.nan) if whole.isfinite() else torch.zeros_like(whole)

    def _is_weighted_mean(self, whole: Tensor) -> bool | None:
        """Returns True if the loss is a mean with one weight per part, None if its values do not determine the weights.

        The losses of three parts and of their two adjacent pairs determine the weights. The weighted mean of the three parts must
        then be the loss of the whole batch.
        """
        part, rest = self.rows // 4, self.rows - 2 * (self.rows // 4)
        for sizes in ((rest, part, part), (part, rest, part), (part, part, rest)) if part else ():
            loss_1, loss_2, loss_3 = map(float, self.losses(sizes))
            loss_12 = float(self.losses([sizes[0] + sizes[1], sizes[2]])[0])
            loss_23 = float(self.losses([sizes[0], sizes[1] + sizes[2]])[1])
            differences = loss_1 - loss_12, loss_23 - loss_3, loss_1 - loss_2, loss_2 - loss_3
            if all(abs(difference) > 1e-6 * abs(float(whole)) for difference in differences):  # not if one of them is nan
                weight_1, weight_3 = (loss_12 - loss_2) / differences[0], (loss_2 - loss_23) / differences[1]  # weight_2 is 1
                mean = (weight_1 * loss_1 + loss_2 + weight_3 * loss_3) / (weight_1 + 1 + weight_3)
                return weight_1 >= 0 and weight_3 >= 0 and _close(torch.tensor(mean), whole)
        return None


def _close(value: Tensor, expected: Tensor) -> bool:
    return torch.allclose(value.to(expected), expected, rtol=_ROUNDING, equal_nan=True)
