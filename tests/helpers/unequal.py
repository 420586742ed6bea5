"""Batches of rows of unequal length, models for them, and the plain program on the whole padded batch."""

import copy

import torch
from helpers.optimizers import sgd
from helpers.problems import assert_equal, gradients
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from balanced_parallel import ByCost, DataParallelCriterion, DataParallelModel, TrainStep

LENGTHS = [3, 17, 5, 2, 9, 4, 4, 30, 1, 6, 7]
WORDS = 20
TAGS = 5


def make_samples(lengths=LENGTHS):
    """One sample per length: words and a tag for each, some of them not to be counted."""
    numbers = torch.Generator().manual_seed(5)
    samples = []
    for length in lengths:
        words, tags = (
            torch.randint(1, limit, (length,), generator=numbers) for limit in (WORDS, TAGS)
        )
        tags[length // 2 :: 7] = -100
        samples.append({"words": words, "tags": tags})
    return samples


def length_of(sample):
    return len(sample["words"])


def pad(samples):
    words = pad_sequence([sample["words"] for sample in samples], batch_first=True)
    tags = pad_sequence(
        [sample["tags"] for sample in samples], batch_first=True, padding_value=-100
    )
    return {
        "words": words,
        "lengths": torch.tensor([length_of(sample) for sample in samples]),
    }, tags


class Transformer(nn.Module):
    """Attention that leaves the padding out."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.tags = nn.Linear(8, TAGS)

    def forward(self, words, lengths):
        is_padding = torch.arange(words.size(1), device=words.device) >= lengths[:, None]
        return self.tags(self.layer(self.words(words), src_key_padding_mask=is_padding)).transpose(
            1, 2
        )


class Recurrent(nn.Module):
    """A bidirectional LSTM over packed sequences."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 6, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(12, TAGS)

    def forward(self, words, lengths):
        packed = pack_padded_sequence(
            self.words(words), lengths, batch_first=True, enforce_sorted=False
        )
        states, _ = pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=words.size(1)
        )
        return self.tags(states).transpose(1, 2)


def build(kind=Transformer):
    torch.manual_seed(1)
    return kind()


def make_step(net, devices=("cpu",) * 3, criterion=None, lr=0.0, **settings):
    model = DataParallelModel(net, list(devices))
    criterion = criterion or DataParallelCriterion(nn.CrossEntropyLoss())
    return TrainStep(model, criterion, sgd(net, lr=lr), **with_cut(**settings))


def plain(net, samples):
    """Returns the loss, the gradients and the outputs of a copy of ``net`` on the whole padded batch."""
    net = copy.deepcopy(net)
    inputs, tags = pad(samples)
    outputs = net(**inputs)
    loss = nn.functional.cross_entropy(outputs, tags)
    loss.backward()
    return loss.detach(), gradients(net), outputs.detach()


def assert_same_rows(found, expected, samples):
    """The entries of each row that are not padding."""
    for row, sample in enumerate(samples):
        length = length_of(sample)
        assert_equal(found[row, ..., :length], expected[row, ..., :length])


def with_cut(*, cost=None, collate=pad, combine=None, limit=None, **settings):
    """Returns the settings of a step, with a ByCost of those that are its arguments."""
    if cost is None:
        return settings
    return {
        "cut": ByCost(cost, collate=collate, combine=combine, limit=limit),
        **settings,
    }
