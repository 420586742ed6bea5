"""Linear layers of bitsandbytes with weights of four bits, whose kernels do not run on fake tensors.

A stand-in has the same tensors, as in ``quantize_4bit`` of ``bitsandbytes/functional.py``::

    weights      two in a byte
    scales       a float32 per block of 64 weights; with double quantization a byte, and a float32
                 per 256 of these
    tables       16 values of a weight, and 256 of a scale with double quantization

Forward and backward make the whole weight for one matrix product, and release it. Nothing of the
input is saved, since the weight is frozen: ``MatMul4Bit`` of ``bitsandbytes/autograd/_functions.py``.
Version 0.41 saved the input too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_SCALES_PER_BLOCK = 256
FOUR_BITS = (
    "assumed: the layers of bitsandbytes 0.50, which do not save their inputs as 0.41 did; published peaks of QLoRA are up to "
    "6 % above predictions"
)


def is_four_bit(layer: nn.Module) -> bool:
    """Returns True for the linear layers of bitsandbytes with four bits."""
    return any(
        base.__name__ == "Linear4bit" and base.__module__.startswith("bitsandbytes")
        for base in type(layer).__mro__
    )


class FourBitLinear(nn.Module):
    """The stand-in of a layer. ``empty`` makes its tensors, as ``torch.empty`` does."""

    def __init__(self, layer: Any, bias: Tensor | None, empty: Callable[..., Tensor]) -> None:
        super().__init__()
        self.shape = layer.out_features, layer.in_features
        count = layer.out_features * layer.in_features
        self.blocks = -(-count // layer.weight.blocksize)
        self.is_nested = layer.weight.compress_statistics
        self.compute_dtype = layer.compute_dtype
        self.bias = bias
        packed = empty((count + 1) // 2, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        tables = 16 + self.blocks
        if self.is_nested:
            tables = 16 + _SCALES_PER_BLOCK + -(-self.blocks // _SCALES_PER_BLOCK)
        self.register_buffer("scales", empty(self.blocks * self.is_nested, dtype=torch.uint8))
        self.register_buffer("tables", empty(tables))

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the product with the weight, in the type of the inputs."""
        result: Tensor = _Product.apply(inputs.to(self.compute_dtype or inputs.dtype), self)
        if self.bias is not None:
            result = result + self.bias.to(result.dtype)
        return result.to(inputs.dtype)

    def whole_weight(self, like: Tensor) -> Tensor:
        """Makes the weight in the type of a tensor, from scales that are released."""
        scales = like.new_empty(self.blocks * self.is_nested, dtype=torch.float32)
        weight = like.new_empty(self.shape)
        del scales
        return weight


class _Product(torch.autograd.Function):
    """A product with a weight that exists during the product only."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: FourBitLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(inputs, layer.whole_weight(inputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad @ ctx.layer.whole_weight(grad), None
