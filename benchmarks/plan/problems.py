"""Models that people plan for, on the meta device, as ``--problem`` takes them."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from balanced_parallel import DataParallelCriterion

LENGTH = 1024


class Block(nn.Module):
    """A block of a transformer in plain torch."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns hidden states."""
        rows, length, width = hidden.shape
        parts = self.attention(self.norms[0](hidden)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(rows, length, width))
        return hidden + self.layers(self.norms[1](hidden))


class PlainGPT(nn.Module):
    """A GPT in plain torch."""

    def __init__(self, width: int = 1600, depth: int = 48, heads: int = 25, words: int = 50257) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits ``[rows, words, positions]``."""
        hidden = self.words(tokens) + self.places.weight[: tokens.size(1)]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden)).transpose(1, 2)


def plain() -> tuple[Any, ...]:
    """A GPT of 1.5 billion parameters in plain torch."""
    tokens = torch.zeros(4, LENGTH, dtype=torch.int64)
    return PlainGPT(), nn.CrossEntropyLoss(), tokens, tokens


def causal(model: nn.Module, length: int = LENGTH) -> tuple[Any, ...]:
    """Returns the problem of a model of transformers that computes its own loss."""
    tokens = torch.zeros(4, length, dtype=torch.int64)
    criterion = DataParallelCriterion(lambda out, labels: out.loss, weight=lambda out, labels: (labels[:, 1:] != -100).sum())
    return model, criterion, {"input_ids": tokens, "labels": tokens}, tokens


def small() -> tuple[Any, ...]:
    """GPT-2 small."""
    return causal(GPT2LMHeadModel(GPT2Config()))


def xl() -> tuple[Any, ...]:
    """GPT-2 XL."""
    return causal(GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=48, n_head=25)))


def llama() -> tuple[Any, ...]:
    """Llama 3 8B."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    config = LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, use_cache=False)
    return causal(LlamaForCausalLM(config))


def lora() -> tuple[Any, ...]:
    """Qwen3 8B in bf16 with LoRA of rank 16 on the four projections of attention, and sequences of 2,048 tokens."""
    from peft import LoraConfig, get_peft_model

    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936, "head_dim": 128}
    config = Qwen3Config(**sizes, num_attention_heads=32, num_key_value_heads=8, use_cache=False)
    adapters = LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    return causal(get_peft_model(Qwen3ForCausalLM(config).to(torch.bfloat16), adapters), 2 * LENGTH)
