"""Rows of unequal length: functions of the standard library as text, and images of different sizes."""

import ast
import collections
import re
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, LONGEST = 512, 512


@dataclass(frozen=True)
class Problem:
    """A module with samples that cost differently.

    Attributes:
        cost: of a sample: its words, or its pixels.
        collate: makes a padded batch of samples: inputs and targets.
    """

    name: str
    unit: str
    description: str
    make: Callable[[], nn.Module]
    criterion: nn.Module
    samples: Sequence[Any]
    cost: Callable[[Any], int]
    collate: Callable[[list[Any]], tuple[Any, Tensor]]


# Text --------------------------------------------------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """A causal transformer. Its logits are [rows, words, positions]."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(WORDS, width), nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Computes the logits of the next word. Padding is on the right, where a causal mask hides it."""
        length = tokens.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(length, tokens.device, self.output.weight.dtype)
        hidden = self.embedding(tokens) + self.position.weight[:length]
        logits: Tensor = self.output(self.layers(hidden, mask, is_causal=True))
        return logits.transpose(1, 2)


def functions_of_the_standard_library() -> list[list[str]]:
    """Returns the words of every function in the modules of the standard library, longer ones cut."""
    found: list[list[str]] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                found.append(re.findall(r"\w+|[^\w\s]", body)[: LONGEST + 1])
    return found


def pad_text(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns words and the words after them. Padding is not counted."""
    inputs = nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True)
    return inputs, nn.utils.rnn.pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=-100)


def words_before_the_last(row: Tensor) -> int:
    """Returns the length of the inputs of a row."""
    return len(row) - 1


def text_problem() -> Problem:
    """Returns a language model of source code."""
    functions = functions_of_the_standard_library()
    counts = collections.Counter(word for words in functions for word in words)
    index = {word: number for number, (word, _) in enumerate(counts.most_common(WORDS - 1), 1)}
    rows = [torch.tensor([index.get(word, 0) for word in words]) for words in functions]
    lengths = torch.tensor([len(row) - 1 for row in rows], dtype=torch.float64)
    description = (
        f"{len(rows):,} functions of the standard library, of {lengths.mean():.0f} words (99th percentile "
        f"{lengths.quantile(0.99):.0f}, at most {LONGEST}); a causal transformer of width 32 with {WORDS} logits per word"
    )
    criterion = nn.CrossEntropyLoss(ignore_index=-100)
    return Problem("Text", "words", description, LanguageModel, criterion, rows, words_before_the_last, pad_text)


# Images ------------------------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Convolutions that see zeros beyond the border of each image, padded or not."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(inputs, width, 3, padding=1) for inputs in (3, width, width)])
        self.output = nn.Linear(width, classes)

    def forward(self, images: Tensor, sides: Tensor) -> Tensor:
        """Computes the logits of padded images [rows, 3, side, side] with ``sides`` pixels per side."""
        inside = torch.arange(images.size(-1), device=images.device) < sides[:, None]
        mask = (inside[:, None, :, None] & inside[:, None, None, :]).to(images.dtype)
        for layer in self.layers:
            images = F.relu(layer(images)) * mask
        logits: Tensor = self.output(images.sum((2, 3)) / mask.sum((2, 3)))
        return logits


def pad_images(samples: list[tuple[Tensor, int]]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Returns square images, padded to the largest of them, with their sides, and their classes."""
    sides = [image.size(-1) for image, _ in samples]
    padded = [F.pad(image, (0, max(sides) - side, 0, max(sides) - side)) for (image, _), side in zip(samples, sides, strict=True)]
    return (torch.stack(padded), torch.tensor(sides)), torch.tensor([label for _, label in samples])


def pixels(sample: tuple[Tensor, int]) -> int:
    """Returns the pixels of an image."""
    return sample[0].size(-1) ** 2


def image_problem() -> Problem:
    """Returns a classifier of square images. Their sides are log-normal, as in collections of photographs."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.empty(2000).log_normal_(3.6, 0.5, generator=generator).clamp(12, 128)
    samples = [(torch.rand(3, side, side, generator=generator), side % 10) for side in map(int, drawn)]
    description = "2,000 images of random pixels with log-normal sides of 12 to 128; three masked convolutions of width 16"
    return Problem("Images", "pixels", description, Classifier, nn.CrossEntropyLoss(), samples, pixels, pad_images)
