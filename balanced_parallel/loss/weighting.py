"""Exact means over several replicas: sums and weights are added up, and divided once.

The mean of the replicas' means is the mean of the batch only if every replica has the same weight. Uneven shards, ignored labels
and class weights give different weights, and a replica without a counted label makes the mean of means nan.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch.nested import Leaf
from ..runtime.argument_checks import check_type
from ..runtime.collectives import sum_over_ranks, world_size
from ..runtime.devices import DeviceLike, resolve_device
from .weights import check_minimum, check_weights

__all__: list[str] = []

Weight = Tensor | float


@dataclasses.dataclass(frozen=True, eq=False)
class LossSum(Leaf):
    """A sum of losses, and the weight to divide it by.

    Args:
        total: a scalar.
        weight: number of elements or rows, or the sum of class weights. ``None`` if the criterion is a sum and is not divided.
    """

    total: Tensor
    weight: Weight | None


def weighted_mean(
    losses: Sequence[Tensor],
    weights: Sequence[Weight],
    device: DeviceLike | None = None,
    *,
    minimum: float = 0.0,
) -> Tensor:
    """Returns the exact mean of means: the sum of ``weight x loss``, divided by the sum of the weights.

    For a model that computes its own loss, this is ``weighted_mean([o.loss for o in outputs], weights)``. A loss with weight zero
    is ignored, even if it is nan. So the host waits, once, for weights that are on devices. The result is nan if all weights are
    zero. If a process group with several ranks is running, the mean is over all ranks, and each of them must call this function.
    Gradients are then correct after they are averaged over ranks, as DistributedDataParallel does.

    Args:
        losses: one scalar per replica, each on its own device.
        weights: the divisor of each loss: scalars, on any device.
        device: device of the result; ``None`` is the device of the first loss.
        minimum: lower bound of the divisor, for losses that divide by ``max(count, minimum)``, such as those of detectors. Each
            loss is multiplied by ``max(weight, minimum)``, and the sum is divided by ``max(sum of weights, minimum)``.

    Raises:
        TypeError: losses or weights are not lists.
        ValueError: there are no losses, or not one weight per loss; a loss is not a scalar; or a weight is negative, not finite
            or not a scalar.

    Example:
        >>> weighted_mean([torch.tensor(1.0), torch.tensor(4.0)], [2, 1])
        tensor(2.)
    """
    for name, value in (("losses", losses), ("weights", weights)):
        is_scalar = isinstance(value, Tensor) and value.dim() == 0
        check_type(name, value, () if is_scalar else (Sequence, Tensor), "a list with one entry per replica")
    check_minimum(minimum)
    if len(losses) != len(weights) or not len(losses):
        raise ValueError(
            f"weighted_mean was given {len(losses)} losses and {len(weights)} weights, expected one weight "
            "per loss and at least one"
        )
    values = check_weights(weights)
    pairs = zip(losses, values, strict=True)
    sums = [LossSum(weighted_sum(loss, max(weight, minimum)), weight) for loss, weight in pairs]
    return divide_once(sums, losses[0].device if device is None else resolve_device(device), minimum)


def weighted_sum(mean: Tensor, weight: float) -> Tensor:
    """Returns ``mean x weight`` in at least float32, or zero if the weight is zero, even if the mean is nan."""
    if isinstance(mean, float | int):
        mean = torch.tensor(float(mean))  # a loss that is a constant on this replica
    mean = check_loss(mean)
    return mean * weight if weight else zero_of(mean)


def check_loss(loss: Any) -> Tensor:
    """Returns a loss as a scalar in at least float32.

    Raises:
        TypeError: it is not a tensor, or is complex. Without this check, a complex loss would be trained on by its real part.
        ValueError: it has several elements.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"the criterion returned an object of type {type(loss).__name__}, expected a tensor with one element")
    if loss.is_complex():
        name = str(loss.dtype).removeprefix("torch.")
        raise TypeError(f"the loss is complex ({name}), expected a real scalar: return its absolute value or its real part")
    if loss.numel() != 1:
        raise ValueError(
            f"the loss has shape {tuple(loss.shape)}, expected a scalar: use reduction='mean' or 'sum', or give "
            "DataParallelCriterion reduction='none' for the replicas' losses as they are"
        )
    return widen(loss.reshape(()) if loss.dim() else loss)


def widen(tensor: Tensor) -> Tensor:
    """Converts half precision to float32, because sums of losses and counts would soon overflow."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def divide_once(sums: Sequence[LossSum], device: torch.device, minimum: float = 0.0) -> Tensor:
    """Returns the sum of all totals over the sum of all weights, over all ranks. Sums without a weight are not divided.

    The result is nan, with gradients of zero, if the weights sum to zero, as torch's own losses are for a batch without targets.

    Args:
        sums: one for each replica, all with a weight or all without one.
        device: device of the result.
        minimum: lower bound of the divisor.
    """
    total = add_up([one.total for one in sums], device)
    weights = [one.weight for one in sums if one.weight is not None]
    divisor = add_up(weights, device) if weights else torch.ones((), device=device)
    if world_size() == 1:
        return _divide(total, divisor.clamp(min=minimum) if minimum else divisor)
    whole = sum_over_ranks(torch.stack([total.double(), divisor.double()]))
    whole_divisor = whole[1].clamp(min=minimum) if weights else torch.ones_like(whole[1])
    local = _divide(total * world_size(), whole_divisor.to(total.dtype))
    return replace_value(local, _divide(whole[0], whole_divisor).to(total.dtype))


def replace_value(local: Tensor, whole: Tensor) -> Tensor:
    """Returns ``whole`` in the forward, and passes the gradient to ``local`` in the backward."""
    value: Tensor = _Replaced.apply(local, whole)
    return value


def add_up(scalars: Sequence[Weight], device: torch.device) -> Tensor:
    """Returns the sum of scalars that may be on different devices, in their order. Only scalars are moved."""
    return functools.reduce(torch.add, [_as_scalar(scalar, device) for scalar in scalars])


def _as_scalar(value: Weight, device: torch.device) -> Tensor:
    if isinstance(value, Tensor) and value.is_cpu and device.type != "cpu" and not value.requires_grad:
        value = value.item()  # a fill of a new tensor does not wait for the device, as a copy from the host would
    if not isinstance(value, Tensor):
        return torch.full((), value, dtype=torch.int64 if isinstance(value, int) else torch.float64, device=device)
    value = widen(value)
    value = value.reshape(()) if value.dim() else value
    return value if value.device == device else value.to(device)


def zero_of(*tensors: Tensor) -> Tensor:
    """Returns a zero that is real and connected to ``tensors``. Its backward gives them no gradient.

    A gradient of zero could become nan in a loss that is 0 / 0. Without a graph there would be no backward, which the reducers
    of other ranks wait for.
    """
    zero: Tensor = _Zero.apply(*tensors)
    return zero


class _Zero(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.count = len(tensors)
        return widen(tensors[0].new_zeros((), dtype=tensors[0].dtype.to_real()))  # a backward begins at a real number

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        count: int = ctx.count
        return (None,) * count


def _divide(total: Tensor, divisor: Tensor) -> Tensor:
    counted = divisor != 0
    return torch.where(counted, total / torch.where(counted, divisor, 1), torch.nan).to(total.dtype)


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, whole: Tensor) -> Tensor:
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
