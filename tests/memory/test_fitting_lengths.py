"""Rows of any length: the budget of cost within which every shard fits."""

import pytest
import torch
from helpers.memory_problems import VOCABULARY, LanguageModel
from torch import nn
from torch.nn import functional as F

from balanced_parallel import BalancedOptimizer, ByCost, DataParallelCriterion, DataParallelModel, TrainStep, memory, simulate

LONGEST = 32


def batch(rows, length=LONGEST):
    return torch.zeros(rows, length, dtype=torch.int64), torch.zeros(rows, length, dtype=torch.int64)


def words_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY), nn.Flatten(0, 1))


def words_loss(output, targets):
    return F.cross_entropy(output, targets.flatten())


def make_step(devices, **settings):
    model = DataParallelModel(words_net(), devices)
    criterion = DataParallelCriterion(words_loss, weight=lambda output, targets: targets.numel())
    settings = {"cut": ByCost(len, collate=pad)} | settings
    return TrainStep(model, criterion, BalancedOptimizer(model, torch.optim.AdamW), **settings)


def pad(texts):
    padded = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return padded, padded


def texts(budget, length, shards):
    """Returns as many rows of a length as fill ``shards`` shards."""
    return [torch.arange(length) % VOCABULARY] * (shards * (budget // length))


def runs(step, budget, length):
    try:
        step(texts(budget, length, 4))
    except torch.OutOfMemoryError:
        return False
    return True


@pytest.mark.slow
def test_shards_within_the_budget_run_and_larger_ones_do_not():
    """Two devices, two micro-batches, and shards of every kind: few long rows, many short ones."""
    with simulate(2, "3MiB"):
        step = make_step(None)
        report = memory.fit(step, *batch(2), lengths=(1, LONGEST))
        budget = step.micro_batch_cost
        assert budget > 3 * LONGEST
        assert report.rows == 2 * budget / LONGEST
        with pytest.raises(ValueError, match=f"not one row of {LONGEST} fits: one row per device needs "):
            memory.fit(step, *batch(2), lengths=(1, LONGEST), capacity="100KiB")
        assert all(runs(step, budget, length) for length in (1, 2, 7, 17, LONGEST))
        step.micro_batch_cost = 1.3 * budget
        assert not all(runs(step, int(1.3 * budget), length) for length in (1, 2, 7, 17, LONGEST))


def test_invalid_lengths_raise_an_error():
    step = make_step(["cpu"])
    for lengths in ((0, 8), (8, 9), (8, 4)):
        with pytest.raises(ValueError, match=r"expected \(shortest, longest\), such as \(1, 512\)"):
            memory.fit(step, *batch(2), capacity="1GiB", lengths=lengths)
    for trim in (0, 2):
        with pytest.raises(ValueError, match=f"trim={trim}, expected the dimension of the lengths"):
            memory.fit(step, *batch(2), capacity="1GiB", lengths=(1, 8), trim=trim)


class OtherOperators(LanguageModel):
    """Adds an operator for long rows."""

    def forward(self, tokens):
        logits = super().forward(tokens)
        return logits.relu() if tokens.shape[1] > 16 else logits


@pytest.mark.slow
def test_other_operators_at_other_lengths_count():
    budgets = []
    with simulate(1):
        for kind in (LanguageModel, OtherOperators):
            model = DataParallelModel(kind(layers=1))
            cut = ByCost(len, collate=pad)
            step = TrainStep(model, DataParallelCriterion(nn.CrossEntropyLoss()), torch.optim.AdamW(model.parameters()), cut=cut)
            memory.fit(step, *batch(2), capacity="8MiB", lengths=(1, LONGEST))
            budgets.append(step.micro_batch_cost)
    plain, other = budgets
    assert 0 < other < plain


def test_the_step_must_be_limited_by_cost():
    model = DataParallelModel(LanguageModel(layers=1), ["cpu"])
    for settings, lengths, message in (
        ({}, (1, 8), r"limited by rows.* give TrainStep\(cut=ByCost\(...\)\)"),
        ({"cut": ByCost(len, collate=pad)}, None, r"limited by cost.* give lengths=\(shortest, longest\)"),
    ):
        optimizer = torch.optim.SGD(model.parameters())
        step = TrainStep(model, DataParallelCriterion(nn.CrossEntropyLoss()), optimizer, **settings)
        with pytest.raises(ValueError, match=message):
            memory.fit(step, *batch(2), capacity="1GiB", lengths=lengths)
