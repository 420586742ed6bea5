"""Operators whose outputs selective checkpointing keeps: matrix multiplications, convolutions and attention."""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

__all__: list[str] = []

_aten = torch.ops.aten
_MULTIPLICATIONS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.linear.default,
    _aten.convolution.default,
}
# Position of the probability of dropout. Attention that draws random numbers has to run again, to draw them again.
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default: 3,  # torch has no public names of these kernels
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 3,  # as above
    _aten._scaled_dot_product_efficient_attention.default: 5,  # as above
    _aten._scaled_dot_product_cudnn_attention.default: 5,  # as above
}


def is_expensive(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True for an operator whose outputs are kept."""
    if operator in _ATTENTION:
        place = _ATTENTION[operator]
        return not (args[place] if len(args) > place else kwargs.get("dropout_p", 0.0))
    return operator in _MULTIPLICATIONS


def keep_expensive(_context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Policy of torch's selective checkpointing."""
    return CheckpointPolicy.MUST_SAVE if is_expensive(operator, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE
