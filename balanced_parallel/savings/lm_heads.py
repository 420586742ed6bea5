"""``replace_lm_head``: the loss of a Hugging Face causal language model without its logits.

With labels, the head returns its hidden states, and the model passes them on to its loss function in place of the logits. The
loss function computes both layers at once.
"""

import contextvars
import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .linear_cross_entropy import linear_cross_entropy
from .saving import Saving


def replace_lm_head(model: Any) -> None:
    """Makes a causal language model compute its loss without the logits of all positions, in place.

    ``model(input_ids, labels=labels).loss`` and its gradients stay the same. ``.logits`` of that result is None. A call without
    labels, such as in ``generate``, returns logits as before. Shifted labels, ``num_items_in_batch``, a bias and weights that
    are tied to the embedding are supported. Names of parameters stay. Call this before :class:`DataParallelModel` or
    :func:`parallelize`. There is no way back, but ``model.state_dict()`` fits a new model. Adapters of peft may be anywhere but
    at the head; ``modules_to_save=["lm_head"]`` is supported.

    Args:
        model: a causal language model of transformers, such as ``GPT2LMHeadModel`` or ``LlamaForCausalLM``, also inside of a
            ``PeftModel``.

    Raises:
        TypeError: the model does not pass the output of one ``nn.Linear`` to ``ForCausalLMLoss``, or peft adapts that layer. If
            it changes the logits in between (as Gemma 2 and Cohere do, by a soft cap or a scale), the first call with labels
            raises this.

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
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft, whose layers call this model
    kind: Any = type(model)
    name = kind.__name__
    if issubclass(kind, WithoutLogits):
        return
    code = getattr(inspect.unwrap(getattr(kind, "forward", None) or (lambda: None)), "__code__", None)
    if not isinstance(getattr(kind, "loss_function", None), property) or "loss_function" not in getattr(code, "co_names", ()):
        raise TypeError(f"{name}.forward does not call self.loss_function, expected a causal language model of transformers")
    _check_loss(model.loss_function, name)
    _change_heads(model, name)
    model.__class__ = _without_logits(kind)


class WithoutLogits:
    """A base class of models that compute their loss without logits, besides their own class."""


@dataclass
class _Call:
    """One forward with labels: the head that ran, its hidden states, and whether the loss was computed from them."""

    name: str
    head: nn.Linear | None = None
    hidden: Tensor | None = None
    has_loss: bool = False

    def loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Computes what ``ForCausalLMLoss`` of transformers does, with hidden states in place of logits."""
        if self.head is None or logits is not self.hidden:
            raise TypeError(
                f"{self.name} changes its logits between the head and the loss (by a scale, a soft cap, or another dtype), "
                "expected the output of the head as it is: leave out replace_lm_head for this model"
            )
        if vocab_size != len(self.head.weight):
            raise ValueError(
                f"the vocabulary has {vocab_size} words, but the head of {self.name} {len(self.head.weight)} outputs"
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


_running: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("running", default=None)


class _Head(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        call = _running.get()
        if call is None:
            return super().forward(input)
        call.head, call.hidden = self, input
        return input


def _change_heads(model: Any, name: str) -> None:
    """Changes the class of the head. With ``modules_to_save`` of peft there is one for each adapter, and the original."""
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


def _check_loss(function: Any, name: str) -> None:
    if getattr(function, "__name__", "") != "ForCausalLMLoss":
        raise TypeError(f"the loss function of {name} is {function!r}, expected ForCausalLMLoss of transformers")


@functools.cache
def _without_logits(kind: Any) -> Any:
    """Returns a subclass. A ``forward`` set on the instance would still run the original after a copy."""
    signature = inspect.signature(kind.forward)

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if signature.bind(self, *args, **kwargs).arguments.get("labels") is None:
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
            raise TypeError(f"{kind.__name__} did not call its loss function for these labels: leave out replace_lm_head")
        if isinstance(result, tuple):
            return tuple(entry for entry in result if entry is not call.hidden)
        return type(result)(**{name: entry for name, entry in result.items() if entry is not call.hidden})

    def get_loss_function(self: Any) -> Any:
        call = _running.get()
        return kind.loss_function.fget(self) if call is None else call.loss

    body = {"forward": forward, "loss_function": property(get_loss_function, kind.loss_function.fset)}
    return type(kind.__name__, (WithoutLogits, kind), {**body, "__module__": kind.__module__, "__doc__": kind.__doc__})


LOGITS = Saving(
    name="replace_lm_head",
    option="loss without logits",
    saves="the logits of a Hugging Face model",
    cost="nothing; the logits do not exist",
    needs="a causal model of transformers, with labels among its inputs",
    order=200,
    suits=lambda step: "labels" in step.inputs.kwargs,
    change_module=replace_lm_head,
    lines=("savings.replace_lm_head(module)",),
)
