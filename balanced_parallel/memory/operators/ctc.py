"""The CTC loss, whose tables depend on the lengths of the targets: those of the longest that fit."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .registration import aten_kernels

__all__: list[str] = []

_aten = torch.ops.aten


def _ctc(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    scores, targets = args[:2]
    steps, rows, _ = scores.shape
    longest = targets.size(1) if targets.dim() == 2 else targets.numel()  # one row may have all of the concatenated targets
    return True, (scores.new_empty(rows), scores.new_empty((rows, steps, 2 * longest + 1)))


def _ctc_backward(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    return True, torch.empty_like(args[1], memory_format=torch.contiguous_format)


CTC_BACKWARD = {_aten._ctc_loss_backward.default, _aten._ctc_loss_backward.Tensor}  # no operator has a public name
CTC_RULES = {
    _aten._ctc_loss.default: _ctc,  # as above
    _aten._ctc_loss.Tensor: _ctc,  # as above
    **dict.fromkeys(CTC_BACKWARD, _ctc_backward),
}


@contextlib.contextmanager
def lengths_as_tensors() -> Iterator[None]:
    """Makes tensors of lists of lengths in Python. In C++, torch writes them to the memory that fake tensors do not have."""
    with aten_kernels() as library:
        library.impl("ctc_loss.IntList", _ctc_of_lists, "AutogradCPU")
        yield


def _ctc_of_lists(scores: Tensor, targets: Tensor, steps: Sequence[int], lengths: Sequence[int], *settings: Any) -> Tensor:
    loss: Tensor = _aten.ctc_loss.Tensor(scores, targets, torch.tensor(steps), torch.tensor(lengths), *settings)
    return loss
