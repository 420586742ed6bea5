"""Rows of each rank: the same effective batches for any number of ranks, from any batch on."""

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader

from balanced_parallel import RankBatchSampler

ROWS, SIZE = range(23), 5


def make_samplers(ranks, seed=0):
    return [RankBatchSampler(ROWS, SIZE, seed, rank=rank, ranks=ranks) for rank in range(ranks)]


def effective_batches(samplers):
    """Returns the batches of one iteration, each joined over the ranks, and advances."""
    batches = [list(chain(*parts)) for parts in zip(*samplers, strict=True)]
    for sampler in samplers:
        for _ in batches:
            sampler.advance()
    return batches


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_any_number_of_ranks_has_the_same_batches_without_padding_or_repeated_rows(ranks):
    one, some = make_samplers(1), make_samplers(ranks)
    for epoch in range(3):
        assert {sampler.epoch for sampler in some} == {epoch}
        batches = effective_batches(some)
        assert batches == effective_batches(one)
        assert sorted(chain(*batches)) == list(ROWS)
        assert [len(batch) for batch in batches] == [5, 5, 5, 5, 3]


def test_the_order_depends_on_seed_and_epoch_alone():
    epochs = [effective_batches(samplers) for samplers in [make_samplers(1)] for _ in range(3)]
    others = [effective_batches(make_samplers(1, seed)) for seed in (1, 2, 2**33 + 5)]
    assert len({str(batches) for batches in epochs + others}) == 6
    torch.manual_seed(77)
    state = torch.get_rng_state()
    assert effective_batches(make_samplers(2)) == epochs[0]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("done", [0, 3, 5, 7])
def test_a_position_continues_with_another_number_of_ranks(done):
    whole = make_samplers(1)
    expected = effective_batches(whole) + effective_batches(whole)
    before, after = make_samplers(3), make_samplers(2)
    for _ in range(done):
        before[0].advance()
    for sampler in after:
        sampler.load_state_dict(before[0].state_dict())
    found = []
    while len(found) < 10 - done:
        found += effective_batches(after)
    assert found == expected[done:]


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
    with pytest.raises(ValueError, match=r"saved with \{'rows': 23, 'batch_size': 4, 'seed': 0\}, expected .*'batch_size': 5"):
        RankBatchSampler(ROWS, 5, seed=0).load_state_dict(state)
