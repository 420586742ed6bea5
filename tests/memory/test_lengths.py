"""Rows of any length: their peaks, and the budget of cost within which every shard fits."""

import pytest
import torch
from helpers.memory_problems import VOCABULARY, LanguageModel
from helpers.slow import slow
from torch import nn
from torch.nn import functional as F

from balanced_parallel import BalancedOptimizer, ByCost, DataParallelCriterion, DataParallelModel, TrainStep, memory, simulate

LONGEST = 32


def batch(rows, length=LONGEST):
    return torch.zeros(rows, length, dtype=torch.int64), torch.zeros(rows, length, dtype=torch.int64)


def estimate(rows, length, **settings):
    net = LanguageModel(dropout=0.1, layers=1)
    return memory.estimate(net, F.cross_entropy, *batch(rows, length), **{"device_kind": "cpu"} | settings)


@pytest.mark.parametrize(("kind", "precision"), [("cpu", "fp32"), slow("h200", "bf16")])
def test_peaks_of_other_lengths_equal_direct_estimates(kind, precision, one_trace):
    report = estimate(2, LONGEST, lengths=(1, LONGEST), device_kind=kind, precision=precision)
    for rows, length in [(3, 23), (40, 3), (2, 80)]:
        direct = estimate(rows, length, device_kind=kind, precision=precision).allocated
        assert report.at(rows, length) == pytest.approx(direct, rel=1e-4), (rows, length)


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
        assert report.micro_batch_cost == report.largest_cost("3MiB") == budget
        assert report.largest_cost("100KiB") == 0
        assert all(runs(step, budget, length) for length in (1, 2, 7, 17, LONGEST))
        step.micro_batch_cost = 1.3 * budget
        assert not all(runs(step, int(1.3 * budget), length) for length in (1, 2, 7, 17, LONGEST))


def test_plans_have_the_budget_of_the_choice_that_fits():
    net = words_net()
    settings = {"batch_size": 64, "device_kind": "sim", "lengths": (1, LONGEST)}
    plan = memory.plan(net, words_loss, *batch(2, 8), capacity="3MiB", **settings)
    assert plan.micro_batch_size * LONGEST <= plan.micro_batch_cost
    assert f"rows x longest of {plan.micro_batch_cost} at most" in str(plan)
    assert memory.MemoryPlan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match="expected cost= for a plan that was made with lengths="):
        plan.apply(net, words_loss)
    with simulate(1, "3MiB"):
        *_, step = plan.apply(net, words_loss, weight=lambda _, targets: targets.numel(), cost=len, collate=pad)
        assert step.micro_batch_cost == plan.micro_batch_cost
        assert all(runs(step, plan.micro_batch_cost, length) for length in (3, LONGEST))


def test_a_report_without_lengths_has_no_budget(one_trace):
    with pytest.raises(ValueError, match=r"this report has no lengths: call memory.estimate\(..., lengths=\(shortest, longest\)"):
        estimate(2, LONGEST, device_kind="sim").largest_cost("1GiB")


def test_invalid_lengths_raise_an_error(one_trace):
    for lengths in ((0, 8), (8, 9), (8, 4)):
        with pytest.raises(ValueError, match=r"expected \(shortest, longest\), such as \(1, 512\)"):
            estimate(2, LONGEST, lengths=lengths)
    for trim in (0, 2):
        with pytest.raises(ValueError, match=f"trim={trim}, expected the dimension of the lengths"):
            estimate(2, LONGEST, lengths=(1, 8), trim=trim)
    with pytest.raises(ValueError, match="expected equal devices: cost is spread evenly"):
        estimate(4, LONGEST, lengths=(1, 8), layout="replicas", devices=2, split=(1, 2))


class OtherOperators(LanguageModel):
    """Adds an operator for long rows."""

    def forward(self, tokens):
        logits = super().forward(tokens)
        return logits.relu() if tokens.shape[1] > 16 else logits


@pytest.mark.slow
def test_other_operators_at_other_lengths_count(one_trace):
    settings = {"lengths": (1, LONGEST), "device_kind": "sim"}
    reports = [
        memory.estimate(kind(layers=1), F.cross_entropy, *batch(2), **settings) for kind in (LanguageModel, OtherOperators)
    ]
    plain, other = (report.largest_cost("8MiB") for report in reports)
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
