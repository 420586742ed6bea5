"""Losses whose scalar result keeps the memory of its elements, on every device: torch reduces them in place."""

from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []

_aten = torch.ops.aten
# aten/src/ATen/native/{BinaryOps,Loss}.cpp: the elements are written to the result, and it is resized to a scalar
_LOSSES = {_aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.soft_margin_loss.default}


def keep_elements(func: Any, args: tuple[Any, ...], result: Any) -> None:
    """Enlarges the fake storage of such a result to that of its elements."""
    if func in _LOSSES and result.dim() == 0:
        tensors = [argument for argument in args[:2] if isinstance(argument, Tensor)]
        elements = torch.broadcast_shapes(*(tensor.shape for tensor in tensors)).numel()
        result.untyped_storage().resize_(elements * result.dtype.itemsize)
