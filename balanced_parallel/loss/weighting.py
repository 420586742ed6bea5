"""Means that stay exact when they are taken in parts: sums and counts, divided once.

The mean of the replicas' means is the mean of the batch only when every replica counts the same number of terms. It does
not with an uneven split, ignored labels or class weights, and one replica without a single counted label makes it nan.
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch.nested import Leaf
from ..runtime.collectives import sum_over_ranks, world_size

__all__: list[str] = []

Weight = Tensor | float


@dataclasses.dataclass(frozen=True, eq=False)
class LossSum(Leaf):
    """A sum of losses, and the weight to divide it by.

    Args:
        total: a scalar.
        weight: elements, rows, or the sum of class weights; ``None`` if the criterion is itself a sum, which nothing divides.
    """

    total: Tensor
    weight: Weight | None


def weighted_mean(
    losses: Sequence[Tensor],
    weights: Sequence[Weight],
    device: torch.device | None = None,
    *,
    minimum: float = 0.0,
) -> Tensor:
    """The exact mean of means: the sum of ``weight x loss`` over the sum of the weights, divided once.

    For a model that computes its own loss: ``weighted_mean([o.loss for o in outputs], weights)``. A weight of zero counts
    for nothing, even where its loss is nan; nan where all weights are zero. Where a process group with several ranks is
    running, the mean is over all ranks (each must call it), and gradients are right once they are averaged over ranks, as
    DistributedDataParallel does.

    Args:
        losses: one scalar per replica, each on its own device.
        weights: what each of them divided by: scalars, on any device.
        device: where the result goes; ``None`` is the device of the first loss.
        minimum: the floor of the divisor, for losses that divide by ``max(count, minimum)``, as those of detection do: each
            loss is taken times ``max(weight, minimum)``, and the sum is divided by ``max(sum of weights, minimum)``.

    Raises:
        ValueError: not one weight per loss, no losses, a loss that is not a scalar, or a weight that is negative, not finite or
            not a scalar.

    Example:
        >>> weighted_mean([torch.tensor(1.0), torch.tensor(4.0)], [2, 1])
        tensor(2.)
    """
    if len(losses) != len(weights) or not losses:
        raise ValueError(
            f"weighted_mean was given {len(losses)} losses and {len(weights)} weights, expected one weight "
            "per loss and at least one"
        )
    values = [check_weight(weight) for weight in weights]
    pairs = zip(losses, values, strict=True)
    sums = [LossSum(weighted_sum(loss, max(weight, minimum)), weight) for loss, weight in pairs]
    return divide_once(sums, device or losses[0].device, minimum)


def check_weight(weight: Any) -> float:
    """``weight`` as a number. Reading it from a device waits for that device.

    Raises:
        TypeError, ValueError: another object; a weight that is negative, not finite or has several elements.
    """
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(f"a weight has shape {tuple(weight.shape)}, expected a scalar: what the mean divides by")
    elif isinstance(weight, bool) or not isinstance(weight, numbers.Real):
        raise TypeError(f"a weight is an object of type {type(weight).__name__}, expected a number or a tensor with one element")
    value = float(weight)
    if not 0 <= value < math.inf:
        raise ValueError(f"a weight is {value}, expected what the mean divides by: finite, and not negative")
    return value


def read_weights(weights: Any) -> Any:
    """A weight as a number, or the weights in a sequence, mapping or dataclass as a list or dict of numbers."""
    if dataclasses.is_dataclass(weights) and not isinstance(weights, type):
        weights = {field.name: getattr(weights, field.name) for field in dataclasses.fields(weights)}
    return map_weights(check_weight, weights)


def map_weights(function: Callable[[Any], Any], weights: Any) -> Any:
    """``function(weight)`` for each weight, in lists and dicts like theirs."""
    if isinstance(weights, Mapping):
        return {name: map_weights(function, weight) for name, weight in weights.items()}
    if isinstance(weights, (list, tuple)):
        return [map_weights(function, weight) for weight in weights]
    return function(weights)


def flat_weights(weights: Any) -> list[float]:
    """The numbers that :func:`read_weights` returns, in their order."""
    found: list[float] = []
    map_weights(found.append, weights)
    return found


def weighted_sum(mean: Tensor, weight: Weight) -> Tensor:
    """``mean x weight`` in at least float32; zero where the weight is zero, whatever the mean is."""
    if isinstance(mean, float | int):
        mean = torch.tensor(float(mean))  # a term that is a constant here
    if not isinstance(mean, Tensor):
        raise TypeError(f"the criterion returned an object of type {type(mean).__name__}, expected a tensor with one element")
    if mean.numel() != 1:
        raise ValueError(
            f"the loss has shape {tuple(mean.shape)}, expected a scalar: use reduction='mean' or 'sum', or give "
            "DataParallelCriterion reduction='none' for the replicas' losses as they are"
        )
    mean = widen(mean.reshape(()))
    if not weight:
        return zero_of(mean)
    return mean * (weight.to(mean.device) if isinstance(weight, Tensor) else weight)


def widen(tensor: Tensor) -> Tensor:
    """Half precision as float32: a sum of losses or a count would soon be past what it can hold."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def divide_once(sums: Sequence[LossSum], device: torch.device, minimum: float = 0.0) -> Tensor:
    """Returns the sum of all totals over the sum of all weights, over all ranks. Sums without a weight are not divided.

    The result is nan, with gradients of zero, if the weights sum to zero, as torch's own losses are for a batch without targets.

    Args:
        sums: one for each replica, all with a weight or all without one.
        device: of the result.
        minimum: of the divisor.
    """
    total = add_up([one.total for one in sums], device)
    weights = [one.weight for one in sums if one.weight is not None]
    divisor = add_up(weights, device) if weights else torch.ones((), device=device)
    if world_size() == 1:
        return _divide(total, divisor.clamp(min=minimum) if minimum else divisor)
    whole = sum_over_ranks(torch.stack([total.double(), divisor.double()]))
    whole_divisor = whole[1].clamp(min=minimum) if weights else torch.ones_like(whole[1])
    mine = _divide(total * world_size(), whole_divisor.to(total.dtype))
    value: Tensor = _Replaced.apply(mine, _divide(whole[0], whole_divisor).to(total.dtype))
    return value


def add_up(scalars: Sequence[Weight], device: torch.device) -> Tensor:
    """The sum of scalars that may lie on different devices, in their order. Only scalars move."""
    return functools.reduce(torch.add, [_as_scalar(scalar, device) for scalar in scalars])


def _as_scalar(value: Weight, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=None if isinstance(value, int) else torch.float64, device=device)
    value = widen(value)
    value = value.reshape(()) if value.dim() else value
    return value if value.device == device else value.to(device)


def zero_of(*tensors: Tensor) -> Tensor:
    """A zero with a graph to ``tensors`` whose backward hands them no gradient at all. A gradient of zero could become nan
    in a loss that is 0 / 0; and without a graph there would be no backward, for which reducers of other ranks wait."""
    zero: Tensor = _Zero.apply(*tensors)
    return zero


class _Zero(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.count = len(tensors)
        return widen(tensors[0].new_zeros(()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        count: int = ctx.count
        return (None,) * count


def _divide(total: Tensor, divisor: Tensor) -> Tensor:
    counted = divisor != 0
    return torch.where(counted, total / torch.where(counted, divisor, 1), torch.nan).to(total.dtype)


class _Replaced(torch.autograd.Function):
    """The value of the whole, with the gradient of this rank's part."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, whole: Tensor) -> Tensor:
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
