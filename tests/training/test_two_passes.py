"""Losses whose rows depend on each other: any split gives the update of the plain program."""

import pytest
from helpers.coupled import KINDS, assert_same_update, plain_update, rank_update, split_update
from helpers.ranks import run_ranks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("devices", "micro_batch_size", "adds"), [(1, None, None), (3, None, None), (1, 3, None), (3, 1, None), (2, 2, [4, 0, 6, 1])]
)
def test_replicas_and_micro_batches_give_the_update_of_the_plain_program(kind, devices, micro_batch_size, adds):
    assert_same_update(split_update(kind, ["cpu"] * devices, micro_batch_size, adds), plain_update(kind))


@pytest.mark.parametrize("kind", ["pairs", "correlation"])
@pytest.mark.parametrize(
    ("sizes", "micro_batch_size", "by_hand"), [([4, 4, 3], None, False), ([7, 0, 4], 2, False), ([7, 1, 3], None, True)]
)
def test_ranks_give_the_update_of_the_plain_program(kind, sizes, micro_batch_size, by_hand):
    for found in run_ranks(3, rank_update, kind, sizes, micro_batch_size, "ddp", by_hand):
        assert_same_update(found, plain_update(kind))


@pytest.mark.parametrize("kind", ["pairs", "correlation"])
def test_shards_give_the_update_of_the_plain_program(kind):
    for sizes, micro_batch_size in (([6, 5], None), ([11, 0], 4)):
        for found in run_ranks(2, rank_update, kind, sizes, micro_batch_size, "fsdp"):
            assert_same_update(found, plain_update(kind))
