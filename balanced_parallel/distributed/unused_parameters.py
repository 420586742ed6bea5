"""Connects outputs to all parameters, so that any backward through them reaches each parameter once.

The reducer of ``DistributedDataParallel`` waits for every parameter in every backward. A backward reaches the parameters that
the loss was computed from, which may be fewer: a branch was not taken, an output is not in the loss, a rank has no rows.

    parameters ---> module ---> output --+
        |                                +--> _Connect ---> output
        +---> _Zero ---> zero -----------+

The backward of ``_Connect`` passes the gradient of each output on, and ``None`` to the zero. So an unused parameter gets no
gradient, but its hook runs, and the reducer goes on. ``_Zero`` is the youngest node behind the outputs, so it runs first: buckets
of unused parameters wait for nobody.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch.nested import leaves, map_leaves
from ..loss.weighting import zero_of

__all__: list[str] = []


def connect(output: Any, parameters: Sequence[Tensor]) -> tuple[Any, Tensor]:
    """Returns the output connected to the parameters, and a zero that leads to each of them.

    Args:
        output: a tensor or a structure of tensors. Tensors without a gradient stay as they are.
        parameters: frozen ones among them are left out.
    """
    zero = zero_of_parameters(parameters)
    tensors = [leaf for _, leaf in leaves(output) if _has_gradient(leaf)]
    if not tensors:
        return output, zero
    connected = iter(_Connect.apply(zero, *tensors))
    return map_leaves(lambda leaf: next(connected) if _has_gradient(leaf) else leaf, output), zero


def zero_of_parameters(parameters: Sequence[Tensor]) -> Tensor:
    """Returns a zero that leads to each parameter. Its backward runs their hooks, and gives none a gradient."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    with torch.enable_grad():
        return zero_of(*trained) if trained else torch.zeros(())


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class _Connect(torch.autograd.Function):
    """The identity over several tensors, of which one is not returned."""

    @staticmethod
    def forward(ctx: Any, zero: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)  # not views, which must not be written to in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *gradients
