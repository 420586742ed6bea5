"""Rows of each rank: the same effective batches for any number of ranks, from any batch on, also where they are cut by cost."""

import random
from itertools import chain

import pytest
from torch.utils.data import DataLoader

from balanced_parallel import BalancedBatchSampler, RankBatchSampler
from balanced_parallel.runtime import collectives

ROWS = range(23)
SIZE = 5
NUMBERS = random.Random(0)
LENGTHS = [int(NUMBERS.lognormvariate(3, 1)) + 1 for _ in range(150)]


def make_samplers(ranks, seed=0):
    return [RankBatchSampler(ROWS, SIZE, seed, rank=rank, ranks=ranks) for rank in range(ranks)]


def make_balanced_samplers(ranks, batch_size=64, costs=LENGTHS, **settings):
    return [
        BalancedBatchSampler(costs, batch_size, seed=0, rank=rank, ranks=ranks, **settings)
        for rank in range(ranks)
    ]


def shares(samplers):
    """Returns the rows of each rank in each batch of one iteration, and advances."""
    batches = list(zip(*samplers, strict=True))
    for sampler in samplers:
        for _ in batches:
            sampler.advance()
    return batches


def effective_batches(samplers):
    return [list(chain(*parts)) for parts in shares(samplers)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_any_number_of_ranks_has_the_same_batches_without_padding_or_repeated_rows(ranks):
    one = make_samplers(1)
    several = make_samplers(ranks)
    plain = [RankBatchSampler(LENGTHS, 64, seed=0, rank=0, ranks=1)]
    alone = make_balanced_samplers(1)
    balanced = make_balanced_samplers(ranks)
    for epoch in range(3):
        assert {sampler.epoch for sampler in several + balanced} == {epoch}
        batches = effective_batches(several)
        assert batches == effective_batches(one)
        assert sorted(chain(*batches)) == list(ROWS)
        assert [len(batch) for batch in batches] == [5, 5, 5, 5, 3]
        batches = effective_batches(balanced)
        assert batches == effective_batches(
            alone
        )  # A row has the same place, and random numbers by row are the same.
        assert [sorted(batch) for batch in batches] == [
            sorted(batch) for batch in effective_batches(plain)
        ]


@pytest.mark.parametrize("make", [make_samplers, make_balanced_samplers])
@pytest.mark.parametrize("done", [0, 3, 5])
def test_a_position_continues_with_another_number_of_ranks_and_sampler(done, make):
    rows = ROWS if make is make_samplers else LENGTHS
    size = SIZE if make is make_samplers else 64
    whole = make(1)
    before = RankBatchSampler(rows, size, seed=0, rank=0, ranks=3)
    after = make(2)
    expected = effective_batches(whole) + effective_batches(whole)
    for _ in range(done):
        before.advance()
    for sampler in after:
        sampler.load_state_dict(before.state_dict())
    batches = []
    while len(batches) < len(expected) - done:
        batches += effective_batches(after)
    assert batches == expected[done:]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize(("size", "group"), [(24, 8), (21, 4), (20, 8), (5, 8), (17, 1)])
def test_ranks_have_whole_micro_batches_of_the_same_effective_batches(ranks, size, group):
    rows = range(47)
    samplers = [
        RankBatchSampler(rows, size, 0, micro_batch_size=group, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    plain = [RankBatchSampler(rows, size, 0, rank=0, ranks=1)]
    for parts, (whole,) in zip(shares(samplers), shares(plain), strict=True):
        assert list(chain(*parts)) == whole
        counts = [-(-len(part) // group) for part in parts]
        assert max(counts) - min(counts) <= 1
        used = [len(part) for part in parts if part]
        assert not any(count % group for count in used[:-1])
        assert counts == sorted(counts, reverse=True)  # Ranks without rows come last.


def test_a_position_with_other_micro_batches_or_of_an_older_checkpoint_continues():
    (before,) = make_samplers(1)
    (plain,) = make_samplers(1)
    after = [
        RankBatchSampler(ROWS, SIZE, 0, micro_batch_size=2, rank=rank, ranks=3) for rank in range(3)
    ]
    before.advance()
    plain.advance()
    assert before.state_dict() == {"batches": 1, "rows": 23, "batch_size": 5, "seed": 0}
    for sampler in after:
        sampler.load_state_dict(before.state_dict())
    assert effective_batches(after) == effective_batches([plain])


def test_a_sampler_that_cuts_by_cost_has_no_micro_batches():
    with pytest.raises(
        TypeError,
        match="unexpected keyword argument 'micro_batch_size', expected .*\\(costs, batch_size",
    ):
        BalancedBatchSampler(LENGTHS, 8, micro_batch_size=2)
    assert make_balanced_samplers(2)[0].micro_batch_size is None


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-8, ValueError), (True, TypeError), ("auto", TypeError)]
)
def test_a_micro_batch_size_that_is_not_a_positive_integer_is_refused(value, error):
    with pytest.raises(
        error,
        match=f"micro_batch_size={value!r}, expected a positive integer, the micro_batch_size of TrainS",
    ):
        RankBatchSampler(ROWS, SIZE, micro_batch_size=value)


def test_batches_that_workers_load_ahead_do_not_count():
    sampler = RankBatchSampler(ROWS, SIZE, seed=0)
    loader = iter(DataLoader(list(ROWS), batch_sampler=sampler, num_workers=1, prefetch_factor=4))
    next(loader)
    sampler.advance()
    assert sampler.state_dict()["batches"] == 1


def test_forgotten_advance_raises_an_error_in_the_second_epoch():
    sampler = RankBatchSampler(ROWS, SIZE, seed=0)
    list(sampler)
    with pytest.raises(RuntimeError, match=r"expected sampler.advance\(\) after each batch"):
        list(sampler)
    in_order = RankBatchSampler(ROWS, SIZE)
    assert list(in_order) == list(in_order)


def test_invalid_settings_and_positions_of_other_batches_raise_an_error():
    with pytest.raises(ValueError, match="0 rows, batch_size=5, rank 0 of 1: expected rows"):
        RankBatchSampler([], 5)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        RankBatchSampler(ROWS, 5, rank=2, ranks=2)
    state = RankBatchSampler(ROWS, 4, seed=0).state_dict()
    with pytest.raises(
        ValueError,
        match=r"saved with \{'rows': 23, 'batch_size': 4, 'seed': 0\}, expected .*'batch_size': 5",
    ):
        RankBatchSampler(ROWS, 5, seed=0).load_state_dict(state)


def test_ranks_have_equal_cost():
    for parts in shares(make_balanced_samplers(4))[:2]:
        costs = [len(rows) * max(LENGTHS[row] for row in rows) for rows in parts]
        assert max(costs) <= 1.2 * sum(costs) / 4
        assert (
            max(costs) <= 0.6 * 64 * max(LENGTHS[row] for row in chain(*parts)) / 4
        )  # equal rows of the padded batch


def test_costs_may_be_combined_in_another_way():
    """With costs that add, the ranks have equal sums, and one has most of the rows."""
    for parts in shares(make_balanced_samplers(3, combine=sum))[:2]:
        sums = [sum(LENGTHS[row] for row in rows) for rows in parts]
        assert max(sums) - min(sums) <= max(LENGTHS)


def test_fewer_rows_than_ranks_leave_ranks_without_rows():
    (parts,) = shares(make_balanced_samplers(4, costs=[5, 1, 2]))
    assert sorted(map(len, parts)) == [0, 1, 1, 1]


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_invalid_costs_raise_an_error(cost):
    with pytest.raises(ValueError, match=f"row 1 .*{cost}"):
        BalancedBatchSampler([1.0, cost, 2.0], 2)
    with pytest.raises(ValueError, match="0 rows, batch_size=2"):
        BalancedBatchSampler([], 2)


@pytest.mark.parametrize(
    "make", [lambda: RankBatchSampler(range(12), 6), lambda: BalancedBatchSampler([1.0] * 12, 6)]
)
def test_a_sampler_made_before_the_process_group_cuts_over_its_ranks(monkeypatch, make):
    """Each rank trained on all rows: the data part of a script often comes before parallelize()."""
    sampler = make()
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    rows = []
    for rank in range(2):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        assert (sampler.rank, sampler.ranks) == (rank, 2)
        rows += chain(*sampler)
    assert sorted(rows) == [*range(12)]


def test_a_process_group_made_during_an_iteration_is_an_error(monkeypatch):
    batches = iter(RankBatchSampler(range(12), 6))
    assert next(batches) == [*range(6)]
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    with pytest.raises(
        RuntimeError,
        match=r"began with 1 ranks and goes on with 2, expected parallelize\(...\) before it",
    ):
        next(batches)


def test_a_sampler_that_cuts_the_batches_again_is_an_error():
    """48 of 100 rows were trained on, after accelerator.prepare(loader), whose BatchSamplerShard reads ``drop_last``."""
    for sampler in (RankBatchSampler(range(12), 6), BalancedBatchSampler([1.0] * 12, 6)):
        with pytest.raises(
            RuntimeError,
            match=f"the batches of a {type(sampler).__name__} are cut again, .*as it is",
        ):
            getattr(sampler, "drop_last", False)
