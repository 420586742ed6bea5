"""Divisors of means as numbers, for one mean or for a structure of several means."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.argument_checks import check_number
from ..runtime.devices import move

__all__: list[str] = []


def check_weight(weight: Any) -> float:
    """Returns ``weight`` as a number. This waits for the device that it is on.

    Raises:
        TypeError: it is neither a number nor a tensor.
        ValueError: it is negative, not finite, or has several elements.
    """
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(f"a weight has shape {tuple(weight.shape)}, expected a scalar: the divisor of the mean")
    elif isinstance(weight, bool) or not isinstance(weight, numbers.Real):
        raise TypeError(f"a weight is an object of type {type(weight).__name__}, expected a number or a tensor with one element")
    value = float(weight)
    if not 0 <= value < math.inf:
        raise ValueError(f"a weight is {value}, expected the divisor of the mean: finite, and not negative")
    return value


def check_minimum(minimum: Any) -> None:
    """Raises ``TypeError`` or ``ValueError`` unless ``minimum`` is finite and not negative."""
    check_number("minimum", minimum, "the smallest divisor of the mean: finite, and not negative", at_least=0)


def check_weights(weights: Sequence[Any]) -> list[float]:
    """Returns ``weights`` as numbers. The host waits once for all that are on devices. Raises as :func:`check_weight` does."""
    numbers = list(weights)
    places = [i for i, one in enumerate(numbers) if isinstance(one, Tensor) and one.numel() == 1 and not one.is_cpu]
    if len(places) > 1 and len({numbers[i].dtype for i in places}) == 1:
        scalars = [move(numbers[i].detach().reshape(()), numbers[places[0]].device) for i in places]
        for i, number in zip(places, torch.stack(scalars).tolist(), strict=True):
            numbers[i] = float(number)
    return [check_weight(number) for number in numbers]


def read_weights(weights: Any) -> Any:
    """Returns a weight as a number, and weights in a sequence, mapping or dataclass as a list or dict of numbers."""
    found: list[Any] = []
    map_weights(found.append, weights)
    numbers = iter(check_weights(found))
    return map_weights(lambda _: next(numbers), weights)


def map_weights(function: Callable[[Any], Any], weights: Any) -> Any:
    """Applies ``function`` to each weight. Sequences become lists, and mappings and dataclasses dicts."""
    if dataclasses.is_dataclass(weights) and not isinstance(weights, type):
        weights = {field.name: getattr(weights, field.name) for field in dataclasses.fields(weights)}
    if isinstance(weights, Mapping):
        return {name: map_weights(function, weight) for name, weight in weights.items()}
    if isinstance(weights, (list, tuple)):
        return [map_weights(function, weight) for weight in weights]
    return function(weights)


def flat_weights(weights: Any) -> list[float]:
    """Returns the numbers in the result of :func:`read_weights` as one list."""
    found: list[float] = []
    map_weights(found.append, weights)
    return found
