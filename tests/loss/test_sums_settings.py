"""Divisors of several means that depend on the targets alone."""

import pytest
import torch
from helpers.steps import still_step
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    PerReplica,
    TrainStep,
)

pytestmark = pytest.mark.usefixtures("double")

Y = torch.tensor([0, 1, -100, 2, 1])
T = torch.rand(5, 3)


def losses(out, y, t):
    return {"a": F.cross_entropy(out, y), "b": F.mse_loss(out, t.to(out))}


DIVISORS = {"a": lambda y, t: (y != -100).sum(), "b": lambda y, t: t.numel()}


@pytest.mark.parametrize("wrong", [(Y,), (Y, T, T), {"y": Y, "t": T}])
def test_step_with_wrong_targets_can_be_repeated_with_the_right_ones(wrong):
    net = nn.Linear(4, 3)
    inputs = torch.randn(5, 4)
    step = still_step(net, DataParallelCriterion(losses, weight=DIVISORS), 2, micro_batch_size=1)
    with pytest.raises(TypeError):
        step(inputs, wrong)
    assert_close(step(inputs, (Y, T)), sum(losses(net(inputs), Y, T).values()).detach())


@pytest.mark.parametrize("weight", [{}, [], {"a": 1}, ["rows", "rows"], "columns"])
def test_invalid_weights_raise_an_error(weight):
    with pytest.raises(
        ValueError,
        match=r"expected a function \(output, \*targets\) -> scalar, or 'rows', or for several means",
    ):
        DataParallelCriterion(losses, weight=weight)


def test_several_criteria_are_refused_with_the_way_to_write_them():
    criteria = [DataParallelCriterion(nn.CrossEntropyLoss()), DataParallelCriterion(nn.MSELoss())]
    net = nn.Linear(4, 3)
    advice = "several losses are one module that returns a mapping of them, with a weight= that has a function for each divisor"
    with pytest.raises(TypeError, match=advice):
        TrainStep(DataParallelModel(net, ["cpu"]), criteria, torch.optim.SGD(net.parameters()))
    with pytest.raises(TypeError, match=advice):
        DataParallelCriterion(criteria)


CLASS_WEIGHTS = torch.tensor([1.0, 1.0, 0.1])


def weighted_and_bounded(out, labels, boxes):
    """Returns a mean with a small divisor that has no bound, one with a bound, and one whose small divisor has a bound."""
    errors = (out[:, 3] - boxes).abs()
    has_box = labels != 2
    scores = CLASS_WEIGHTS.to(out)[labels] / 4
    return {
        "class": F.cross_entropy(out[:, :3], labels, CLASS_WEIGHTS.to(out)),
        "box": (errors * has_box).sum() / has_box.sum().clamp(min=1),
        "score": (errors * scores).sum() / scores.sum().clamp(min=1),
    }


BOUNDED_DIVISORS = {
    "class": lambda labels, boxes: CLASS_WEIGHTS.double()[labels].sum(),
    "box": lambda labels, boxes: (labels != 2).sum(),
    "score": lambda labels, boxes: CLASS_WEIGHTS.double()[labels].sum() / 4,
}


@pytest.mark.parametrize("labels", [[0, 1, 2, 2, 2], [2, 2, 2, 2, 2]])
@pytest.mark.parametrize("names", [("class", "box", "score"), ("class", "box")])
def test_each_mean_has_its_minimum(labels, names):
    """A number bounds counts, and a number for each mean its divisor, by hand and in micro-batches."""
    net = nn.Linear(4, 4)
    inputs = torch.randn(5, 4)
    boxes = torch.rand(5)
    labels = torch.tensor(labels)

    def criterion(*arguments):
        return {
            name: mean for name, mean in weighted_and_bounded(*arguments).items() if name in names
        }

    weight = {name: BOUNDED_DIVISORS[name] for name in names}
    minimum = {"class": 0, "box": 1, "score": 1}
    minimum = 1 if "score" not in names else minimum
    expected = criterion(net(inputs), labels, boxes)
    split = DataParallelCriterion(criterion, weight=weight, minimum=minimum)
    assert_close(split(DataParallelModel(net, ["cpu"] * 3)(inputs), labels, boxes), expected)
    step = still_step(net, split, micro_batch_size=1)
    assert_close(step(inputs, (labels, boxes)), sum(expected.values()).detach())


def test_a_minimum_for_each_mean_has_the_structure_of_the_weights():
    for minimum in ([0, 1], {"box": 1, "class": 0}, {"class": 0}):
        weight = {name: BOUNDED_DIVISORS[name] for name in ("class", "box")}
        criterion = DataParallelCriterion(weighted_and_bounded, weight=weight, minimum=minimum)
        with pytest.raises(
            ValueError,
            match="expected one number, or one for each weight in the structure and order of weight=",
        ):
            criterion(
                PerReplica([torch.zeros(2, 4)], [2]),
                torch.zeros(2, dtype=torch.long),
                torch.zeros(2),
            )
    with pytest.raises(
        ValueError,
        match="minimum=.* was given with weight=None, expected a weight= that has a divisor for each",
    ):
        DataParallelCriterion(weighted_and_bounded, minimum=[1, 0])


def test_means_with_one_divisor_and_their_minimum_are_refused_in_a_step():
    def counts(out, labels, boxes):
        return {"class": CLASS_WEIGHTS[labels].sum(), "again": CLASS_WEIGHTS[labels].sum()}

    def criterion(out, labels, boxes):
        mean = F.cross_entropy(out[:, :3], labels, CLASS_WEIGHTS.to(out))
        return {"class": mean, "again": mean}

    step = still_step(nn.Linear(4, 4), DataParallelCriterion(criterion, weight=counts, minimum=1))
    with pytest.raises(ValueError, match="divisors of their own"):
        step(torch.randn(3, 4), (torch.tensor([2, 2, 2]), torch.rand(3)))
