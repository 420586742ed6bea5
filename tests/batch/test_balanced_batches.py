"""Rows of equal cost for each rank: the effective batches of ``RankBatchSampler``, cut by cost."""

import random
from itertools import chain

import pytest
import torch
from helpers.ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader

from balanced_parallel import BalancedBatchSampler, RankBatchSampler, TrainStep, parallelize

NUMBERS = random.Random(0)
LENGTHS = [int(NUMBERS.lognormvariate(3, 1)) + 1 for _ in range(150)]


def make_samplers(ranks, batch_size=64, costs=LENGTHS, **settings):
    return [BalancedBatchSampler(costs, batch_size, seed=0, rank=rank, ranks=ranks, **settings) for rank in range(ranks)]


def shares(samplers):
    """Returns the rows of each rank in each batch of one iteration, and advances."""
    batches = list(zip(*samplers, strict=True))
    for sampler in samplers:
        for _ in batches:
            sampler.advance()
    return batches


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_effective_batches_are_those_of_equal_rows(ranks):
    plain, balanced = RankBatchSampler(LENGTHS, 64, seed=0, rank=0, ranks=1), make_samplers(ranks)
    for epoch in range(2):
        assert {sampler.epoch for sampler in balanced} == {epoch}
        batches = [sorted(chain(*parts)) for parts in shares(balanced)]
        expected = [sorted(parts[0]) for parts in shares([plain])]
        assert batches == expected


def test_ranks_have_equal_cost():
    for parts in shares(make_samplers(4))[:2]:
        costs = [len(rows) * max(LENGTHS[row] for row in rows) for rows in parts]
        assert max(costs) <= 1.2 * sum(costs) / 4
        assert max(costs) <= 0.6 * 64 * max(LENGTHS[row] for row in chain(*parts)) / 4  # equal rows of the padded batch


def test_costs_may_be_combined_in_another_way():
    """With costs that add, the ranks have equal sums, and one has most of the rows."""
    for parts in shares(make_samplers(3, combine=sum))[:2]:
        sums = [sum(LENGTHS[row] for row in rows) for rows in parts]
        assert max(sums) - min(sums) <= max(LENGTHS)


def test_a_position_continues_with_another_number_of_ranks_and_sampler():
    whole = [sorted(chain(*parts)) for sampler in [make_samplers(1)] for _ in range(2) for parts in shares(sampler)]
    before = RankBatchSampler(LENGTHS, 64, seed=0, rank=0, ranks=1)
    for _ in range(4):
        before.advance()
    after = make_samplers(3)
    for sampler in after:
        sampler.load_state_dict(before.state_dict())
    assert [sorted(chain(*parts)) for parts in shares(after)] == whole[4:]


def test_fewer_rows_than_ranks_leave_ranks_without_rows():
    (parts,) = shares(make_samplers(4, costs=[5, 1, 2]))
    assert sorted(map(len, parts)) == [0, 1, 1, 1]


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_invalid_costs_raise_an_error(cost):
    with pytest.raises(ValueError, match=f"row 1 .*{cost}"):
        BalancedBatchSampler([1.0, cost, 2.0], 2)
    with pytest.raises(ValueError, match="0 rows, batch_size=2"):
        BalancedBatchSampler([], 2)


def text(length):
    generator = torch.Generator().manual_seed(length)
    return torch.randint(1, 50, (length + 1,), generator=generator)


def pad(rows):
    padded = nn.utils.rnn.pad_sequence([text(length) for length in rows], batch_first=True)
    return padded[:, :-1], padded[:, 1:]


def losses_of(rank, ranks):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50), Transpose()).double()
    model, criterion = parallelize(net, nn.CrossEntropyLoss(ignore_index=0), ["cpu"])
    step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.5))
    sampler = BalancedBatchSampler(LENGTHS[:20], 8, seed=0)
    loader = DataLoader(LENGTHS[:20], batch_sampler=sampler, collate_fn=pad_or_none, generator=torch.Generator())
    losses = []
    for inputs, targets in loader:
        losses.append(step(inputs, targets).item())
        sampler.advance()
    return losses


def pad_or_none(rows):
    return pad(rows) if rows else (torch.zeros(0, 1, dtype=torch.long),) * 2


class Transpose(nn.Module):
    def forward(self, logits):
        return logits.transpose(1, 2)


def test_ranks_train_as_one_process():
    losses = losses_of(0, 1)
    for found in run_ranks(2, losses_of, 2):
        assert found == pytest.approx(losses, rel=1e-10)
