"""The two tasks of train.py: data that is on every machine, a small network, a loss, and a baseline to beat.

Rows are tensors: ``inputs[i]`` and ``targets[i]`` belong together. No layer mixes rows, so the split cannot change the result.
"""

import collections
import functools
import hashlib
import math
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from balanced_parallel import gather

CONTEXT = 64  # words of a row, in text without functions and classes
LONGEST = 128  # words of a row at most
PADDING, IGNORED = 0, -100  # after the words of a row, in inputs and in targets
DEFINITION = re.compile(r"^(?=[ \t]*(?:async def|def|class)\b)", re.MULTILINE)
VOCABULARY = 8192  # words, by default: most of the memory is then the output layer


@dataclass(frozen=True)
class Rows(Dataset[tuple[Tensor, Tensor]]):
    """A data set of whole batches. A batch may be empty, which torch's default collation does not support."""

    inputs: Tensor
    targets: Tensor

    @property
    def lengths(self) -> list[int] | None:
        """The number of words of each row; None if rows have no padding."""
        return None if self.targets.dim() == 1 else (self.targets != IGNORED).sum(1).tolist()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.inputs[row], self.targets[row]

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        index = torch.tensor(rows, dtype=torch.long)
        return self.inputs[index], self.targets[index]


@dataclass(frozen=True)
class Task:
    """Data, module and settings of a task."""

    description: str
    module: nn.Module
    train: Rows
    validation: Rows
    learning_rate: float
    steps: int
    baseline: float | None = None  # a loss that training must beat
    classifies: bool = False  # accuracy is meaningful


class LanguageModel(nn.Module):
    """A causal transformer over words. Its logits have the layout of ``nn.CrossEntropyLoss``: [rows, words, positions]."""

    def __init__(self, words: int, width: int = 128, layers: int = 2, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.position = nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.output = nn.Linear(width, words)
        for embedding in (self.embedding, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Computes the logits of the next word at each position of ``tokens`` [rows, positions]."""
        length = tokens.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(length, tokens.device)
        hidden = self.embedding(tokens) + self.position.weight[:length]
        logits: Tensor = self.output(self.layers(hidden, mask, is_causal=True))
        return logits.transpose(1, 2)


class DigitClassifier(nn.Sequential):
    """A small convolutional network. Group norm, because batch norm would mix the rows of a shard."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.GroupNorm(4, 64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(64 * 2 * 2, 10),
        )


def text_task(data: Path | None, vocabulary: int | None, dropout: float = 0.0) -> Task:
    """Predicts the next word of the sources of Python's standard library, or of ``data`` (a file or a folder).

    Raises:
        OSError: ``data`` cannot be read.
        ValueError: the text is too short, or has fewer different words than ``vocabulary``.
    """
    texts = split_text(read_text(data))
    counts = collections.Counter(word for words in texts for word in words)
    if vocabulary is not None and vocabulary > len(counts) + 2:
        raise ValueError(f"a vocabulary of {vocabulary} is larger than the text, which has {len(counts)} different words")
    kept = counts.most_common((vocabulary or min(VOCABULARY, len(counts) + 2)) - 2)
    index = {word: number for number, (word, _) in enumerate(kept, 2)}  # 0 is padding, 1 every other word
    if len(texts) < 20:
        raise ValueError(
            f"the text has {len(texts)} rows of {counts.total()} words, expected at least {20 * (CONTEXT + 1)} words"
        )
    rows = [torch.tensor([index.get(word, 1) for word in words]) for words in texts]
    pad = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True)
    inputs, targets = pad([row[:-1] for row in rows]), pad([row[1:] for row in rows], padding_value=IGNORED)
    held_out = torch.arange(len(rows)) % 20 == 19
    train, validation = Rows(inputs[~held_out], targets[~held_out]), Rows(inputs[held_out][:128], targets[held_out][:128])
    size = len(index) + 2
    mean = sum(map(len, rows)) / len(rows) - 1
    description = f"text: {counts.total():,} words, {size:,} of them different, rows of {mean:.0f} and at most {inputs.size(1)}"
    return Task(
        description,
        LanguageModel(size, dropout=dropout),
        train,
        validation,
        learning_rate=3e-3,
        steps=200,
        baseline=unigram_loss(train.targets, validation.targets, size),
    )


def split_text(text: str) -> list[list[str]]:
    """Returns the words of each function and class, or blocks of a text that has none. Long ones are cut."""
    parts = DEFINITION.split(text)
    size = (CONTEXT if len(parts) == 1 else LONGEST) + 1
    rows = []
    for part in parts:
        words = re.findall(r"\w+|[^\w\s]", part)
        rows += [words[start : start + size] for start in range(0, len(words) - 1, size)]
    return [row for row in rows if len(row) > 1]


def count_words(inputs: Tensor) -> Tensor:
    """Returns the number of words in each row."""
    return (inputs != PADDING).sum(1)


def read_text(data: Path | None) -> str:
    """Returns the text of a file, of the UTF-8 files in a folder, or of the standard library, in the order of their paths."""
    if data is not None and not data.is_dir():
        try:
            return data.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{data} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py") if data is None else data.rglob("*"))
    texts = []
    for path in paths:
        if path.is_file():
            try:
                texts.append(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                print(f"skipped {path}: not UTF-8 text")
    return "\n".join(texts)


def check_same_data(task: Task) -> None:
    """Compares the data of all ranks, whose rows would otherwise not be those of one data set.

    Raises:
        ValueError: on every rank, if they differ.
    """
    parts = (task.train.inputs, task.train.targets, task.validation.inputs, task.validation.targets)
    digest = hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in parts)).hexdigest()[:12]
    digests = gather([[digest]], "cpu")  # one of each rank
    if len(set(digests)) > 1:
        found = ", ".join(f"{digest} on rank {rank}" for rank, digest in enumerate(digests))
        raise ValueError(f"the data differ, expected the same on all hosts: {found}; check --data and --vocabulary")


def unigram_loss(train: Tensor, validation: Tensor, size: int) -> float:
    """Returns the validation loss (nats per word) of a unigram model with add-one smoothing."""
    train, validation = train[train != IGNORED], validation[validation != IGNORED]
    counts = torch.bincount(train.flatten(), minlength=size).double() + 1
    return float(-(counts / counts.sum()).log()[validation.flatten()].mean())


def digits_task(dropout: float = 0.0) -> Task:
    """Classifies scikit-learn's 1,797 handwritten digits of 8 x 8 pixels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    targets = torch.tensor(labels)
    held_out = torch.arange(len(inputs)) % 5 == 4
    return Task(
        f"digits: {len(inputs):,} images of 8 x 8 pixels in 10 classes",
        DigitClassifier(dropout),
        Rows(inputs[~held_out], targets[~held_out]),
        Rows(inputs[held_out], targets[held_out]),
        learning_rate=3e-3,
        steps=300,
        baseline=math.log(10),
        classifies=True,
    )
