"""Models to predict and to measure, each with a criterion and a batch: random weights, small sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, WIDTH, LENGTH = 5000, 128, 128


@dataclass(frozen=True)
class Problem:
    """A module, its criterion and a batch. A tuple of inputs is spread over the arguments of the module."""

    module: nn.Module
    criterion: Callable[..., Any]
    inputs: Any
    targets: Tensor


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Computes the loss of logits whose last dimension is the words."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def tokens(rows: int, length: int = LENGTH, words: int = WORDS) -> Tensor:
    """Returns random words."""
    return torch.randint(words, (rows, length))


def classified_images(module: nn.Module, rows: int, size: int) -> Problem:
    """Returns a problem with random images in ten classes."""
    return Problem(module, nn.CrossEntropyLoss(), torch.randn(rows, 3, size, size), torch.randint(10, (rows,)))


def language_problem(module: nn.Module, rows: int = 4, length: int = LENGTH, words: int = WORDS) -> Problem:
    """Returns a problem with random words."""
    return Problem(module, cross_entropy, tokens(rows, length, words), tokens(rows, length, words))


# Multi-layer perceptron and transformers ---------------------------------------------------------------------------------------


def mlp(rows: int = 512, width: int = 512, depth: int = 6) -> Problem:
    """Returns a multi-layer perceptron."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
    module = nn.Sequential(*layers, nn.Linear(width, 10))
    return Problem(module, nn.CrossEntropyLoss(), torch.randn(rows, width), torch.randint(10, (rows,)))


class Recurrent(nn.Module):
    """Classes of a sequence, from the last step of two recurrent layers."""

    def __init__(self, layer: type[nn.RNNBase], width: int) -> None:
        super().__init__()
        self.layers = layer(width, 2 * width, num_layers=2, batch_first=True)
        self.output = nn.Linear(2 * width, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Computes the logits of each sequence."""
        logits: Tensor = self.output(self.layers(inputs)[0][:, -1])
        return logits


def recurrent(layer: type[nn.RNNBase], rows: int = 32, width: int = 64) -> Problem:
    """Returns two LSTM or GRU layers."""
    module = Recurrent(layer, width)
    return Problem(module, nn.CrossEntropyLoss(), torch.randn(rows, 50, width), torch.randint(10, (rows,)))


class GPTBlock(nn.Module):
    """Attention and two layers, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Computes new hidden states."""
        parts = self.attention(self.norms[0](hidden)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self.merge(mixed)
        result: Tensor = hidden + self.feed(self.norms[1](hidden))
        return result


class GPT(nn.Module):
    """A decoder whose output layer shares the weights of its embedding."""

    def __init__(self, words: int = WORDS, width: int = WIDTH, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList([GPTBlock(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        """Computes the logits of the next words."""
        hidden = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def plain_gpt(rows: int = 4) -> Problem:
    """Returns a GPT without dropout."""
    return language_problem(GPT(), rows)


def encoder(rows: int = 4, words: int = WORDS) -> Problem:
    """Returns a transformer encoder with dropout."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, batch_first=True)
    layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return language_problem(nn.Sequential(nn.Embedding(words, WIDTH), layers, nn.Linear(WIDTH, words)), rows, words=words)


# Convolutional networks --------------------------------------------------------------------------------------------------------


def convolution(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Returns a convolution with a batch norm."""
    weights = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(weights, nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    """A residual block: two convolutions (ResNet-18), or three with fewer channels in the middle one (ResNet-50)."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            layers = [convolution(inputs, width, 1), convolution(width, width, 3, stride), convolution(width, outputs, 1)]
        else:
            layers = [convolution(inputs, width, 3, stride), convolution(width, width, 3)]
        self.layers, self.relu = nn.ModuleList(layers), nn.ReLU(inplace=True)
        self.shortcut = convolution(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, image: Tensor) -> Tensor:
        """Adds the layers to the shortcut."""
        hidden = image
        for layer in self.layers[:-1]:
            hidden = self.relu(layer(hidden))
        result: Tensor = self.relu(self.layers[-1](hidden) + self.shortcut(image))
        return result


def resnet(depths: tuple[int, ...], bottleneck: bool, classes: int = 1000) -> nn.Module:
    """Returns a ResNet with ``depths`` blocks in each stage."""
    blocks: list[nn.Module] = []
    inputs = 64
    for stage, depth in enumerate(depths):
        for index in range(depth):
            width = 64 * 2**stage
            blocks.append(Residual(inputs, width, 2 if stage and not index else 1, bottleneck))
            inputs = 4 * width if bottleneck else width
    stem = nn.Sequential(*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def resnet18(rows: int = 32) -> Problem:
    """Returns a ResNet-18 with small images."""
    return classified_images(resnet((2, 2, 2, 2), bottleneck=False), rows, 64)


def resnet50(rows: int = 16) -> Problem:
    """Returns a ResNet-50 with images of the usual size."""
    return classified_images(resnet((3, 4, 6, 3), bottleneck=True), rows, 224)


class Inverted(nn.Module):
    """The inverted residual block of MobileNetV2, with a depthwise convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inputs
        self.layers = nn.Sequential(
            convolution(inputs, wide, 1),
            nn.ReLU6(inplace=True),
            convolution(wide, wide, 3, stride, groups=wide),
            nn.ReLU6(inplace=True),
            convolution(wide, outputs, 1),
        )
        self.adds = inputs == outputs and stride == 1

    def forward(self, image: Tensor) -> Tensor:
        """Adds the layers to the image if the shapes match."""
        hidden: Tensor = self.layers(image)
        return image + hidden if self.adds else hidden


def mobilenet(rows: int = 8) -> Problem:
    """Returns a network like MobileNetV2."""
    widths = [(32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    blocks = [Inverted(*each) for each in widths]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    return classified_images(nn.Sequential(convolution(3, 32, 3, 2), nn.ReLU6(inplace=True), *blocks, *head), rows, 64)


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution of 7 x 7, and two layers per pixel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spread, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, image: Tensor) -> Tensor:
        """Adds the layers to the image."""
        pixels = self.spread(image).permute(0, 2, 3, 1)
        result: Tensor = image + self.feed(self.norm(pixels)).permute(0, 3, 1, 2)
        return result


def convnext(rows: int = 8) -> Problem:
    """Returns a network like ConvNeXt."""
    blocks = [ConvNeXtBlock(64), ConvNeXtBlock(64), nn.Conv2d(64, 128, 2, 2), ConvNeXtBlock(128), ConvNeXtBlock(128)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    return classified_images(nn.Sequential(nn.Conv2d(3, 64, 4, 4), *blocks, *head), rows, 64)


class UNet(nn.Module):
    """A U-Net with three levels and skip connections."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64), classes: int = 10) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.pair(*each) for each in zip((3, *widths), (*widths, 2 * widths[-1]), strict=True)])
        up = [(2 * widths[-1], widths[-1]), *zip(widths[:0:-1], widths[-2::-1], strict=True)]
        self.rise = nn.ModuleList([nn.ConvTranspose2d(inputs, outputs, 2, 2) for inputs, outputs in up])
        self.up = nn.ModuleList([self.pair(2 * outputs, outputs) for _, outputs in up])
        self.head = nn.Conv2d(widths[0], classes, 1)

    @staticmethod
    def pair(inputs: int, outputs: int) -> nn.Module:
        """Returns two convolutions."""
        relu = nn.ReLU(inplace=True)
        return nn.Sequential(convolution(inputs, outputs, 3), relu, convolution(outputs, outputs, 3), relu)

    def forward(self, image: Tensor) -> Tensor:
        """Computes the logits of each pixel."""
        kept = []
        for index, pair in enumerate(self.down):
            image = pair(image if index == 0 else F.max_pool2d(image, 2))
            kept.append(image)
        for rise, pair, skipped in zip(self.rise, self.up, kept[-2::-1], strict=True):
            image = pair(torch.cat([skipped, rise(image)], 1))
        logits: Tensor = self.head(image)
        return logits


def unet(rows: int = 8, size: int = 64) -> Problem:
    """Returns a U-Net with a class per pixel."""
    images, classes = torch.randn(rows, 3, size, size), torch.randint(10, (rows, size, size))
    return Problem(UNet(), nn.CrossEntropyLoss(), images, classes)
