"""The first module whose output differs, and the caller whose forward is the cause."""

import pytest
import torch
from helpers.verification import check
from torch import nn

pytestmark = pytest.mark.usefixtures("double")


class Shifted(nn.Module):
    """Adds the mean of the rows before its second layer, so that this layer has other inputs in each replica."""

    def __init__(self, second):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), second

    def forward(self, x):
        hidden = self.first(x)
        return self.second(hidden + hidden.mean(0))


def test_a_layer_with_other_inputs_is_not_the_cause():
    report = check(nn.Sequential(nn.Identity(), nn.Sequential(Shifted(nn.Sequential(nn.Linear(5, 5))))))
    assert report.first_difference.startswith(
        "1.0.second.0 (Linear): its inputs differ already, so the cause is in forward of 1.0 (Shifted), before 1.0.second.0: "
        "relative error"
    )


class Mean(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


@pytest.mark.parametrize("after", [nn.Identity(), nn.ReLU(inplace=True)])
def test_a_layer_with_equal_inputs_is_the_cause(after):
    report = check(nn.Sequential(nn.Linear(4, 5), Mean(), after))
    assert report.first_difference.startswith("1 (Mean): relative error")


def test_inputs_that_are_overwritten_are_not_compared():
    net = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5, inplace=True))
    assert check(net).first_difference.startswith("1 (Dropout): relative error")


class Catching(nn.Module):
    """Calls a layer that fails, and goes on without it."""

    def __init__(self):
        super().__init__()
        self.good, self.bad = nn.Linear(4, 5), nn.Linear(3, 5)

    def forward(self, x):
        try:
            return self.bad(x * x.mean())
        except RuntimeError:
            return self.good(x) * len(x)


def test_calls_that_fail_are_ignored():
    assert check(nn.Sequential(Catching())).first_difference.startswith("0 (Catching): relative error")


class Computing(nn.Module):
    """Passes a layer the same rows in a keyword argument."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x):
        return self.layer(input=x * torch.ones_like(x).sum() / 28)


def test_keyword_arguments_are_inputs():
    assert "its inputs differ already" in check(Computing()).first_difference
