"""The task of all programs: a small GPT-2 with random weights, which computes its own loss, on rows of unequal length."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

LENGTH = 24


class Case(NamedTuple):
    """Sizes of a run. ``rows`` is not a multiple of ``batch_size``: the last effective batch is smaller."""

    words: int
    width: int
    layers: int
    rows: int
    batch_size: int
    micro_batch_size: int
    lr: float
    dtype: torch.dtype

    @property
    def updates(self) -> int:
        """Number of effective batches."""
        return -(-self.rows // self.batch_size)


def causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Tensor | None = None, **_: Any) -> Tensor:
    """transformers' own loss (ForCausalLMLoss), without its cast to float32, which would hide every error below 1e-7."""
    flat, targets = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
    if num_items_in_batch is None:
        return nn.functional.cross_entropy(flat, targets)
    return nn.functional.cross_entropy(flat, targets, reduction="sum") / num_items_in_batch


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Returns the norm of the difference over the norm of the plain gradient, over all parameters."""
    difference = torch.stack([(found[name] - expected[name]).norm() for name in expected]).norm()
    return float(difference / torch.stack([gradient.norm() for gradient in expected.values()]).norm())


def build_model(case: Case) -> GPT2LMHeadModel:
    """Returns the model, equal at each call."""
    torch.manual_seed(0)
    sizes = {"vocab_size": case.words, "n_positions": LENGTH, "n_embd": case.width, "n_layer": case.layers, "n_head": 2}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0, use_cache=False)
    model: GPT2LMHeadModel = GPT2LMHeadModel(config).to(case.dtype)
    model.loss_function = causal_loss
    return model


def make_rows(case: Case) -> list[dict[str, Tensor]]:
    """Returns rows of ``LENGTH`` tokens. The labels after the end of a row are -100."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, case.words, (case.rows, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (case.rows, 1), generator=generator)
    labels = tokens.masked_fill(torch.arange(LENGTH) >= lengths, -100)
    return [{"input_ids": one, "labels": other} for one, other in zip(tokens, labels, strict=True)]
