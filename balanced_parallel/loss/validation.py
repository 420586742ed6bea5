"""Errors for the settings of a criterion, and for what they do not fit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import containers
from ..runtime.torch_private import is_compiled, is_compiled_function
from ..runtime.values import check_number
from .additive import AdditiveLoss
from .copies import ShardLoss
from .rules import find_torch_loss, reduction_of
from .sums import MINIMUM, is_structure, map_weights

SEVERAL = "; several losses are one module that returns a mapping of them, with a weight= that has a function for each divisor"


def check_settings(
    criterion: Any, weight: Any, reduction: str | None, minimum: object, *, whole: bool
) -> None:
    """Raises ``TypeError`` or ``ValueError`` for settings of a criterion that are invalid, or
    contradict the reduction of a loss of torch.
    """
    if isinstance(criterion, type) or not callable(criterion):
        more = SEVERAL if isinstance(criterion, (list, tuple, dict)) else ""
        raise TypeError(
            f"the criterion is {containers.describe(criterion)}, expected a module or a function{more}"
        )
    _check_divisor(weight, minimum)
    _check_reduction(criterion, reduction)
    name = (
        "whole=True"
        if whole
        else "an AdditiveLoss"
        if isinstance(criterion, AdditiveLoss)
        else None
    )
    if name is not None:
        _refuse_divisor(
            name, {"weight": weight, "reduction": reduction, "minimum": minimum or None}
        )
    if not isinstance(whole, bool):
        raise ValueError(f"whole={whole!r}, expected True or False")
    is_described = weight is not None or reduction in ("sum", "none") or whole
    if not is_described and (
        is_compiled if isinstance(criterion, nn.Module) else is_compiled_function
    )(criterion):
        raise TypeError(
            f"the criterion is compiled ({containers.describe(criterion)}), and the terms and the divisor of a compiled loss "
            "are unknown: pass it without torch.compile (the model may be compiled), or give weight=, a function (output, "
            "*targets) -> scalar that returns the divisor of its mean, or reduction='sum'"
        )


def _refuse_divisor(name: str, settings: dict[str, Any]) -> None:
    for setting, value in settings.items():
        if value is not None:
            raise ValueError(
                f"{setting}={value!r} was given with {name}, expected neither weight, reduction nor minimum: the loss "
                "is computed once for all rows, so there is nothing to divide"
            )


def _check_divisor(weight: Any, minimum: Any) -> None:
    functions = (
        [weight]
        if not is_structure(weight)
        else weight.values()
        if isinstance(weight, Mapping)
        else weight
    )
    if weight not in (None, "rows") and not (functions and all(map(callable, functions))):
        raise ValueError(
            f"weight={weight!r}, expected a function (output, *targets) -> scalar, or 'rows', or for several means a mapping or "
            "a list with a function (*targets) -> scalar for each"
        )
    map_weights(lambda number: check_number("minimum", number, MINIMUM, at_least=0), minimum)
    if is_structure(minimum) and weight in (None, "rows"):
        raise ValueError(
            f"minimum={minimum!r} was given with weight={weight!r}, expected a weight= that has a divisor for each"
        )


def _check_reduction(criterion: object, reduction: str | None) -> None:
    if reduction not in (None, "sum", "mean", "none"):
        raise ValueError(f"reduction={reduction!r}, expected 'sum', 'mean' or 'none'")
    if (
        reduction is not None
        and find_torch_loss(criterion) is not None
        and reduction_of(criterion) != reduction
    ):
        raise ValueError(
            f"reduction={reduction!r} was given for a loss with reduction={reduction_of(criterion)!r}: set it in its constructor"
        )


def add_uncounted(nothing: Tensor, shard: ShardLoss) -> Tensor:
    """Adds the loss of a shard whose weight is zero to ``nothing``, if it is infinite: a sum that is
    not zero. On the CPU it is an error; the host does not wait for other devices.
    """
    try:
        with torch.no_grad():
            means = containers.tensors_in(shard.call())
    except Exception:  # noqa: BLE001 - it may need something that is counted
        return nothing
    for mean in means:
        if not mean.is_cpu:
            nothing = nothing + torch.where(mean.isinf(), mean, 0.0).sum().to(nothing)
        elif mean.isinf().any():
            raise ValueError(
                "the loss of a shard is infinite, and its weight= is 0, so that its sum is unknown, expected a weight that "
                "counts all terms of the sum: leave weight= out, or give minimum= for one that divides by max(count, minimum)"
            )
    return nothing
