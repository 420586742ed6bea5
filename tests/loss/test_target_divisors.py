"""Divisors of several means that depend on the targets alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep

X, Y, T = torch.randn(5, 4), torch.tensor([0, 1, -100, 2, 1]), torch.rand(5, 3)


def losses(out, y, t):
    return {"a": F.cross_entropy(out, y), "b": F.mse_loss(out, t)}


def divisors(out, y, t):
    return {"a": (y != -100).sum(), "b": t.numel()}


def make_step(weight):
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    criterion = DataParallelCriterion(losses, weight=weight)
    step = TrainStep(
        DataParallelModel(net, ["cpu"] * 2), criterion, torch.optim.SGD(net.parameters(), lr=0.0), micro_batch_size=1
    )
    return step, sum(losses(net(X), Y, T).values())


@pytest.mark.parametrize("wrong", [(Y,), (Y, T, T), {"y": Y, "t": T}])
def test_step_with_wrong_targets_can_be_repeated_with_the_right_ones(wrong):
    step, expected = make_step(divisors)
    with pytest.raises(TypeError):
        step(X, wrong)
    torch.testing.assert_close(step(X, (Y, T)), expected.detach())


@pytest.mark.parametrize("weight", [lambda out, y, t: divisors(out[:], y, t), lambda out, y, t: divisors(out.float(), y, t)])
def test_divisors_of_outputs_are_named_in_the_error(weight):
    step, _ = make_step(weight)
    for _ in range(2):
        with pytest.raises(ValueError, match="Without outputs, weight= raised .*Error: it uses the output, which is not"):
            step(X, (Y, T))


def test_several_criteria_are_refused_with_the_way_to_write_them():
    criteria = [DataParallelCriterion(nn.CrossEntropyLoss()), DataParallelCriterion(nn.MSELoss())]
    net = nn.Linear(4, 3)
    advice = "several losses are one module that returns a mapping of them, with a weight= that returns a divisor for each"
    with pytest.raises(TypeError, match=advice):
        TrainStep(DataParallelModel(net, ["cpu"]), criteria, torch.optim.SGD(net.parameters()))
    with pytest.raises(TypeError, match=advice):
        DataParallelCriterion(criteria)
