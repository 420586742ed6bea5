"""The three models of the page about tricks, each with a batch."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

WORDS, LENGTH = 4096, 64


@dataclass(frozen=True)
class Problem:
    """A module with a batch of ``rows`` rows and the loss."""

    name: str
    description: str
    module: nn.Module
    inputs: Tensor
    targets: Tensor


class Encoder(nn.Module):
    """A transformer encoder that classifies sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 64)
        self.layers = nn.Sequential(*[nn.TransformerEncoderLayer(64, 4, 256, 0.1, batch_first=True) for _ in range(4)])
        self.output = nn.Linear(64, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of each sequence."""
        logits: Tensor = self.output(self.layers(self.embedding(tokens)).mean(1))
        return logits


class Block(nn.Module):
    """One layer of the small GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.attention = nn.Linear(width, 3 * width)
        self.hidden, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the hidden states of the next layer."""
        rows, length, width = hidden.shape
        parts = self.attention(self.norms[0](hidden)).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + mixed.transpose(1, 2).reshape(rows, length, width)
        result: Tensor = hidden + self.back(nn.functional.gelu(self.hidden(self.norms[1](hidden))))
        return result


class SmallGPT(nn.Module):
    """A language model whose output has one row per position."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.layers = nn.Sequential(*[Block(width) for _ in range(4)])
        self.output = nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of every position."""
        places = torch.arange(tokens.size(1), device=tokens.device)
        logits: Tensor = self.output(self.layers(self.embedding(tokens) + self.positions(places)).flatten(0, 1))
        return logits


def convnet() -> nn.Sequential:
    """Returns a convolutional network with batch norm."""
    layers: list[nn.Module] = []
    before = 3
    for width, stride in ((32, 1), (32, 1), (64, 2), (64, 1), (128, 2), (128, 1)):
        layers += [nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def problems(rows: int = 32) -> list[Problem]:
    """Returns all three problems."""
    torch.manual_seed(0)
    images, tokens = torch.zeros(rows, 3, 32, 32), torch.zeros(rows, LENGTH, dtype=torch.int64)
    classes = torch.zeros(rows, dtype=torch.int64)
    return [
        Problem("CNN", f"6 convolutions with batch norm and ReLU, {rows} images of 32 x 32", convnet(), images, classes),
        Problem("Transformer encoder", f"4 layers of width 64, {rows} sequences of {LENGTH} words", Encoder(), tokens, classes),
        Problem(
            "Small GPT",
            f"4 layers of width 128, {WORDS} words, {rows} rows of {LENGTH}",
            SmallGPT(),
            tokens,
            torch.zeros(rows * LENGTH, dtype=torch.int64),
        ),
    ]
