"""What an operator gives whose result depends on values, where there are none: the worst case, or an error that names it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []

_aten = torch.ops.aten
_SCALARS = {_aten._local_scalar_dense.default, _aten.is_nonzero.default}
HINT = "give memory.estimate a module that does without it (a size as a plain number, a mask that multiplies)"
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "_cudnn_rnn", "mkldnn_rnn_layer", "_thnn_fused_lstm_cell")


class UnknownMemory(ValueError):
    """The memory of an operator cannot be told without values."""


def answer(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], scalar: int | float | bool | None, user_line: Callable[[], str]
) -> tuple[bool, Any]:
    """Whether there is a rule for this call, and its result.

    Selections (boolean masks, ``nonzero``, ``unique``) select everything: no batch needs more. Scalars that an optimizer or
    this package reads are one; those that the model reads are ``scalar``, if it was stated.

    Raises:
        UnknownMemory: the model reads a value, on which sizes may depend; or a recurrent layer, of whose workspace nothing
            is known.
    """
    if func in _SCALARS:
        line = user_line()
        if line and scalar is None:
            raise UnknownMemory(
                f"{line} reads a value of a tensor ({func}), on which sizes may depend: state the largest that it can be with "
                f"scalar=, or {HINT}"
            )
        asked = True if func is _aten.is_nonzero.default or args[0].dtype == torch.bool else _one(args[0])
        return True, type(asked)(scalar) if line and scalar is not None else asked
    name = func._schema.name.removeprefix("aten::")
    if name in _RECURRENT:
        raise UnknownMemory(
            f"{func} keeps a workspace that is not known without running it, so a recurrent layer cannot be estimated: measure "
            "one step of it, and give memory.estimate the module without it"
        )
    rule = _RULES.get(func)
    return (False, None) if rule is None else rule(func, args, kwargs)


def selected(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes of the indices that an operator makes of boolean masks for itself, if every element is selected."""
    indices = args[1] if func in _INDEXES else ()
    masks = [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return sum(2 * 8 * mask.numel() * mask.dim() for mask in masks)  # once as nonzero gives them, once each for itself


def _one(tensor: Tensor) -> int | float:
    return 1.0 if tensor.is_floating_point() else 1


def _nonzero(func: Any, args: Any, kwargs: Any) -> tuple[bool, Tensor]:
    (mask,) = args
    return True, mask.new_empty((mask.numel(), mask.dim()), dtype=torch.int64)


def _masked_select(func: Any, args: Any, kwargs: Any) -> tuple[bool, Tensor]:
    tensor, mask = args
    return True, tensor.new_empty(torch.broadcast_shapes(tensor.shape, mask.shape).numel())


def _index(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    tensor, indices = args[0], args[1]
    if not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        return False, None
    expanded: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            expanded += [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.dim())]
        else:
            expanded.append(index)
    return True, func(tensor, expanded, *args[2:], **kwargs)


def _unique(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    tensor = args[0]
    flat = tensor.new_empty(tensor.numel())
    index, counts = (tensor.new_empty(shape, dtype=torch.int64) for shape in (tensor.shape, (tensor.numel(),)))
    return True, (flat, index, counts)


_INDEXES = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index.Tensor,
}
_RULES: dict[Any, Callable[[Any, Any, Any], tuple[bool, Any]]] = {
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten.index.Tensor: _index,
    _aten._unique2.default: _unique,
}
