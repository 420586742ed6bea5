"""Divisors of gradients that are powers of two, so that a division rounds nothing. Weights may be on a device, unread."""

import math

import torch
from torch import Tensor

from ..loss.weighting import Weight

__all__: list[str] = []


def power_of_two(number: Weight, otherwise: Weight = 1.0) -> Weight:
    """Returns the power of two nearest to a number, on a logarithmic scale; ``otherwise`` for 0, negative and infinite ones."""
    if not isinstance(number, Tensor):
        return 2.0 ** round(math.log2(number)) if 0 < number < math.inf else otherwise
    number = number.float()
    mantissa, _ = torch.frexp(number)  # number = mantissa * 2**exponent, and 0.5 <= mantissa < 1
    power = number / torch.where(mantissa < math.sqrt(0.5), 2 * mantissa, mantissa)
    return torch.where((number > 0) & (number < math.inf), power, otherwise)


def larger(one: Weight, other: Weight) -> Weight:
    """Returns the larger of two numbers."""
    if isinstance(one, Tensor):
        return one.clamp(min=other)
    return other.clamp(min=one) if isinstance(other, Tensor) else max(one, other)


def is_one(factor: Weight) -> bool:
    """Returns True for a number that is 1. A factor on a device is not read."""
    return not isinstance(factor, Tensor) and factor == 1
