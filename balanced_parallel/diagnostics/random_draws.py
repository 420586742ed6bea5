"""Random numbers: the plain program runs twice, with two seeds, and is compared with itself."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import nested
from ..loss.partial_sums import Criterion
from ..runtime.tensors import is_differentiable
from .loss_parts import copy_of, scalar_of
from .module_recording import Program, relative_error
from .output_difference import first_difference

__all__: list[str] = []


def random_place(module: nn.Module, inputs: Any, device: torch.device, limit: float) -> str | None:
    """Returns the place in ``module`` that draws random numbers, or None if two seeds give the same output."""
    first, second = Program(module), Program(module)
    outputs = first.forward(inputs, device, 0), second.forward(inputs, device, 1)
    difference = first_difference(first, second, 0, limit)
    if difference is not None:
        return difference.place
    return f"the model ({type(module).__name__})" if output_error(*outputs) > limit else None


def output_error(expected: Any, found: Any) -> float:
    """Returns the largest relative error over the floating-point tensors of two outputs that have the same shape."""
    pairs = zip(nested.leaves(expected), nested.leaves(found), strict=False)
    return max((relative_error(right, left) for (_, left), (_, right) in pairs if _is_comparable(left, right)), default=0.0)


def _is_comparable(left: Any, right: Any) -> bool:
    tensors = isinstance(left, Tensor) and isinstance(right, Tensor)
    return tensors and left.shape == right.shape and is_differentiable(left)


def loss_draws(criterion: Criterion, output: Any, targets: Any, limit: float) -> Iterator[str]:
    """Yields a reason if the loss of the same output differs between two seeds."""
    losses = []
    for seed in range(2):
        torch.manual_seed(seed)
        losses.append(scalar_of(copy_of(criterion)(*nested.spread(output), *targets)))
    if relative_error(losses[1], losses[0]) > limit:
        yield "random numbers: the loss draws them, because the same output gives another loss: compare without them"
