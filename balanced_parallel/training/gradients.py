"""Tensors that get gradients in a training step, and changes of these gradients."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..loss.weighting import Weight
from ..runtime import multi_tensor
from .divisors import is_one

__all__: list[str] = []


def trained_tensors(model: Any, criterion: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters of both by name, each once, and the buffers that require a gradient."""
    both = nn.ModuleDict({"model": model, "criterion": criterion})
    learning = [(name, buffer) for name, buffer in both.named_buffers() if buffer.requires_grad]
    return {name.replace(".module", "", 1): tensor for name, tensor in (*both.named_parameters(), *learning)}


def scale_gradients(tensors: Iterable[Tensor], factor: Weight) -> None:
    """Multiplies the gradients that exist."""
    gradients = [] if is_one(factor) else [tensor.grad for tensor in tensors if tensor.grad is not None]
    multi_tensor.multiply_(gradients, factor)
