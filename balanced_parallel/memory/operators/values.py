"""Operators whose memory depends on values: the worst case, or an error with the operator's name.

The tables of the CTC loss are those of the longest targets that fit. Some losses keep the memory of their elements in a scalar
result, because torch reduces them in place.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..errors import HINT, UnknownMemory

_aten = torch.ops.aten


def _ctc_of_lists(scores: Tensor, targets: Tensor, steps: Sequence[int], lengths: Sequence[int], *settings: Any) -> Tensor:
    """Makes tensors of the lengths in Python. In C++, torch writes them to the memory that fake tensors do not have."""
    loss: Tensor = _aten.ctc_loss.Tensor(scores, targets, torch.tensor(steps), torch.tensor(lengths), *settings)
    return loss


VALUE_KERNELS = {"ctc_loss.IntList": _ctc_of_lists}
# no operator has a public name
_SCALARS = {_aten._local_scalar_dense.default, _aten.is_nonzero.default}


def answer(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], scalar: int | float | bool | None, user_line: Callable[[], str]
) -> Any:
    """Returns the result if there is a rule for this call, else ``NotImplemented``. Selections select every element.

    A value that an optimizer or this package reads is one. If the model reads it, in ``user_line()``, it is ``scalar``.
    """
    if func in _SCALARS:
        line = user_line()
        if line and scalar is None:
            raise UnknownMemory(
                f"{line} reads a value of a tensor ({func}), on which sizes may depend: state the largest that it can be with "
                f"scalar=, or {HINT}"
            )
        number = 0.9 if args[0].is_floating_point() else 1  # NAdam divides by one minus a product of its momenta
        value = True if func is _aten.is_nonzero.default or args[0].dtype == torch.bool else number
        return type(value)(scalar) if line and scalar is not None else value
    if func is _aten._pack_padded_sequence.default:
        raise UnknownMemory(
            f"{func} packs sequences by their lengths, which are values: give memory.estimate the module with padded sequences, "
            "of which packing never needs more"
        )
    if func is _aten.mkldnn_rnn_layer.default:
        raise UnknownMemory(
            "nn.LSTM on the CPU keeps a workspace of oneDNN, whose bytes no fake tensor has: estimate it for a kind of GPU, "
            "such as device_kind='h200'"
        )
    rule = _RULES.get(func)
    return NotImplemented if rule is None else rule(*args, **kwargs)


def selected(func: Any, args: tuple[Any, ...]) -> int:
    """Returns the bytes that an operator takes for itself: indices of boolean masks, and the second table of the CTC loss."""
    if func in _CTC_BACKWARD:
        return int(args[6].nbytes)
    indices = [index for index in args[1] if index is not None] if func in _INDEXES else []
    masks = list(filter(_is_mask, indices))
    if len(indices) == len(masks) == 1 and func in _WRITES and args[2].numel() == 1:
        return 0  # torch fills the mask with this number
    return sum(2 * 8 * mask.numel() * mask.dim() for mask in masks)  # the result of nonzero, and a copy per dimension


def _is_mask(index: Tensor | None) -> TypeGuard[Tensor]:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _integers(tensor: Tensor, *shape: int) -> Tensor:
    return tensor.new_empty(shape, dtype=torch.int64)


def _index(tensor: Tensor, indices: Sequence[Tensor | None]) -> Any:
    if not any(map(_is_mask, indices)):
        return NotImplemented
    expanded: list[Tensor | None] = []
    for index in indices:
        expanded += [_integers(index, index.numel()) for _ in range(index.dim())] if _is_mask(index) else [index]
    return _aten.index.Tensor(tensor, expanded)


def _ctc(scores: Tensor, targets: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    steps, rows, _ = scores.shape
    longest = targets.size(1) if targets.dim() == 2 else targets.numel()  # one row may have all of the concatenated targets
    return scores.new_empty(rows), scores.new_empty((rows, steps, 2 * longest + 1))


def _group_norm_backward(gradient: Tensor, inputs: Tensor, *settings: Any) -> tuple[Tensor | None, ...]:
    """Returns gradients in the dtype of the input. The fake kernel of torch returns float32 for bfloat16."""
    *_, weight, _, channels, _, _, mask = settings
    learned = (inputs if weight is None else weight).new_empty(channels)
    results = (torch.empty_like(inputs), learned, torch.empty_like(learned))
    return tuple(result if asked else None for result, asked in zip(results, mask, strict=True))


def _grouped_products(left: Tensor, right: Tensor, ends: Tensor | None = None, *_: Any) -> Tensor:
    """Returns the products of groups of rows with a matrix each, as of experts. The fake kernel of torch takes bfloat16 alone."""
    groups = ends.numel() if ends is not None else len(left)
    shape = [left.shape[-2], right.shape[-1]]
    return left.new_empty([groups, *shape] if left.dim() == right.dim() else shape)


_CTC_BACKWARD = {_aten._ctc_loss_backward.default, _aten._ctc_loss_backward.Tensor}
_WRITES = {_aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
_INDEXES = {*_WRITES, _aten.index.Tensor, _aten._unsafe_index.Tensor}
_RULES: dict[Any, Callable[..., Any]] = {
    _aten.nonzero.default: lambda mask: _integers(mask, mask.numel(), mask.dim()),
    _aten.masked_select.default: lambda tensor, mask: tensor.new_empty(torch.broadcast_shapes(tensor.shape, mask.shape).numel()),
    _aten.index.Tensor: _index,
    _aten._unique2.default: lambda tensor, *settings: (
        tensor.new_empty(tensor.numel()),
        _integers(tensor, *tensor.shape),
        _integers(tensor, tensor.numel()),
    ),
    _aten._ctc_loss.default: _ctc,
    _aten._ctc_loss.Tensor: _ctc,
    **dict.fromkeys(_CTC_BACKWARD, lambda gradient, scores, *settings: scores.new_empty(scores.shape)),
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten._grouped_mm.default: _grouped_products,
}


# aten/src/ATen/native/{BinaryOps,Loss}.cpp: the elements are written to the result, and it is resized to a scalar
_LOSSES = {_aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.soft_margin_loss.default}


def keep_elements(func: Any, args: tuple[Any, ...], result: Any) -> None:
    """Enlarges the fake storage of such a result to that of its elements."""
    if func in _LOSSES and result.dim() == 0:
        tensors = [argument for argument in args[:2] if isinstance(argument, Tensor)]
        elements = torch.broadcast_shapes(*(tensor.shape for tensor in tensors)).numel()
        result.untyped_storage().resize_(elements * result.dtype.itemsize)
