"""Four models that people train, on the meta device, with a batch of eight rows."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

ROWS = 8


class Logits(nn.Module):
    """A model of transformers that returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns logits ``[rows, classes]``."""
        logits: Tensor = self.model(inputs).logits
        return logits


class Words(Logits):
    """A language model that returns its logits as ``nn.CrossEntropyLoss`` takes them."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns logits ``[rows, words, positions]``."""
        return super().forward(inputs).transpose(1, 2)


def gpt2() -> tuple[Any, ...]:
    """GPT-2 small, 1,024 tokens a row."""
    tokens = torch.zeros(ROWS, 1024, dtype=torch.int64)
    return Words(GPT2LMHeadModel(GPT2Config(use_cache=False))), nn.CrossEntropyLoss(), tokens, tokens


def gpt2_with_loss() -> tuple[Any, ...]:
    """The same, which computes its own loss, as ``replace_lm_head`` needs it."""
    tokens = torch.zeros(ROWS, 1024, dtype=torch.int64)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False))
    return model, lambda output, labels: output.loss, {"input_ids": tokens, "labels": tokens}, tokens


def bert() -> tuple[Any, ...]:
    """BERT-base with two classes, 512 tokens a row."""
    inputs, targets = torch.zeros(ROWS, 512, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int64)
    return Logits(BertForSequenceClassification(BertConfig(num_labels=2))), nn.CrossEntropyLoss(), inputs, targets


def vit() -> tuple[Any, ...]:
    """ViT-B/16 with 1,000 classes, images of 224 x 224."""
    inputs, targets = torch.zeros(ROWS, 3, 224, 224), torch.zeros(ROWS, dtype=torch.int64)
    return Logits(ViTForImageClassification(ViTConfig(num_labels=1000))), nn.CrossEntropyLoss(), inputs, targets


def resnet() -> tuple[Any, ...]:
    """ResNet-50 with 1,000 classes, images of 224 x 224."""
    inputs, targets = torch.zeros(ROWS, 3, 224, 224), torch.zeros(ROWS, dtype=torch.int64)
    return Logits(ResNetForImageClassification(ResNetConfig(num_labels=1000))), nn.CrossEntropyLoss(), inputs, targets


MODELS = {
    "GPT-2 small, 1,024 tokens": gpt2,
    "BERT-base, 512 tokens": bert,
    "ViT-B/16, 224 x 224": vit,
    "ResNet-50, 224 x 224": resnet,
}
