"""Rows, sums and comparisons over ranks, and the end of the process group."""

import sys

import pytest
import torch
import torch.distributed as dist
from helpers.problems import build_net
from helpers.ranks import on_ranks
from torch.testing import assert_close

from balanced_parallel import PerReplica, gather, parallelize, weighted_mean
from balanced_parallel.runtime import collectives
from balanced_parallel.runtime.collectives import compare_ranks
from balanced_parallel.strategies.launch import end_process_group

SIZES = [1, 0, 4]
WHOLE = torch.arange(10.0, dtype=torch.float64).view(5, 2)
NAMES = [["a"], [], ["b", "c", "d", "e"]]


def rows_of_rank(rank):
    parallelize(build_net(), torch.nn.MSELoss())
    return WHOLE.split(SIZES)[rank].clone()


@on_ranks(3)
def test_outputs_of_uneven_ranks_are_gathered_with_their_gradients(rank):
    mine = rows_of_rank(rank).requires_grad_()
    output = {"x": mine, "names": NAMES[rank], "none": None, "rank": rank}
    result = gather([{**output, "loss": torch.tensor(float(rank))}])
    assert torch.equal(result["x"], WHOLE)
    assert result["names"] == ["a", "b", "c", "d", "e"]
    assert (result["none"], result["rank"]) == (None, [0, 1, 2])
    assert result["loss"].tolist() == [0.0, 1.0, 2.0]
    # Every rank computes the same loss: gradients are its own, times the ranks.
    result["x"].pow(3).sum().backward()
    assert_close(mine.grad, 3 * 3 * mine.detach() ** 2)
    with pytest.raises(
        ValueError, match=r"shapes \(2, 3\) and \(2, 4\) and \(2, 5\), expected shapes"
    ):
        gather([torch.zeros(2, 3 + rank)])
    with pytest.raises(
        TypeError, match="output is a tensor .*, a list .*: expected .* of the same"
    ):
        gather([["a"] if rank == 1 else torch.zeros(2)])
    with pytest.raises(
        ValueError, match=r"differ at output: output\['0'\] in the first, output\['1'\] in number 1"
    ):
        gather([{str(rank): torch.zeros(2)}])
    promoted = gather([torch.ones(1, dtype=torch.float64 if rank else torch.bfloat16)])
    assert (promoted.dtype, promoted.tolist()) == (torch.float64, [1.0, 1.0, 1.0])


@on_ranks(3)
def test_rows_in_another_dimension_and_of_ranks_without_outputs_are_gathered(rank):
    mine = rows_of_rank(rank)
    assert torch.equal(gather([mine.t()], dim=1), WHOLE.t())
    outputs = [] if rank == 1 else [{"x": mine, "names": NAMES[rank]}]
    without = gather(outputs)
    assert torch.equal(without["x"], WHOLE)
    assert without["names"] == ["a", "b", "c", "d", "e"]
    entries, sizes = ([], []) if rank == 1 else ([mine.t()], [SIZES[rank]])
    assert torch.equal(PerReplica(entries, sizes, 1).gather(), WHOLE.t())
    with pytest.raises(ValueError, match="no outputs on any rank"):
        gather([])


@on_ranks(3)
def test_a_weighted_mean_over_ranks_leaves_out_those_of_weight_zero(rank):
    rows_of_rank(rank)
    loss = torch.tensor([1.0, float("nan"), 3.0][rank])
    mean = weighted_mean([loss], [[2, 0, 1][rank]])
    assert_close(mean, torch.tensor(5.0 / 3))


@on_ranks(3, fresh=True)
def test_collectives_of_a_process_group_leave_other_ranks_alone(rank):
    parallelize(build_net(), torch.nn.MSELoss())
    group = dist.new_group([0, 2])
    if rank == 1:
        return
    place = [0, None, 1][rank]
    assert (collectives.world_size(group), collectives.rank(group)) == (2, place)
    assert collectives.sum_over_ranks(torch.tensor(rank + 1.0), group) == 4
    assert collectives.max_over_ranks(rank, group) == 2
    rows = torch.full((1 + place, 2), rank + 1.0, requires_grad=True)
    collectives.gather_rows(rows, [1, 2], 0, group).sum().backward()
    assert torch.equal(rows.grad, torch.full_like(rows, 2.0))
    collectives._batch_group = group
    compare_ranks({"rows": 4}, "as many rows")
    with pytest.raises(ValueError, match="rows: 1 on rank 0 and 2 on rank 1"):
        compare_ranks({"rows": 1 + place}, "as many rows")
    second = collectives.second_group("statistics")
    assert second is collectives.second_group("statistics") is not group
    assert collectives.gather_objects(rank, second) == [0, 2]


@on_ranks(2)
def test_equal_numbers_agree_and_others_are_named_on_each_rank(rank):
    parallelize(build_net(), torch.nn.CrossEntropyLoss())  # starts the process group
    compare_ranks({"lr": 1 if rank else 1.0}, "equal ones")
    with pytest.raises(
        ValueError,
        match=r"^the ranks differ, expected equal ones: norm: None on rank 0 and 1\.0 on rank 1$",
    ):
        compare_ranks({"norm": [None, 1.0][rank], "lr": 0.1}, "equal ones")


def test_an_error_that_cannot_be_told_has_a_note():
    """The second error was lost, and other ranks waited without a reason in the log."""
    error = ValueError("the first")
    with collectives.telling(error):
        raise torch.OutOfMemoryError("the second")
    assert error.__notes__[0].startswith(
        "after this error, OutOfMemoryError was raised: the second;"
    )


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("failed", [True, False])
def test_a_group_is_destroyed_on_a_clean_exit_only(group, failed, monkeypatch):
    if failed:
        monkeypatch.setattr(sys, "last_value", LookupError("this rank fails"), raising=False)
    else:
        monkeypatch.delattr(sys, "last_value", raising=False)
    end_process_group()
    assert dist.is_initialized() == failed
