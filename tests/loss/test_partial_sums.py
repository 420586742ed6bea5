"""Calls of criteria and weights with outputs that are tuples."""

import re

import pytest
import torch
import torch.nn.functional as F

from balanced_parallel import AdditiveLoss, DataParallelCriterion, PerReplica

TUPLES = PerReplica([(torch.zeros(3, 5), torch.ones(3)), (torch.zeros(2, 5), torch.ones(2))], [3, 2])
TARGETS = torch.zeros(5, dtype=torch.long)


def on_a_pair(output, target):
    return F.cross_entropy(output[0], target) + output[1].mean()


def on_two(scores, norms, target):
    return F.cross_entropy(scores, target) + norms.mean()


CALLS = {
    "criterion": lambda: DataParallelCriterion(on_a_pair, weight="rows"),
    "weight": lambda: DataParallelCriterion(on_two, weight=lambda output, target: len(output[0])),
    "whole": lambda: DataParallelCriterion(on_a_pair, whole=True),
    "statistics": lambda: DataParallelCriterion(AdditiveLoss(on_a_pair, lambda total: total)),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_error_about_the_number_of_arguments_tells_of_the_tuple(name):
    message = (
        "takes 2 positional arguments but 3 were given: the output is a tuple, whose 2 entries fill the first 2 arguments; name "
        "each of them, or take *arguments, or return a list from the model, which is one argument"
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        CALLS[name]()(TUPLES, TARGETS)


@pytest.mark.parametrize("outputs", [TUPLES, TUPLES.map(lambda pair: pair[0], dim=0)], ids=["tuple", "tensor"])
def test_other_type_errors_stay(outputs):
    def fails(*arguments):
        raise TypeError("of its own")

    with pytest.raises(TypeError, match=r"of its own \(in replica 0") as raised:
        DataParallelCriterion(fails, weight="rows")(outputs, TARGETS)
    assert "tuple" not in str(raised.value)
