"""Relative errors, and the first module whose output differs."""

import pytest
import torch
from helpers.loops import Calls
from helpers.verification import CPUS, check, flat_loss, time_major
from torch import nn

from balanced_parallel import DataParallelModel, verify
from balanced_parallel.diagnostics.recording import relative_error

pytestmark = pytest.mark.usefixtures("double")


def test_the_relative_error_of_one_nan_is_infinite():
    one = torch.tensor([1.0, 2.0])
    nan = torch.tensor([1.0, torch.nan])
    assert relative_error(nan, one) == relative_error(one, nan) == float("inf")
    assert relative_error(nan, nan) == 0.0
    assert relative_error(torch.tensor([1.0, 3.0]), one) == 0.5


def test_the_first_difference_is_found_with_rows_in_dimension_1():
    net, inputs, targets = time_major()
    net.output = nn.Sequential(nn.Dropout(0.5), net.output)
    report = verify(DataParallelModel(net, CPUS, dim=1), flat_loss, inputs, targets)
    assert report.first_difference.startswith("output.0 (Dropout): relative error")


def test_gradients_of_buffers_are_compared():
    model = Calls(lambda net, x: net(x) * net.scale)
    model.net.register_buffer("scale", torch.ones(5, requires_grad=True))
    report = check(model)
    assert report.equal
    assert "net.scale" in report.gradient_errors


class Shifted(nn.Module):
    """Adds the mean of the rows before its second layer, so that this layer has other inputs in each replica."""

    def __init__(self, second):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = second

    def forward(self, x):
        hidden = self.first(x)
        return self.second(hidden + hidden.mean(0))


def test_the_last_layer_with_an_equal_output_is_named():
    report = check(
        nn.Sequential(nn.Identity(), nn.Sequential(Shifted(nn.Sequential(nn.Linear(5, 5)))))
    )
    assert report.first_difference.startswith("1.0.second.0 (Linear): relative error")
    assert report.first_difference.endswith("; equal up to 1.0.first (Linear)")


@pytest.mark.parametrize("after", [nn.Identity(), nn.ReLU(inplace=True)])
def test_a_layer_whose_output_is_overwritten_is_the_cause(after):
    report = check(nn.Sequential(nn.Linear(4, 5), Calls(lambda _, x: x - x.mean(0)), after))
    assert report.first_difference.startswith("1 (Calls): relative error")


def test_a_difference_before_the_first_layer():
    changing = Calls(lambda net, x: net(x * torch.ones_like(x).sum() / 28))
    assert check(changing).first_difference.endswith("; equal up to the inputs")
