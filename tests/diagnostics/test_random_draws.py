"""Random numbers of the model and of the loss, with and without modules of dropout."""

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import build_net
from helpers.verification import check
from torch import nn

from balanced_parallel import DataParallelCriterion

pytestmark = pytest.mark.usefixtures("double")


class Noisy(nn.Module):
    """Two layers with random numbers between them."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.second, self.draw = nn.Linear(4, 6), nn.Linear(6, 5), draw

    def forward(self, x):
        return self.second(self.draw(self, self.first(x)))


def dropout(layer, x):
    return F.dropout(x, 0.3, layer.training)


def noise(layer, x):
    return x + 0.1 * torch.randn_like(x)


def test_random_numbers_in_forward_are_a_reason():
    report = check(Noisy(dropout))
    assert report.reasons == (
        "random numbers: the model draws them, in the model (Noisy), before second: compare in eval mode, or without them",
    )
    assert check(Noisy(dropout).eval()).equal
    for model in (Noisy(noise), Noisy(noise).eval(), nn.Sequential(nn.Dropout(), Noisy(noise))):
        (reason,) = [reason for reason in check(model).reasons if not reason.startswith("dropout: 0 ")]
        assert reason.startswith("random numbers: the model draws them, in eval mode too, in ")
        assert reason.endswith("second: compare without them")


def noisy_loss(output, target):
    return F.cross_entropy(output + 0.1 * torch.randn_like(output), target)


@pytest.mark.parametrize("settings", [{"weight": "rows"}, {"whole": True}])
def test_random_numbers_of_the_loss_are_the_only_reason(settings):
    report = check(build_net(), DataParallelCriterion(noisy_loss, **settings))
    assert report.reasons == (
        "random numbers: the loss draws them, because the same output gives another loss: compare without them",
    )
