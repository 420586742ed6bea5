"""The effect of rounding errors on a result: every operation is rounded otherwise, as in stochastic
arithmetic (CESTAC, Vignes 1974).

A loss that is almost zero is a difference of large numbers, so its sums for other numbers of rows
differ by more than their own size. What a hundred units in the last place of each operation change
is explained by rounding, if an eighth of that changes less: a choice by value, as of all losses
below the median, changes at once. Rows that depend on each other change far more.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..runtime.torch_private import storage_id

_UNITS = 100
_MOST = 2.0**-8  # half a unit of bfloat16


class Rounding(TorchFunctionMode):
    """Changes the result of each function of torch in its block by a small relative error.

    ``share`` is the part of a hundred units.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch. Results in the memory of an argument stay as they are."""
        result = func(*args, **kwargs or {})
        is_plain = type(result) is Tensor and result.layout == torch.strided
        if not is_plain or not result.is_floating_point():
            return result
        memory = storage_id(result.untyped_storage())
        tensors = [part for part in args if isinstance(part, Tensor)]
        if any(_memory(tensor) == memory for tensor in tensors):
            return result
        size = self._share * min(_UNITS * torch.finfo(result.dtype).eps, _MOST)
        signs = (result.detach() * 1e6).sin().nan_to_num(0.0, 0.0, 0.0)
        return result + result * signs * size


def _memory(tensor: Tensor) -> int | None:
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return storage_id(tensor.untyped_storage()) if is_plain else None
