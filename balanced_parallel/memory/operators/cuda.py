"""Operators that fake CPU tensors would run otherwise: those of CUDA, and those in place.

On CUDA autocast has other lists, dropout keeps a mask of bytes, and attention is fused. On every device torch avoids operators in
place under a dispatch mode, and so in a trace (``isTensorSubclassLike`` in ATen): ``IN_PLACE`` and ``CUDA_KERNELS`` are the
places where it writes to an argument without one.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...runtime.torch_private import current_node, map_tensors
from .recurrent import RECURRENCE, REFUSED, autograd_kernels

_aten = torch.ops.aten

# torch/include/ATen/autocast_mode.h: AT_FORALL_FP32, and AT_FORALL_FP32_SET_OPT_DTYPE, without those that the CPU's has too
_FP32 = (  # noqa: SIM905
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor "
    "pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim "
    "cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss "
    "smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
    "multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d "
    "upsample_nearest2d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d"
).split()
_FP32_UNLESS_TOLD = (  # noqa: SIM905
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm sum sum.dim_IntList"
).split()


@contextlib.contextmanager
def cuda_choices(fuses: bool) -> Iterator[None]:
    """Gives fake CPU tensors in this block the operators of CUDA, also for attention and recurrent layers if ``fuses``."""
    fused: dict[str, Callable[..., Any]] = {"scaled_dot_product_attention": _attention, **RECURRENCE}
    # no public function reads or changes the lists of autocast
    registrations = torch._C._dispatch_get_registrations_for_dispatch_key
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    with autograd_kernels({"dropout": _dropout, **(fused if fuses else REFUSED)}) as library:
        for name in (*_FP32, *_FP32_UNLESS_TOLD):
            base, _, overload = name.partition(".")
            operator = getattr(getattr(_aten, base, None), overload or "default", None)
            if operator is not None and not has_kernel(operator.name(), "AutocastCPU"):
                library.impl(name, _in_float32(operator, unless_told=name in _FP32_UNLESS_TOLD), "AutocastCPU")
        for name in registrations("AutocastCPU"):
            if name.startswith("aten::") and not has_kernel(name, "AutocastCUDA"):
                library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU", allow_override=True)
        yield


def _in_float32(operator: Any, unless_told: bool) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)  # no public name

    def widen(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):  # torch.autocast(enabled=False) would also change the code of the model
            if unless_told and any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
                return operator(*args, **kwargs)
            return operator(*map_tensors(widen, args), **map_tensors(widen, kwargs))

    return kernel


@torch.library.custom_op("balanced_parallel::fused_attention", mutates_args=())
def fused_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Fused attention: an output, and one float32 per query and head for the backward."""
    raise NotImplementedError


@fused_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    *rows, heads, length, _ = query.shape
    # the layout of the query, as in the flash kernel
    same = query.shape[-1] == value.shape[-1]
    out = torch.empty_like(query) if same else query.new_empty((*rows, length, heads, value.shape[-1])).transpose(-3, -2)
    return out, query.new_empty((*rows, heads, length), dtype=torch.float32)


def _attention_buffers(query: Tensor, key: Tensor) -> list[int]:
    """Returns the bytes that the backward of fused attention takes for itself (``mha_bwd`` of flash_api.cpp)."""
    *rows, heads, length, width = query.shape
    outer = torch.Size(rows).numel() * heads
    sums = 4 * outer * -(-length // 128) * 128
    if query.dtype == torch.float32:
        return [sums]
    expanded = outer * key.shape[-2] * width * query.itemsize
    return [sums, sums * -(-width // 32) * 32, *([expanded] * 2 if key.shape[-3] != heads else [])]


CONVOLUTIONS = (
    "not counted: workspaces of cuDNN, which chooses a method. at_most adds those of Winograd's method to 3 x 3 convolutions "
    "in float32. Published CNNs use 10 to 40 % more than nvidia_smi says here"
)


def convolution_workspace(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Returns the most bytes that cuDNN takes for a 3 x 3 convolution in float32, 2.25 times its input and output.

    They are those of Winograd's method, whose tiles of 6 x 6 values overlap. cuDNN chooses it or another one.
    """
    if func is _aten.convolution.default:
        output, (input, weight, _, stride, _, dilation, _, _, groups) = result, args
    elif func is _aten.convolution_backward.default:
        output, input, weight, _, stride, _, dilation, _, _, groups, _ = args
    else:
        return 0
    is_winograd = list(weight.shape[2:]) == [3, 3] and {*stride, *dilation, groups} == {1} and weight.dtype == torch.float32
    return 9 * (input.nbytes + output.nbytes) // 4 if is_winograd else 0


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    query, key, value, mask, *_results = ctx.saved_tensors
    of_mask = mask.new_empty(mask.shape) if ctx.needs_input_grad[3] else None
    gradients = [torch.empty_like(tensor) for tensor in (query, key, value)]
    buffers = [query.new_empty(size, dtype=torch.uint8) for size in _attention_buffers(query, key)]
    del buffers
    return *gradients, of_mask


fused_attention.register_autograd(_backward, setup_context=_save)


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if train and 0 < p < 1:
        return torch.native_dropout(input, p, True)[0]
    return input * 0 if train and p == 1 else input


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.dim() < 4:
        return _attention(query[None], key[None], value[None], attn_mask)[0]
    mask = None if attn_mask is None else _kernel_mask(attn_mask, query, key)
    fused: Tensor = fused_attention(query, key, value, mask)[0]
    return fused


def _kernel_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Returns the mask that the memory-efficient kernel saves: floating, its last dimension padded to a multiple of 8."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype)  # as large as the mask that torch makes of it
    if mask.shape[-1] % 8 and mask.shape[-1] > 1:
        mask = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8))[..., : mask.shape[-1]]
    return mask.expand(*query.shape[:-1], key.shape[-2])


MATRIX_PRODUCTS = {  # of cuBLAS: the first one of a thread allocates the workspace of its handle
    *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default),
    *(_aten.mv.default, _aten.addmv.default, _aten.dot.default),
}
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
    zeros (``is_of_node``).
    """
    if (node := current_node()) is None or torch.is_grad_enabled():
        return False
    frame: Any = sys._getframe()  # the caller of the operator is the innermost frame that does not belong to a dispatch mode
    while frame.f_code.co_filename.startswith(_MODES):
        frame = frame.f_back
    if frame.f_code.co_name != "_engine_run_backward":
        return False
    edges = node.next_functions
    return not is_of_node or len(set(edges)) < len(edges) if func is _aten.add.Tensor else is_of_node


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Adds the bias of a linear layer in place if its input is not contiguous, as torch does without a mode."""
    if bias is None or input.dim() <= 2 or input.is_contiguous():
        return torch.ops.aten.linear.default.decompose(input, weight, bias)
    return torch.matmul(input, weight.t()).add_(bias)


CUDA_KERNELS = {"linear": _linear}
