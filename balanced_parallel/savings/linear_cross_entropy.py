"""The last layer of a classifier or a language model, together with its loss, in chunks of rows.

The logits of one chunk exist at a time. They become the chunk's softmax and then its gradient, in
place. Gradients of the hidden states and of the weight are made in the forward, for the sum of the
losses, and multiplied by one scalar in the backward.

``torch.nn.functional.linear_cross_entropy``, new in torch 2.13, makes chunks too, but not with
label smoothing or for ``[rows, positions]``. It returns a loss in bfloat16 under autocast, and is
slow for narrow layers, whose chunks it makes small.

``replace_lm_head`` does this for a causal language model of Hugging Face. With labels, its head
returns the hidden states, and the model passes them on to its loss function in place of the logits.
"""

import contextvars
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import wrap_torch_function

from ..loss.rules import add_loss
from ..loss.sums import divide
from ..runtime import torch_private, values


class LinearCrossEntropy(nn.Module):
    """A linear layer and its cross entropy, without the logits of the whole batch.

    ``criterion(hidden, target)`` equals ``nn.CrossEntropyLoss()(linear(hidden), target)``, in loss
    and gradients. The logits of at most 1,024 rows exist at a time. With 768 features, 32,768
    classes and 4,096 rows the peak is 0.13 times that of the plain layers. Names of parameters are
    those of ``nn.LinearCrossEntropyLoss``.

    The layer is part of the criterion, so give ``criterion.parameters()`` to the optimizer as well.
    To tie the weight to an embedding, assign it: ``criterion.linear.weight = embedding.weight``.
    Pass hidden states of ``[rows, positions, in_features]`` as they are, with targets of ``[rows,
    positions]``. The backward has no graph: ``create_graph=True`` raises ``RuntimeError``.

    Args:
        in_features, bias, device, dtype: of the linear layer.
        num_classes: number of classes, such as the words of a vocabulary.
        weight, ignore_index, label_smoothing: as in ``nn.CrossEntropyLoss``.
        reduction: ``"mean"`` or ``"sum"``.

    Raises:
        ValueError: a setting is out of its range; at the call, targets do not fit the hidden
            states.

    Example:
        >>> model = DataParallelModel(nn.Embedding(11, 8), ["cpu"] * 2)
        >>> criterion = DataParallelCriterion(savings.LinearCrossEntropy(8, 11))
        >>> tokens = torch.zeros(3, 5, dtype=torch.int64)
        >>> criterion(model(tokens), tokens).shape
        torch.Size([])
    """

    @values.naming_arguments
    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if weight is not None and weight.shape != (num_classes,):
            raise ValueError(
                f"weight has shape {tuple(weight.shape)}, expected one weight for each of {num_classes} classes"
            )
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing={label_smoothing!r}, expected a number from 0 to 1")
        _check_reduction(reduction)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.weight: Tensor | None
        self.register_buffer("weight", weight)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Returns the loss of hidden states ``[..., in_features]`` and class indices ``[...]``."""
        return linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            linear_bias=self.linear.bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )

    def extra_repr(self) -> str:
        """Returns the settings, for ``repr(criterion)``."""
        return f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, reduction={self.reduction!r}"


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"reduction={reduction!r}, expected 'mean' or 'sum': for the losses of rows use nn.Linear and nn.CrossEntropyLoss"
        )


class Labels(NamedTuple):
    """Targets of all rows, and the settings of their cross entropy."""

    target: Tensor
    class_weight: Tensor | None
    ignore_index: int
    label_smoothing: float


def rows_per_chunk(features: int) -> int:
    """Returns the rows of a chunk, whose logits take the memory of the weight's gradient.

    Few rows are slow to multiply.
    """
    return min(max(features, 256), 1024)


@wrap_torch_function(lambda *tensors, **settings: tensors)
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Returns ``F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, ...)`` without
    the logits of all rows.

    The loss of half precision inputs is in float32. Targets are class indices, ``[...]`` for inputs
    ``[..., features]``.
    """
    _check_reduction(reduction)
    if target.shape != input.shape[:-1] or target.dtype != torch.int64:
        raise ValueError(
            f"the targets have shape {tuple(target.shape)} and dtype {target.dtype} for inputs of shape {tuple(input.shape)}, "
            f"expected class indices of shape {tuple(input.shape[:-1])} and dtype torch.int64"
        )
    labels = Labels(target.reshape(-1), weight, ignore_index, label_smoothing)
    hidden = input.reshape(-1, input.size(-1))
    total: Tensor = _Chunked.apply(
        hidden, linear_weight, linear_bias, labels, torch.is_grad_enabled()
    )
    if reduction == "sum":
        return total
    divisor = _weights_of_rows(labels, total.dtype).sum()
    return divide(total, divisor)  # nan if no target counts, as in F.cross_entropy


def _weights_of_rows(labels: Labels, dtype: torch.dtype) -> Tensor:
    counted = labels.target != labels.ignore_index
    if labels.class_weight is None:
        return counted.to(dtype)
    return labels.class_weight.to(dtype)[labels.target.masked_fill(~counted, 0)] * counted


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Labels,
        keeps_gradients: bool,
    ) -> Tensor:
        kind = hidden.device.type
        # Autocast leaves float64 as it is.
        autocasts = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
        dtype = torch.get_autocast_dtype(kind) if autocasts else hidden.dtype
        wanted = ctx.needs_input_grad[:3] if keeps_gradients else (False,) * 3
        losses, gradients = _run(hidden, weight, bias, labels, dtype, wanted)
        ctx.save_for_backward(*gradients)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "LinearCrossEntropy was given create_graph=True, but its backward has no graph: for second derivatives use "
                "nn.Linear and nn.CrossEntropyLoss"
            )
        multiply = torch.mul if torch_private.keeps_graph() else Tensor.mul_
        computed = [
            None if saved is None else multiply(saved, gradient) for saved in ctx.saved_tensors
        ]
        return (*computed, None, None)


def _run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Labels,
    dtype: torch.dtype,
    wanted: tuple[bool, ...],
) -> tuple[Tensor, list[Tensor | None]]:
    """Returns the losses of all rows, and the wanted gradients of their sum."""
    wide = torch.promote_types(dtype, torch.float32)
    losses = torch.empty(len(hidden), dtype=wide, device=hidden.device)
    of_hidden = torch.empty_like(hidden) if wanted[0] else None
    of_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
    of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None
    with torch.autocast(hidden.device.type, enabled=False):
        weight_there = weight.to(dtype)
        bias_there = None if bias is None else bias.to(dtype)
        for rows, chunk, target in _chunks(hidden, weight, labels.target):
            chunk = chunk.to(dtype)
            logits = F.linear(chunk, weight_there, bias_there).to(wide)
            _write(
                losses,
                rows,
                _loss_and_gradient_(logits, labels._replace(target=target), any(wanted)),
            )
            gradient = logits.to(dtype)
            del logits  # It may be a wider copy of the gradient.
            if of_hidden is not None:
                _write(of_hidden, rows, F.linear(gradient, weight_there.t()))
            if of_weight is not None:
                _add_product_(of_weight, gradient, chunk)
            if of_bias is not None:
                of_bias += gradient.sum(0, dtype=wide)
            del gradient  # The logits of the next chunk take its memory.
    return losses, [
        of_hidden,
        *(None if total is None else total.to(weight.dtype) for total in (of_weight, of_bias)),
    ]


def _add_product_(total: Tensor, gradient: Tensor, chunk: Tensor) -> None:
    if total.dtype == chunk.dtype:
        total.addmm_(gradient.t(), chunk)
    else:
        total += F.linear(gradient.t(), chunk.t())


Chunks = Iterator[tuple[slice, Tensor, Tensor]]  # rows, and their hidden states and targets


def _chunks(hidden: Tensor, weight: Tensor, target: Tensor) -> Chunks:
    size = rows_per_chunk(weight.size(1))
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        yield rows, hidden[rows], target[rows]


def _write(results: Tensor, rows: slice, values: Tensor) -> None:
    results[rows] = values


def _loss_and_gradient_(logits: Tensor, labels: Labels, makes_gradient: bool) -> Tensor:
    """Returns the loss of each row. Replaces ``logits`` by the gradient of their sum."""
    ignored = labels.target == labels.ignore_index
    counts = (~ignored).to(logits.dtype)
    chosen = labels.target.masked_fill(ignored, 0).unsqueeze(1)
    uniform = labels.label_smoothing / logits.size(1)  # the weight of each class besides the target
    logits -= logits.amax(1, keepdim=True)
    mass = peaked = (1 - labels.label_smoothing) * _weights_of_rows(labels, logits.dtype)
    losses = -peaked * logits.gather(1, chosen).squeeze(1)
    if uniform:
        class_weight = (
            logits.new_ones(logits.size(1))
            if labels.class_weight is None
            else labels.class_weight.to(logits.dtype)
        )
        losses -= uniform * counts * (logits @ class_weight)
        mass = peaked + uniform * counts * class_weight.sum()
    sums = logits.exp_().sum(1)
    losses += mass * sums.log()
    if makes_gradient:
        logits *= (mass / sums).unsqueeze(1)
        logits.scatter_add_(1, chosen, -peaked.unsqueeze(1))
        if uniform:
            logits.addr_(uniform * counts, class_weight, alpha=-1)
    return losses.masked_fill_(ignored, 0)  # The losses of ignored rows may be nan.


@values.naming_arguments
def replace_lm_head(model: Any) -> None:
    """Makes a causal language model compute its loss without the logits of all positions, in place.

    ``model(input_ids, labels=labels).loss`` and its gradients stay the same. ``.logits`` of that
    result is None. A call without labels, such as in ``generate``, returns logits as before.
    Shifted labels, ``num_items_in_batch``, a bias and weights that are tied to the embedding are
    supported. Names of parameters stay. Call this before :class:`DataParallelModel` or
    :func:`parallelize`. There is no way back, but ``model.state_dict()`` fits a new model. Adapters
    of peft may be anywhere but at the head; ``modules_to_save=["lm_head"]`` is supported.

    Args:
        model: a causal language model of transformers, such as ``GPT2LMHeadModel`` or
            ``LlamaForCausalLM``, also inside of a ``PeftModel``.

    Raises:
        TypeError: the model does not pass the output of one ``nn.Linear`` to ``ForCausalLMLoss``,
            or peft adapts that layer. If it changes the logits in between (as Gemma 2 and Cohere
            do, by a soft cap or a scale), the first call with labels raises this.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2))
        >>> savings.replace_lm_head(model)
        >>> criterion = DataParallelCriterion(
        ...     lambda output, labels: output.loss, weight=lambda output, labels: (labels[:, 1:] != -100).sum()
        ... )
        >>> words = torch.arange(24).view(3, 8)
        >>> outputs = DataParallelModel(model, ["cpu"] * 2)(words, labels=words)
        >>> outputs[0].logits is None, criterion(outputs, words).shape
        (True, torch.Size([]))
    """
    if hasattr(model, "get_base_model"):  # The layers of peft call this model.
        model = model.get_base_model()
    kind: Any = type(model)
    name = kind.__name__
    if issubclass(kind, WithoutLogits):
        return
    if not isinstance(getattr(kind, "loss_function", None), property):
        raise TypeError(
            f"{name} has no loss_function, expected a causal language model of transformers"
        )
    _check_loss(model.loss_function, name)
    _change_heads(model, name)
    model.__class__ = _class_without_logits(kind)


class WithoutLogits:
    """A base class of models that compute their loss without logits, besides their own class."""


@dataclass
class _Call:
    """One forward with labels: the head that ran, its hidden states, and whether the loss was
    computed from them.
    """

    name: str
    head: nn.Linear | None = None
    hidden: Tensor | None = None
    has_loss: bool = False

    def keep(self, head: nn.Linear, hidden: Tensor) -> Tensor:
        """Returns hidden states, which the loss will see in the place of logits."""
        self.head = head
        self.hidden = hidden
        return hidden

    def loss(
        self,
        logits: Tensor,
        labels: Tensor,
        _vocab_size: int = 0,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        """Computes what ``ForCausalLMLoss`` of transformers does, with hidden states in place of
        logits.
        """
        if self.head is None or logits is not self.hidden:
            raise TypeError(
                f"{self.name} changes its logits between the head and the loss (by a scale, a soft cap, or another dtype), "
                "expected the output of the head as it is: leave out replace_lm_head for this model"
            )
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        self.has_loss = True
        total = linear_cross_entropy(
            logits,
            self.head.weight,
            shift_labels.to(logits.device).view(logits.shape[:-1]),
            linear_bias=self.head.bias,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total if num_items_in_batch is None else total / num_items_in_batch


_running = contextvars.ContextVar[_Call | None]("running", default=None)


class _Head(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        call = _running.get()
        return super().forward(input) if call is None else call.keep(self, input)


def _change_heads(model: Any, name: str) -> None:
    """Changes the class of the head.

    With ``modules_to_save`` of peft there is one for each adapter, and the original.
    """
    head = model.get_output_embeddings()
    saved = getattr(head, "modules_to_save", None)
    for layer in [head] if saved is None else [head.original_module, *saved.values()]:
        kind = type(layer)
        if kind not in (nn.Linear, _Head):
            raise TypeError(
                f"the head of {name} is a {kind.__module__}.{kind.__name__}, expected nn.Linear: leave the head out of the "
                "adapters of peft (modules_to_save trains the whole head), or leave out replace_lm_head"
            )
        layer.__class__ = _Head


def _check_loss(function: object, name: str) -> None:
    if getattr(function, "__name__", "") != "ForCausalLMLoss":
        raise TypeError(
            f"the loss function of {name} is {function!r}, expected ForCausalLMLoss of transformers"
        )


@functools.cache
def _class_without_logits(kind: Any) -> Any:
    """Returns a subclass.

    A ``forward`` set on the instance would still run the original after a copy.
    """

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: object, **kwargs: object) -> object:
        if kwargs.get("labels") is None:
            return kind.forward(self, *args, **kwargs)
        _check_loss(kind.loss_function.fget(self), kind.__name__)
        _change_heads(self, kind.__name__)  # peft may have wrapped it since
        call = _Call(kind.__name__)
        token = _running.set(call)
        try:
            result = kind.forward(self, *args, **kwargs)
        finally:
            _running.reset(token)
        if not call.has_loss:
            raise TypeError(
                f"{kind.__name__} did not call its loss function for these labels: leave out replace_lm_head"
            )
        if isinstance(result, tuple):
            return tuple(entry for entry in result if entry is not call.hidden)
        return type(result)(
            **{name: entry for name, entry in result.items() if entry is not call.hidden}
        )

    def get_loss_function(self: object) -> object:
        call = _running.get()
        return kind.loss_function.fget(self) if call is None else call.loss

    return type(
        kind.__name__,
        (WithoutLogits, kind),
        {
            "forward": forward,
            "loss_function": property(get_loss_function, kind.loss_function.fset),
            "__module__": kind.__module__,
            "__doc__": kind.__doc__,
        },
    )


add_loss(LinearCrossEntropy, linear_cross_entropy)
