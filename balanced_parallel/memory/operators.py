"""Operators that fake CPU tensors would run otherwise: those of CUDA, those in place, and those
whose memory depends on values.

On CUDA autocast has other lists, dropout keeps a mask of bytes, and attention is fused. Recurrent
layers are one operator of cuDNN there, whose reserve only a GPU tells. Operators of single steps,
which keep more, are counted.

On every device torch avoids operators in place under a dispatch mode, and so in a trace
(``isTensorSubclassLike`` in ATen). ``IN_PLACE`` and ``KERNELS`` are the places where it writes to
an argument without one.

An operator whose memory depends on values is counted in its worst case, or is an error with its
name. The tables of the CTC loss are those of the longest targets that fit. Some losses keep the
memory of their elements in a scalar result, because torch reduces them in place.
"""

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from .trace.private import current_node, map_tensors

_aten = torch.ops.aten
HINT = "give memory.estimate a module without it (a size as a plain number, a mask that multiplies)"


class UnknownMemory(ValueError):
    """The memory of an operator depends on values, and fake tensors have none."""


# AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE of torch/include/ATen/autocast_mode.h, without
# those of the CPU.
_FP32 = (  # noqa: SIM905
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor "
    "pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim "
    "cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss "
    "smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
    "multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d "
    "upsample_nearest2d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm sum sum.dim_IntList"
).split()


@contextlib.contextmanager
def cuda_choices(fuses: bool) -> Iterator[None]:
    """Gives fake CPU tensors in this block the operators of CUDA, also for attention if ``fuses``."""
    fused = {"scaled_dot_product_attention": _attention} if fuses else {}
    widened, unchanged = _autocast_differences()
    with autograd_kernels({"dropout": _dropout, "lstm.input": _lstm, **fused}) as library:
        for name, operator in widened.items():
            library.impl(name, _in_float32(operator), "AutocastCPU")
        for name in unchanged:
            library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU", allow_override=True)
        yield


@functools.cache
def _autocast_differences() -> tuple[dict[str, Any], list[str]]:
    """Returns the operators that only CUDA's autocast casts to float32, and names that only the
    CPU's casts.
    """
    # No public function reads the lists of autocast.
    registrations = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    widened = {}
    for name in _FP32:
        base, _, overload = name.partition(".")
        operator = getattr(getattr(_aten, base, None), overload or "default", None)
        if operator is not None and not has_kernel(operator.name(), "AutocastCPU"):
            widened[name] = operator
    names = [name for name in registrations if name.startswith("aten::")]
    return widened, [name for name in names if not has_kernel(name, "AutocastCUDA")]


def _in_float32(operator: Callable[..., object]) -> Callable[..., object]:
    """Returns a kernel that casts tensors to float32, unless an argument tells the dtype of the
    result.
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)  # no public name

    def widen(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

    def kernel(*args: object, **kwargs: object) -> object:
        if not any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
            args, kwargs = map_tensors(widen, (args, kwargs))
        # torch.autocast(enabled=False) would also change the code of the model.
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator(*args, **kwargs)

    return kernel


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Fused attention: an output, and one float32 per query and head for the backward."""
    *rows, heads, length, _ = query.shape
    if query.shape[-1] == value.shape[-1]:
        out = torch.empty_like(query)  # The flash kernel keeps the layout of the query.
    else:
        out = query.new_empty((*rows, length, heads, value.shape[-1])).transpose(-3, -2)
    return out, query.new_empty((*rows, heads, length), dtype=torch.float32)


def _attention_buffers(query: Tensor, key: Tensor) -> list[int]:
    """Returns the bytes that the backward of fused attention takes for itself (``mha_bwd`` of
    flash_api.cpp).
    """
    *rows, heads, length, width = query.shape
    outer = torch.Size(rows).numel() * heads
    sums = 4 * outer * -(-length // 128) * 128
    if query.dtype == torch.float32:
        return [sums]
    expanded = outer * key.shape[-2] * width * query.itemsize
    return [sums, sums * -(-width // 32) * 32, *([expanded] * 2 if key.shape[-3] != heads else [])]


CONVOLUTIONS = (
    "not counted in allocated, reserved and nvidia_smi: workspaces of cuDNN, which chooses a method. at_most adds those of "
    "Winograd's method to convolutions of size 3 in float32, in 3D and dilated too. Published CNNs use 10 to 40 % more than "
    "nvidia_smi says here"
)

RECURRENT_LAYERS = (
    "the operators of single steps are counted. cuDNN has one operator in their place, and reserves memory for its "
    "backward that only a GPU tells: what pytorch#2895 prints for an LSTM and a GRU is less than these keep"
)


# memory that is taken or not: not part of a report but of its upper bound
MAYBE = "workspace of cuDNN"
UNLIMITED = 2**62


class Workspace(NamedTuple):
    """Bytes that an operator takes for itself for some rows, the most for which it takes none, and
    the most for any rows.
    """

    size: int
    kind: str = "temporaries"
    least: int = 0
    most: int = UNLIMITED


def _convolution_workspace(
    stride: Sequence[int],
    groups: int,
    output: Tensor,
    input: Tensor,
    weight: Tensor,
) -> list[Workspace]:
    """Returns the most bytes that cuDNN takes for a convolution of size 3 in float32: 2.25 times
    its input and output in 2D.

    They are those of Winograd's method, whose tiles of 6 x 6 values are for 4 x 4 results, also in
    3D (6 for 4 once more) and between the values that a dilation skips. cuDNN chooses it or another
    one.
    """
    sizes = weight.shape[2:]
    if (
        {*sizes} != {3}
        or len(sizes) == 1
        or {*stride, groups} != {1}
        or weight.dtype != torch.float32
    ):
        return []
    return [Workspace(int((input.nbytes + output.nbytes) * 1.5 ** len(sizes)), MAYBE)]


def _embedding_workspaces(
    gradient: Tensor,
    ids: Tensor,
    words: int,
    _: int,
    counts_words: bool,
) -> list[Workspace]:
    """Returns what CUDA's backward of an embedding takes for itself: partial sums of its rows, one
    for each word in the batch and for each ten ids, and indices.

    ``embedding_backward_cuda_kernel`` of aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu
    allocates them. Embedding.cu calls another kernel for up to 3,072 ids.
    """
    count = ids.numel()
    index = ids.itemsize
    threshold = 0 if counts_words else 3072
    partial_sum = max(gradient.itemsize, 4) * gradient.shape[-1] + index
    word = partial_sum + 2 * index
    id = partial_sum // 10 + (3 + counts_words) * index
    return [
        Workspace(count * word, least=threshold * word, most=words * word),
        Workspace(count * id, least=threshold * id),
    ]


def _attention_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, mask, *_results = ctx.saved_tensors
    of_mask = mask.new_empty(mask.shape) if ctx.needs_input_grad[3] else None
    gradients = [torch.empty_like(tensor) for tensor in (query, key, value)]
    buffers = [query.new_empty(size, dtype=torch.uint8) for size in _attention_buffers(query, key)]
    del buffers
    return *gradients, of_mask


fused_attention = torch.library.custom_op(
    "balanced_parallel::fused_attention", _attend, mutates_args=()
)
fused_attention.register_fake(_attend)
fused_attention.register_autograd(
    _attention_backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if train and 0 < p < 1:
        return torch.native_dropout(input, p, True)[0]
    return input * 0 if train and p == 1 else input


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *_: object,
    **__: object,
) -> Tensor:
    if query.dim() < 4:
        return _attention(query[None], key[None], value[None], mask)[0]
    # The memory-efficient kernel saves a floating mask, its last dimension padded to a multiple of 8.
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype)  # Torch makes such a mask of it.
        if mask.shape[-1] % 8 and mask.shape[-1] > 1:
            mask = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8))[..., : mask.shape[-1]]
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    fused: Tensor = fused_attention(query, key, value, mask)[0]
    return fused


# The first of these operators of cuBLAS in a thread allocates the workspace of its handle.
MATRIX_PRODUCTS = {
    getattr(_aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")
}
_TORCH = str(Path(torch.__file__).parent)
# torch wraps modes against compilation
_MODES = str(Path(__file__).parent), f"{_TORCH}/_compile", f"{_TORCH}/_dynamo"
IN_PLACE = {
    _aten.add.Tensor,  # sums of the gradients of a tensor: torch/csrc/autograd/input_buffer.cpp
    # backwards of max, topk, gather and of indices: torch/csrc/autograd/FunctionsManual.cpp
    _aten.scatter.src,
    _aten.scatter.value,
    _aten.scatter_add.default,
    _aten.index_add.default,
    _aten.index_put.default,
}


def is_in_place(func: object, *, is_of_node: bool) -> bool:
    """Returns True if autograd calls ``func``, one of ``IN_PLACE``, in place, provided nothing else
    has its first argument.

    The engine adds gradients, those of earlier nodes or of two edges to one tensor. All else are
    writes of a node to its own zeros (``is_of_node``).
    """
    if (node := current_node()) is None or torch.is_grad_enabled():
        return False
    # The caller of the operator is the innermost frame that does not belong to a dispatch mode.
    functions = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe()))
    caller = next((code for code in functions if not code.co_filename.startswith(_MODES)), None)
    if caller is None or caller.co_name != "_engine_run_backward":
        return False
    edges = node.next_functions
    return (
        not is_of_node or len(set(edges)) < len(edges) if func is _aten.add.Tensor else is_of_node
    )


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Adds the bias of a linear layer in place if its input is not contiguous, as torch does
    without a mode.
    """
    if bias is None or input.dim() <= 2 or input.is_contiguous():
        return torch.ops.aten.linear.default.decompose(input, weight, bias)
    return torch.matmul(input, weight.t()).add_(bias)


def _lstm(*arguments: object) -> object:
    """Runs the steps of an LSTM as those of a GRU. oneDNN has an operator of its own for fake CPU
    tensors.
    """
    with torch.backends.mkldnn.flags(enabled=False):
        # no public name
        return _aten.lstm.input._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *arguments)


@contextlib.contextmanager
def autograd_kernels(
    kernels: Mapping[str, Callable[..., object]],
) -> Iterator[torch.library.Library]:
    """Replaces operators of fake CPU tensors, also where a checkpoint recomputes a forward.

    Yields the library.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:  # There is no public context.
        for name, kernel in kernels.items():
            library.impl(name, kernel, "AutogradCPU")
        yield library


def _ctc_of_lists(
    scores: Tensor,
    targets: Tensor,
    steps: Sequence[int],
    lengths: Sequence[int],
    *settings: object,
) -> Tensor:
    """Makes tensors of the lengths in Python.

    In C++, torch writes them to the memory that fake tensors do not have.
    """
    loss: Tensor = _aten.ctc_loss.Tensor(
        scores, targets, torch.tensor(steps), torch.tensor(lengths), *settings
    )
    return loss


KERNELS: dict[str, Callable[..., object]] = {"linear": _linear, "ctc_loss.IntList": _ctc_of_lists}
READS = {_aten._local_scalar_dense.default, _aten.is_nonzero.default}


def answer(
    func: object,
    args: tuple[Any, ...],
    kwargs: dict[str, object],
    scalar: float | None,
    user_line: Callable[[], str],
) -> object:
    """Returns the result if there is a rule for this call, else ``NotImplemented``.

    Selections select every element.

    A value that an optimizer or this package reads is one. If the model reads it, in
    ``user_line()``, it is ``scalar``.
    """
    if func in READS:
        line = user_line()
        if line and scalar is None:
            raise UnknownMemory(
                f"{line} reads a value of a tensor ({func}), on which sizes may depend: pass it as a small tensor of integers on "
                "the CPU, whose values are known, or what it follows from; or state the largest that it can be with scalar= "
                f"(--scalar), or {HINT}"
            )
        # NAdam divides by one minus a product of its momenta
        number = 0.9 if args[0].is_floating_point() else 1
        value = True if func is _aten.is_nonzero.default or args[0].dtype == torch.bool else number
        return type(value)(scalar) if line and scalar is not None else value
    if func in _UNKNOWN:
        raise UnknownMemory(_UNKNOWN[func])
    rule = _RULES.get(func)
    return NotImplemented if rule is None else rule(*args, **kwargs)


def workspaces(func: object, args: Sequence[Any], result: Any, is_gpu: bool) -> list[Workspace]:
    """Returns what an operator takes for itself: indices of boolean masks, the second table of the
    CTC loss, and workspaces of a GPU.
    """
    if func in _CTC_BACKWARD:
        return [Workspace(args[6].nbytes)]
    if func in _INDEXES:
        _, indices, *written = args
        places = [index for index in indices if index is not None]
        masks = list(filter(_is_mask, places))
        if len(places) == len(masks) == 1 and written and written[0].numel() == 1:
            return []  # Torch fills the mask with this number.
        # These are the result of nonzero, and a copy per dimension.
        return [Workspace(sum(2 * 8 * mask.numel() * mask.dim() for mask in masks))]
    if func is _aten.convolution.default and is_gpu:
        return _convolution_workspace(args[3], args[8], result, *args[:2])
    if func is _aten.convolution_backward.default and is_gpu:
        return _convolution_workspace(args[4], args[9], *args[:3])
    if func is _aten.embedding_dense_backward.default and is_gpu:
        return _embedding_workspaces(*args)
    return []


def _is_mask(index: Tensor | None) -> TypeGuard[Tensor]:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _integers(tensor: Tensor, *shape: int) -> Tensor:
    return tensor.new_empty(shape, dtype=torch.int64)


def _index(tensor: Tensor, indices: Sequence[Tensor | None]) -> object:
    if not any(map(_is_mask, indices)):
        return NotImplemented
    expanded: list[Tensor | None] = []
    for index in indices:
        expanded += (
            [_integers(index, index.numel()) for _ in range(index.dim())]
            if _is_mask(index)
            else [index]
        )
    return _aten.index.Tensor(tensor, expanded)


def _ctc(scores: Tensor, targets: Tensor, *settings: object) -> tuple[Tensor, Tensor]:
    steps, rows, _ = scores.shape
    # One row may have all of the concatenated targets.
    longest = targets.size(1) if targets.dim() == 2 else targets.numel()
    return scores.new_empty(rows), scores.new_empty((rows, steps, 2 * longest + 1))


def _group_norm_backward(
    gradient: Tensor,
    inputs: Tensor,
    *settings: Any,
) -> tuple[Tensor | None, ...]:
    """Returns gradients in the dtype of the input.

    The fake kernel of torch returns float32 for bfloat16.
    """
    *_, weight, _, channels, _, _, mask = settings
    learned = (inputs if weight is None else weight).new_empty(channels)
    results = (torch.empty_like(inputs), learned, torch.empty_like(learned))
    return tuple(result if asked else None for result, asked in zip(results, mask, strict=True))


def _grouped_products(
    left: Tensor,
    right: Tensor,
    ends: Tensor | None = None,
    *_: object,
) -> Tensor:
    """Returns the products of groups of rows with a matrix each, as of experts.

    The fake kernel of torch takes bfloat16 alone.
    """
    groups = ends.numel() if ends is not None else len(left)
    shape = [left.shape[-2], right.shape[-1]]
    return left.new_empty([groups, *shape] if left.dim() == right.dim() else shape)


_CTC_BACKWARD = {_aten._ctc_loss_backward.default, _aten._ctc_loss_backward.Tensor}
_INDEXES = {
    _aten.index.Tensor,
    _aten._unsafe_index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}
SELECTIONS: dict[object, Callable[..., object]] = {
    _aten.nonzero.default: lambda mask: _integers(mask, mask.numel(), mask.dim()),
    _aten.masked_select.default: lambda tensor, mask: tensor.new_empty(
        torch.broadcast_shapes(tensor.shape, mask.shape).numel()
    ),
    _aten.index.Tensor: _index,
    _aten._unique2.default: lambda tensor, *settings: (
        tensor.new_empty(tensor.numel()),
        _integers(tensor, *tensor.shape),
        _integers(tensor, tensor.numel()),
    ),
}
_UNKNOWN: dict[object, str] = {
    _aten._pack_padded_sequence.default: "aten._pack_padded_sequence.default packs sequences by their lengths, which are values: "
    "give memory.estimate the module with padded sequences, of which packing never needs more",
    _aten.mkldnn_rnn_layer.default: "nn.LSTM on the CPU keeps a workspace of oneDNN, whose bytes no fake tensor has: estimate it "
    "for a kind of GPU, such as device_kind='h200'",
}
_RULES: dict[object, Callable[..., object]] = {
    **SELECTIONS,
    _aten._ctc_loss.default: _ctc,
    _aten._ctc_loss.Tensor: _ctc,
    **dict.fromkeys(
        _CTC_BACKWARD, lambda gradient, scores, *settings: scores.new_empty(scores.shape)
    ),
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten._grouped_mm.default: _grouped_products,
}


# Torch counts no operations of experts.
FLOPS: dict[object, Callable[..., int]] = {
    _aten._grouped_mm.default: lambda left, right, *_, **__: 2 * left.numel() * right.shape[-1]
}
# aten/src/ATen/native/{BinaryOps,Loss}.cpp: the elements are written to the result, and it is
# resized to a scalar
_LOSSES = {_aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.soft_margin_loss.default}


def keep_elements(func: object, args: Sequence[object], result: Any) -> None:
    """Enlarges the fake storage of such a result to that of its elements."""
    if func in _LOSSES and result.dim() == 0:
        tensors = [argument for argument in args[:2] if isinstance(argument, Tensor)]
        elements = torch.broadcast_shapes(*(tensor.shape for tensor in tensors)).numel()
        result.untyped_storage().resize_(elements * result.dtype.itemsize)


# Operators with a rule in this file. All others only allocate their results.
SPECIAL = {
    *READS,
    *_UNKNOWN,
    *_RULES,
    *_LOSSES,
    *_INDEXES,
    *MATRIX_PRODUCTS,
    *IN_PLACE,
    _aten.convolution.default,
    _aten.convolution_backward.default,
    _aten.embedding_dense_backward.default,
}
