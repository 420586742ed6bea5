"""Sums of losses and their weights, added over replicas and ranks, and divided once.

The mean of the replicas' means is the mean of the batch only if every replica has the same weight.
Uneven shards, ignored labels and class weights give different weights. So each part of a loss is a
sum and a weight.
"""

import dataclasses
import functools
import itertools
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batch import containers
from ..batch.containers import Leaf
from ..runtime.collectives import explain_unwatched, mark_loss, sum_over_ranks, world_size
from ..runtime.devices import DeviceLike, move, resolve_device, widest_float
from ..runtime.values import check_number, check_type, naming_arguments

Weight = Tensor | float
MINIMUM = "the smallest divisor of the mean: finite, and not negative"  # Part of an error.


@dataclasses.dataclass(frozen=True, eq=False)
class LossSum(Leaf):
    """A sum of losses, a scalar, and the weight to divide it by: ``None`` if the criterion is a
    sum, and is not divided.
    """

    total: Tensor
    weight: Weight | None
    terms: dict[Any, Tensor] | None = None  # the totals of the means that were found in the loss
    bound: "Bound | None" = None  # The bound of the divisor of one of several losses.
    # Values beside the loss, by their place, as in ``LoggedMeans``.
    logged: Mapping[str, Any] | None = None


class Bound(NamedTuple):
    """The smallest divisor of a mean."""

    minimum: float
    is_of_counts: bool = False  # a divisor that is not a whole number is not bounded

    def of(self, divisor: Tensor) -> Tensor:
        """Returns a divisor that is not smaller."""
        bounded = divisor.clamp(min=self.minimum) if self.minimum else divisor
        return torch.where(divisor % 1 == 0, bounded, divisor) if self.is_of_counts else bounded


@naming_arguments
def weighted_mean(
    losses: Sequence[Tensor],
    weights: Sequence[Weight],
    device: DeviceLike | None = None,
    *,
    minimum: float = 0.0,
) -> Tensor:
    """Returns the exact mean of means: the sum of ``weight x loss``, divided by the sum of the
    weights.

    For a model that computes its own loss, this is ``weighted_mean([o.loss for o in outputs],
    weights)``. A loss with weight zero is ignored, even if it is nan, so the host waits once for
    weights that are on devices. The result is nan if all weights are zero. In a process group, the
    mean is over all ranks, and each must call this function. Gradients are then correct after they
    are averaged over ranks, as DistributedDataParallel does.

    Args:
        losses: one scalar per replica, each on its own device.
        weights: the divisor of each loss: scalars, on any device.
        device: device of the result; ``None`` is the device of the first loss.
        minimum: lower bound of the divisor, for losses that divide by ``max(count, minimum)``, such
            as those of detectors.

    Raises:
        TypeError: losses or weights are not lists.
        ValueError: there is not one weight per loss; a loss is not a scalar; a weight is negative,
            not finite or not a scalar.

    Example:
        >>> weighted_mean([torch.tensor(1.0), torch.tensor(4.0)], [2, 1])
        tensor(2.)
    """
    for name, value in (("losses", losses), ("weights", weights)):
        is_scalar = isinstance(value, Tensor) and value.dim() == 0
        check_type(
            name,
            value,
            () if is_scalar else (Sequence, Tensor),
            "a list with one entry per replica",
        )
    check_number("minimum", minimum, MINIMUM, at_least=0)
    if len(losses) != len(weights) or not len(losses):
        raise ValueError(
            f"weighted_mean was given {len(losses)} losses and {len(weights)} weights, expected one for each loss"
        )
    if world_size() > 1 and (reason := explain_unwatched(losses)):
        raise ValueError(reason)
    pairs = zip(losses, check_weights(weights), strict=True)
    sums = [LossSum(weighted_sum(loss, max(weight, minimum)), weight) for loss, weight in pairs]
    home = losses[0].device if device is None else resolve_device(device)
    return mark_loss(divide_once(sums, home, minimum))


def weighted_sum(mean: Tensor, weight: float) -> Tensor:
    """Returns ``mean x weight`` in at least float32, or zero if the weight is zero, even if the
    mean is nan.
    """
    if isinstance(mean, float | int):
        mean = torch.tensor(float(mean))  # a loss that is a constant on this replica
    mean = check_loss(mean)
    return mean * weight if weight else zero_of(mean)


def check_loss(loss: Any) -> Tensor:
    """Returns a loss as a scalar in at least float32.

    A complex one would be trained on by its real part: it is an error.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"the criterion returned an object of type {type(loss).__name__}, expected a tensor with one element"
        )
    if loss.is_complex():
        name = str(loss.dtype).removeprefix("torch.")
        raise TypeError(
            f"the loss is complex ({name}), expected a real scalar: return its absolute value or its real part"
        )
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
    """Returns the sum of all totals over the sum of all weights, over all ranks.

    Sums without a weight are not divided.

    The result is nan, with gradients of zero, if the weights sum to zero, as torch's own losses
    are.
    """
    total = add_up([part.total for part in sums], device)
    weights = [part.weight for part in sums if part.weight is not None]
    divisor = add_up(weights or [1 / world_size()], device)
    bound = sums[0].bound or Bound(minimum)
    if world_size() == 1:
        return divide(total, bound.of(divisor))
    whole, divisor = sum_over_ranks(torch.stack([total.double(), divisor.double()]))
    divisor = bound.of(divisor)
    local = divide(total * world_size(), divisor.to(total.dtype))
    loss = divide(whole, divisor).to(total.dtype)
    # whose gradient is that of this rank's part
    return hand_back(loss, [torch.ones_like(local)], [local])


def add_up(scalars: Sequence[Weight], device: torch.device) -> Tensor:
    """Returns the sum of scalars that may be on different devices, in their order.

    Only scalars are moved.
    """
    return functools.reduce(torch.add, [_as_scalar(scalar, device) for scalar in scalars])


def add_numbers(numbers: Sequence[float]) -> float:
    """Returns the sum of numbers, rounded once: it is the same in any order."""
    if not all(map(math.isfinite, numbers)):
        return sum(numbers)  # ``fsum`` refuses infinite ones
    return math.fsum(numbers)


def add_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the sum of tensors in float64 on the host, each element rounded once."""
    columns = zip(*(each.double().flatten().tolist() for each in tensors), strict=True)
    total = torch.tensor([*map(add_numbers, columns)], dtype=torch.float64)
    return total.reshape(tensors[0].shape)


def _as_scalar(value: Weight, device: torch.device) -> Tensor:
    if (
        isinstance(value, Tensor)
        and value.is_cpu
        and device.type != "cpu"
        and not value.requires_grad
    ):
        # a fill of a new tensor does not wait for the device, as a copy from the host would
        value = value.item()
    if not isinstance(value, Tensor):
        return torch.full(
            (),
            value,
            dtype=torch.int64 if isinstance(value, int) else widest_float(device),
            device=device,
        )
    value = widen(value)
    value = value.reshape(()) if value.dim() else value
    return value if value.device == device else value.to(device)


def zero_of(*tensors: Tensor) -> Tensor:
    """Returns a zero that is real and connected to ``tensors``: reducers of other ranks wait for a
    backward.

    The backward gives no gradient. One of zero could become nan in a loss that is 0 / 0. Tensors
    without elements get one, which can be differentiated.
    """
    derivatives = [None if tensor.numel() else tensor.detach() for tensor in tensors]
    return hand_back(None, derivatives, tensors)


def hand_back(
    value: Tensor | None, derivatives: Sequence[Tensor | None], tensors: Sequence[Tensor]
) -> Tensor:
    """Returns ``value``, or zero.

    Its backward gives each tensor its derivative, times the gradient of the value.
    """
    result: Tensor = _HandBack.apply(value, derivatives, *tensors)
    return result


class _HandBack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor | None, derivatives: Sequence[Tensor | None], *tensors: Tensor
    ) -> Tensor:
        ctx.derivatives = derivatives
        if value is None:  # a backward begins at a real number
            return widen(tensors[0].new_zeros((), dtype=tensors[0].dtype.to_real()))
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        results = [
            None if slope is None else slope * move(gradients[0], slope.device).to(slope.dtype)
            for slope in ctx.derivatives
        ]
        return None, None, *results


def divide(total: Tensor, divisor: Tensor) -> Tensor:
    """Returns the quotient, or nan with gradients of zero if the divisor is zero."""
    counted = divisor != 0
    return torch.where(counted, total / torch.where(counted, divisor, 1), torch.nan).to(total.dtype)


def check_weights(weights: Sequence[Any]) -> list[float]:
    """Returns ``weights`` as numbers, after a check of each.

    The host waits once for all that are on devices.
    """
    for weight in weights:
        _check_weight(weight)
    apart = [
        weight.detach() for weight in weights if isinstance(weight, Tensor) and not weight.is_cpu
    ]
    scalars = [
        move(weight.reshape(()).to(widest_float(weight.device)), apart[0].device)
        for weight in apart
    ]
    read = iter(torch.stack(scalars).tolist() if scalars else ())
    values = [
        float(next(read) if isinstance(weight, Tensor) and not weight.is_cpu else weight)
        for weight in weights
    ]
    for value in values:
        if not 0 <= value < math.inf:
            raise ValueError(
                f"a weight is {value}, expected the divisor of the mean: finite, and not negative"
            )
    return values


def _check_weight(weight: object) -> None:
    if isinstance(weight, bool) or not isinstance(weight, (numbers.Real, Tensor)):
        raise TypeError(
            f"a weight is an object of type {type(weight).__name__}, expected a number or a scalar tensor"
        )
    if isinstance(weight, Tensor) and weight.numel() != 1:
        raise ValueError(
            f"a weight has shape {tuple(weight.shape)}, expected a scalar: the divisor of the mean"
        )


def map_weights(function: Callable[[Any], object], weights: Any) -> Any:
    """Applies ``function`` to each weight.

    Sequences become lists, and mappings and dataclasses dicts.
    """
    if isinstance(weights, (list, tuple)):
        return [map_weights(function, weight) for weight in weights]
    container = containers.open_container(weights)
    if container is None:
        return function(weights)
    entries = zip(containers.entry_names(container), container.children, strict=True)
    return {name: map_weights(function, weight) for name, weight in entries}


def flat_weights(weights: object) -> list[float]:
    """Returns a weight, or the weights in a structure, as one list of numbers."""
    leaves: list[Any] = []
    map_weights(leaves.append, weights)
    return check_weights(leaves)


def bounds_of(minimum: Any, weights: Any) -> Iterator[Bound]:
    """Returns the bound of each weight in a structure.

    A number bounds a single divisor, or the counts among several.
    """
    if not is_structure(minimum):
        return itertools.repeat(Bound(minimum, is_structure(weights)))
    forms = [str(map_weights(lambda _: 0, structure)) for structure in (minimum, weights)]
    if forms[0] != forms[1]:
        raise ValueError(
            f"minimum={minimum!r}, expected one number, or one for each weight in the structure and order of weight="
        )
    return map(Bound, flat_weights(minimum))


def is_structure(value: object) -> bool:
    """Returns True for a divisor of each of several means."""
    return isinstance(value, (Mapping, list, tuple))


def merge(parts: Sequence[object], together: Callable[[list[LossSum]], Any]) -> Any:
    """Returns ``together(sums)`` of all replicas for each loss that the criterion returns, in the
    same structure.
    """
    form = next((part for part in parts if not isinstance(part, LossSum)), None)

    def fill(part: object) -> Any:  # a replica without rows has one sum for all losses
        return containers.map_leaves(lambda _: part, form) if isinstance(part, LossSum) else part

    return containers.zip_leaves(
        lambda place, sums: None if None in sums else together(sums),
        [*map(fill, parts)],
        "the loss",
    )


def run_backward(losses: Sequence[Tensor], divisor: Weight) -> None:
    """Runs one backward from all losses that require a gradient, divided by ``divisor``."""
    roots = [loss for loss in losses if loss.requires_grad]
    if not roots:
        raise RuntimeError(
            "the loss depends on no parameter with requires_grad=True, so there is nothing to train: expected a step outside of "
            "torch.no_grad() and inference_mode(), a model that is not frozen, and a criterion that does not detach its result"
        )
    factor = 1 / divisor
    gradients = [
        move(factor, loss.device).to(loss.dtype)
        if isinstance(factor, Tensor)
        else torch.full_like(loss, factor)
        for loss in roots
    ]
    torch.autograd.backward(roots, gradients)


def power_of_two(number: Weight) -> Weight:
    """Returns the power of two nearest to a number, on a logarithmic scale; 1 for 0, negative and
    infinite ones.
    """
    if not isinstance(number, Tensor):
        return 2.0 ** round(math.log2(number)) if 0 < number < math.inf else 1.0
    number = number.float()
    mantissa, _ = torch.frexp(number)  # number = mantissa * 2**exponent, and 0.5 <= mantissa < 1
    power = number / torch.where(mantissa < math.sqrt(0.5), 2 * mantissa, mantissa)
    return torch.where((number > 0) & (number < math.inf), power, 1.0)
