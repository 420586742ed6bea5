"""The two tasks of train.py: their flags, data that is on every machine, a small network, and a baseline for its loss.

Rows are tensors: ``inputs[i]`` and ``targets[i]`` belong together. No layer mixes rows, so the split cannot change the result.
"""

import argparse
import collections
import contextlib
import functools
import hashlib
import math
import re
import signal
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from balanced_parallel import BalancedBatchSampler, ByCost, DataParallelCriterion, Precision, RankBatchSampler, gather

CONTEXT = 64  # words of a row, in text without functions and classes
LONGEST = 128  # words of a row at most
IGNORED = -100  # after the words of a row, in targets
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
    """A network and its data.

    Attributes:
        baseline: the loss of a model that ignores its inputs, on the validation rows.
    """

    description: str
    module: nn.Module
    train: Rows
    validation: Rows
    baseline: float

    @property
    def cut(self) -> ByCost | None:
        """The cut of a step: rows of equal cost for each device, padded to its own longest. None for rows without padding."""
        return ByCost(lambda sample: int((sample[1] != IGNORED).sum()), collate=join) if self.train.lengths else None

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batch_size: int, precision: Literal["fp32", "bf16", "fp16"]) -> dict[str, float]:
        """Returns the loss over all validation rows of all ranks, the baseline beside it, and the accuracy of a classifier."""
        criterion = DataParallelCriterion(nn.CrossEntropyLoss(reduction="none"), precision=Precision(precision))
        model.eval()
        losses, hits = [], []
        for inputs, targets in make_loader(self.validation, RankBatchSampler(self.validation, batch_size)):
            outputs = model(inputs)
            predictions, labels = gather([output.argmax(1) for output in outputs], "cpu"), gather([targets], "cpu")
            counted = labels != IGNORED
            losses.append(gather([*criterion(outputs, targets)], "cpu")[counted])
            hits.append((predictions == labels)[counted])
        model.train()
        results = {"validation_loss": torch.cat(losses).double().mean().item(), "baseline_loss": self.baseline}
        return results if self.train.lengths else {**results, "accuracy": torch.cat(hits).double().mean().item()}


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the tasks."""
    add, natural = parser.add_argument, functools.partial(count, at_least=0)
    add("--task", choices=["text", "digits"], default="text", help="what to learn (default: text)")
    add("--data", type=Path, metavar="FILE_OR_FOLDER", help="text to learn (default: Python's standard library)")
    add("--vocabulary", type=count, metavar="N", help="words of the text task (default: 8192, or all of a small text)")
    add("--dropout", type=float, default=0.0, metavar="P", help="rate in the network (default: none)")
    add("--batch-size", type=count, default=24, metavar="N", help="rows per update, over all devices and ranks (default: 24)")
    add("--seed", type=natural, default=0, metavar="N", help="of the weights and of the order of rows (default: 0)")
    add("--workers", type=natural, default=0, metavar="N", help="processes that load data, per rank (default: 0)")


def count(text: str, at_least: int = 1) -> int:
    """Parses a whole number."""
    if not text.isdecimal() or int(text) < at_least:
        raise argparse.ArgumentTypeError(f"{text!r} was given, expected a whole number of at least {at_least}")
    return int(text)


@contextlib.contextmanager
def one_line(code: int, *kinds: type[Exception]) -> Iterator[None]:
    """Ends the program with one line on stderr for some kinds of errors, and for Ctrl-C."""
    try:
        yield
    except kinds as error:
        advice = "Give --micro-batch-size auto, fewer rows or more --memory." * isinstance(error, torch.OutOfMemoryError)
        print("train.py: error:", *str(error).split(), *advice.split(), file=sys.stderr)
        sys.exit(code)
    except KeyboardInterrupt:
        print("stopped by Ctrl-C: nothing was saved, except by --checkpoint-every", file=sys.stderr)
        sys.exit(130)


def load_task(flags: argparse.Namespace) -> Task:
    """Returns the task that the flags name.

    Raises:
        OSError, ValueError: the data cannot be read; a flag does not suit them.
    """
    if flags.task == "text":
        return text_task(flags.data, flags.vocabulary, flags.dropout)
    if flags.data or flags.vocabulary:
        raise ValueError("--data and --vocabulary are for --task text")
    return digits_task(flags.dropout)


def make_batches(rows: Rows, flags: argparse.Namespace) -> RankBatchSampler:
    """Returns the rows of each batch for this rank: of equal cost if rows have padding, or whole micro-batches for bits."""
    if flags.reproducible == "bits":
        return RankBatchSampler(rows, flags.batch_size, flags.seed, micro_batch_size=flags.micro_batch_size)
    settings = flags.batch_size, flags.seed
    return BalancedBatchSampler(rows.lengths, *settings) if rows.lengths else RankBatchSampler(rows, *settings)


def make_loader(rows: Rows, batches: RankBatchSampler, workers: int = 0) -> DataLoader[Any]:
    """Returns a loader of this rank's rows, with as many processes as ``workers``."""
    return DataLoader(
        rows,
        batch_sampler=batches,
        collate_fn=tuple,
        num_workers=workers,
        pin_memory=torch.accelerator.is_available(),
        persistent_workers=workers > 0,
        # A signal to all processes would end the server that starts them by default since Python 3.14, and then them.
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        generator=torch.Generator(),  # the default one would advance that of dropout in each epoch
        worker_init_fn=ignore_signals,
    )


def ignore_signals(worker: int) -> None:
    """Leaves SIGTERM and Ctrl-C to the process that trains. A scheduler and a terminal send them to all."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


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
    size, mean = len(index) + 2, sum(map(len, rows)) / len(rows) - 1
    description = f"text: {counts.total():,} words, {size:,} of them different, rows of {mean:.0f} and at most {inputs.size(1)}"
    baseline = unigram_loss(train.targets, validation.targets, size)
    return Task(description, LanguageModel(size, dropout=dropout), train, validation, baseline)


def split_text(text: str) -> list[list[str]]:
    """Returns the words of each function and class, or blocks of a text that has none. Long ones are cut."""
    parts = DEFINITION.split(text)
    size = (CONTEXT if len(parts) == 1 else LONGEST) + 1
    rows = []
    for part in parts:
        words = re.findall(r"\w+|[^\w\s]", part)
        rows += [words[start : start + size] for start in range(0, len(words) - 1, size)]
    return [row for row in rows if len(row) > 1]


def join(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Returns the inputs and the targets of rows, without the padding that all of them have."""
    inputs, targets = map(torch.stack, zip(*samples, strict=True))
    longest = int((targets != IGNORED).sum(1).max())
    return inputs[:, :longest], targets[:, :longest]


def read_text(data: Path | None) -> str:
    """Returns the text of a file, of the UTF-8 files in a folder, or of the standard library, in the order of their paths."""
    if data is not None and not data.is_dir():
        return data.read_text(encoding="utf-8")
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py") if data is None else data.rglob("*"))
    texts = []
    for path in filter(Path.is_file, paths):
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
    inputs, targets = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    held_out = torch.arange(len(inputs)) % 5 == 4
    train, validation = (Rows(inputs[rows], targets[rows]) for rows in (~held_out, held_out))
    description = f"digits: {len(inputs):,} images of 8 x 8 pixels in 10 classes"
    return Task(description, DigitClassifier(dropout), train, validation, baseline=math.log(10))
