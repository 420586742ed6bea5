"""Results in the memory of an argument, on every device.

Under a dispatch mode, and so in a trace, torch avoids operators in place (``isTensorSubclassLike`` in ATen). These are
the places where it does without a mode what needs one more tensor under it.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from ...runtime.autograd import current_node
from .registration import aten_kernels

__all__: list[str] = []

_aten = torch.ops.aten
_TORCH = str(Path(torch.__file__).parent)
_MODES = str(Path(__file__).parents[1]), f"{_TORCH}/_compile", f"{_TORCH}/_dynamo"  # torch wraps modes against compilation
IN_PLACE = {
    _aten.add.Tensor,  # sums of the gradients of a tensor: torch/csrc/autograd/input_buffer.cpp
    _aten.scatter.src,  # backwards of max, topk, gather and of indices: torch/csrc/autograd/FunctionsManual.cpp
    _aten.scatter.value,
    _aten.scatter_add.default,
    _aten.index_add.default,
    _aten.index_put.default,
}


def is_in_place(func: Any, *, is_of_node: bool) -> bool:
    """Returns True if autograd calls ``func``, one of ``IN_PLACE``, in place, provided nothing else has its first argument.

    The engine adds gradients, those of earlier nodes or of two edges to one tensor. All else are writes of a node to its own
    zeros. Other calls are not in place: the formula of :func:`torch.var_mean` is a sum, that of ``index_put`` a copy.

    Args:
        is_of_node: the node that runs made the first argument.
    """
    if (node := current_node()) is None or torch.is_grad_enabled() or _caller().co_name != "_engine_run_backward":
        return False
    edges = node.next_functions
    return not is_of_node or len(set(edges)) < len(edges) if func is _aten.add.Tensor else is_of_node


def _caller() -> CodeType:
    """Returns the code that called the running operator: the innermost that does not belong to a dispatch mode."""
    frame: Any = sys._getframe()
    while frame.f_code.co_filename.startswith(_MODES):
        frame = frame.f_back
    code: CodeType = frame.f_code
    return code


@contextlib.contextmanager
def bias_in_place() -> Iterator[None]:
    """Adds the bias of a linear layer in place if its input is not contiguous, as torch does without a mode."""
    with aten_kernels() as library:
        library.impl("linear", _linear, "AutogradCPU")
        yield


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None or input.dim() <= 2 or input.is_contiguous():
        result: Tensor = torch.ops.aten.linear.default.decompose(input, weight, bias)
        return result
    return torch.matmul(input, weight.t()).add_(bias)
