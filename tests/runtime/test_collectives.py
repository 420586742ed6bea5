"""Rows and sums over ranks."""

import pytest
import torch
from helpers.ddp import cut_over_ranks
from helpers.problems import build_net
from helpers.ranks import run_ranks

from balanced_parallel import PerReplica, gather, parallelize, weighted_mean


def check_gather(rank):
    torch.set_default_dtype(torch.float64)
    parallelize(build_net(), torch.nn.MSELoss())
    sizes = [1, 0, 4]
    whole = torch.arange(10.0).view(5, 2)
    mine = cut_over_ranks(whole, sizes, rank).clone().requires_grad_()
    names = [["a"], [], ["b", "c", "d", "e"]][rank]
    result = gather([{"x": mine, "names": names, "none": None, "rank": rank, "loss": torch.tensor(float(rank))}])
    assert torch.equal(result["x"], whole), result["x"]
    assert result["names"] == ["a", "b", "c", "d", "e"]
    assert result["none"] is None
    assert result["rank"] == [0, 1, 2]
    assert result["loss"].tolist() == [0.0, 1.0, 2.0]
    across = gather([mine.detach().t()], dim=1)
    assert torch.equal(across, whole.t())
    result["x"].pow(3).sum().backward()  # every rank computes the same loss: gradients are its own, times the ranks
    torch.testing.assert_close(mine.grad, 3 * 3 * mine.detach() ** 2)
    with pytest.raises(ValueError, match="on rank 0"):
        gather([torch.zeros(2, 3 + rank)])
    without = gather([] if rank == 1 else [{"x": mine.detach(), "names": names, "none": None}])
    assert torch.equal(without["x"], whole), without
    assert without["names"] == result["names"]
    time_major = PerReplica([] if rank == 1 else [mine.detach().t()], [] if rank == 1 else [sizes[rank]], 1)
    assert torch.equal(time_major.gather(), whole.t())
    with pytest.raises(ValueError, match="no outputs on any rank"):
        gather([])
    mean = weighted_mean([torch.tensor(float("nan") if rank == 1 else rank + 1.0)], [[2, 0, 1][rank]])
    torch.testing.assert_close(mean, torch.tensor(5.0 / 3))
    return True


def test_gather_and_weighted_mean_over_uneven_ranks():
    assert run_ranks(3, check_gather) == [True] * 3
