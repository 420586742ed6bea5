"""Six models of transformers, with random weights and the dropout of their configurations."""

from typing import Any

import torch
from models import LENGTH, WIDTH, WORDS, Problem, cross_entropy, language_problem, tokens
from torch import Tensor, nn

SIZES: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": WIDTH, "num_attention_heads": 4}


class Logits(nn.Module):
    """A model of transformers with positional arguments, whose output is the logits."""

    def __init__(self, model: Any, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        """Computes the logits."""
        logits: Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).logits
        return logits


def gpt2(rows: int = 4, length: int = LENGTH, **sizes: Any) -> Problem:
    """Makes a GPT-2 with ``sizes`` of a ``GPT2Config``. The default is GPT-2 small."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(**sizes, use_cache=False)
    return language_problem(Logits(GPT2LMHeadModel(config), "input_ids"), rows, length, config.vocab_size)


def small_gpt2(rows: int = 4) -> Problem:
    """Returns a GPT-2 with the sizes of the other models."""
    return gpt2(rows, n_layer=4, n_embd=WIDTH, n_head=4, vocab_size=WORDS, n_positions=LENGTH)


def bert(rows: int = 16) -> Problem:
    """Returns a BERT that classifies rows of words."""
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(**SIZES, intermediate_size=512, vocab_size=WORDS))
    return Problem(Logits(model, "input_ids"), nn.CrossEntropyLoss(), tokens(rows), torch.randint(2, (rows,)))


def vit(rows: int = 32) -> Problem:
    """Returns a ViT that classifies images."""
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(**SIZES, intermediate_size=512, image_size=64, patch_size=8))
    images, classes = torch.randn(rows, 3, 64, 64), torch.randint(2, (rows,))
    return Problem(Logits(model, "pixel_values"), nn.CrossEntropyLoss(), images, classes)


def llama(rows: int = 4) -> Problem:
    """Returns a Llama with grouped-query attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=344, vocab_size=WORDS, use_cache=False)
    return language_problem(Logits(LlamaForCausalLM(config), "input_ids"), rows)


def t5(rows: int = 4) -> Problem:
    """Returns a T5 with an encoder and a decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": WIDTH, "d_ff": 512, "d_kv": 32, "num_heads": 4, "num_layers": 3, "vocab_size": WORDS}
    module = Logits(T5ForConditionalGeneration(T5Config(**sizes, use_cache=False)), "input_ids", "decoder_input_ids")
    return Problem(module, cross_entropy, (tokens(rows, 64), tokens(rows, 64)), tokens(rows, 64))


def whisper(rows: int = 4) -> Problem:
    """Returns a Whisper with random spectra."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers: dict[str, Any] = {
        f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 3), ("ffn_dim", 512))
    }
    heads: dict[str, Any] = {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    places: dict[str, Any] = {"num_mel_bins": 40, "max_source_positions": 100, "max_target_positions": 64}
    ends: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(**layers, **heads, **places, **ends, d_model=WIDTH, vocab_size=WORDS, use_cache=False)
    module = Logits(WhisperForConditionalGeneration(config), "input_features", "decoder_input_ids")
    return Problem(module, cross_entropy, (torch.randn(rows, 40, 200), tokens(rows, 32)), tokens(rows, 32))
