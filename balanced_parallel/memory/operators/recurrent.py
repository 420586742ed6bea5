"""Recurrent layers as cuDNN runs them: one operator, with a reserve for its backward.

cuDNN reports its sizes only to a program that runs on a GPU. pytorch#2895 prints them for 4 layers of 320 units and 25,000
steps: 736,000,000 bytes for an LSTM and 864,000,000 for a GRU. These are 5 and 6 values per step, layer and unit, and one
between layers. The workspace is 1.5 times the weights. Both are assumed for every GPU.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import UnknownMemory

KEPT = {"lstm": 5, "gru": 6, "rnn_tanh": 2, "rnn_relu": 2}  # sizes of plain layers are not published: the gate, twice
SOURCE = (
    "assumed: recurrent layers save as much as cuDNN printed in pytorch#2895, 5 (LSTM) or 6 (GRU) values per step, layer and unit"
)


def _refuse(name: str, *_: Any) -> Any:
    raise UnknownMemory(
        f"{name} runs other operators on simulated devices, which are not counted: estimate it for a kind of GPU, such as "
        "device_kind='h200'"
    )


def _padded(name: str, input: Tensor, hx: Any, weights: list[Tensor], *settings: Any) -> tuple[Tensor, ...]:
    _, _, _, train, bidirectional, _ = settings
    hidden = list(hx) if isinstance(hx, (list, tuple)) else [hx]
    if torch.is_autocast_enabled("cpu"):
        half = torch.get_autocast_dtype("cpu")
        input, hidden, weights = input.to(half), [state.to(half) for state in hidden], [weight.to(half) for weight in weights]
    workspace = _workspace(weights)
    out, hy, cy, _ = recurrence(input, hidden, list(weights), KEPT[name] if train else 0, 2 if bidirectional else 1)
    del workspace
    return (out, hy, cy) if len(hidden) == 2 else (out, hy)


def _workspace(weights: list[Tensor]) -> Tensor:
    return weights[0].new_empty(3 * sum(weight.nbytes for weight in weights) // 2, dtype=torch.uint8)


@torch.library.custom_op("balanced_parallel::recurrence", mutates_args=())
def recurrence(
    input: Tensor, hidden: list[Tensor], weights: list[Tensor], values: int, directions: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Recurrent layers of cuDNN: the output, the last states, and the reserve for the backward."""
    raise NotImplementedError


@recurrence.register_fake
def _(
    input: Tensor, hidden: list[Tensor], weights: list[Tensor], values: int, directions: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *steps, _ = input.shape
    layers = hidden[0].shape[0] // directions
    units = torch.Size(steps).numel() * directions * hidden[-1].shape[-1]
    reserve = input.new_empty(units * (values * layers + layers - 1) if values else 0)
    out = input.new_empty((*steps, directions * hidden[0].shape[-1]))
    return out, torch.empty_like(hidden[0]), torch.empty_like(hidden[-1]), reserve


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    input, hidden, weights, _, _ = inputs
    ctx.states = len(hidden)
    ctx.save_for_backward(input, *hidden, *weights, output[0], output[3])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
    """Allocates the gradients: of the input, of the states, and of all weights in one tensor."""
    input, *tensors, _, _ = ctx.saved_tensors
    hidden, weights = tensors[: ctx.states], tensors[ctx.states :]
    workspace = _workspace(weights)
    grad, contiguous = grad.contiguous(), input.contiguous()  # cuDNN takes contiguous tensors only
    d_input, d_hidden = torch.empty_like(contiguous), [torch.empty_like(state) for state in (hidden[0], hidden[-1])]
    flat = weights[0].new_empty(sum(weight.numel() for weight in weights))
    del workspace
    pieces = flat.split([weight.numel() for weight in weights])
    d_weights = [piece.view(weight.shape) for piece, weight in zip(pieces, weights, strict=True)]
    return d_input, d_hidden[: ctx.states], d_weights, None, None


recurrence.register_autograd(_backward, setup_context=_save)


# for simulated devices, and for kinds of devices with cuDNN
REFUSED = {f"{name}.input": functools.partial(_refuse, name) for name in ("lstm", "gru")}
RECURRENCE = {f"{name}.input": functools.partial(_padded, name) for name in KEPT}


@contextlib.contextmanager
def autograd_kernels(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[torch.library.Library]:
    """Replaces operators of fake CPU tensors, also where a checkpoint recomputes a forward. Yields the library."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel, "AutogradCPU")
        yield library
    finally:
        library._destroy()
