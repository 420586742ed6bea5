"""Losses that reduce positions of a row first, of outputs whose memory or shape has the positions at the outside."""

import pytest
import torch
import torch.nn.functional as F
from helpers.loops import CPUS
from torch import nn
from torch.testing import assert_close

from balanced_parallel import DataParallelCriterion, DataParallelModel

pytestmark = pytest.mark.usefixtures("double")
# Three shards of 2 rows or 4 rows, with as many positions as a multiple of these.
SIZES = [(6, 6), (12, 4), (7, 4)]
POSITIONS = {
    "a mean": lambda out: out.mean(1).square().mean(),
    "a sum": lambda out: out.sum(1).square().mean(),
    "a moved mean": lambda out: out.transpose(0, 1).mean(0).square().mean(),
}


class PositionsFirst(nn.LSTM):
    """An LSTM with rows first. They are the second dimension of the memory of its output."""

    def __init__(self):
        super().__init__(4, 3, batch_first=True)

    def forward(self, inputs):
        return super().forward(inputs)[0]


def assert_exact(net, loss, inputs, dim=0):
    expected = loss(net(inputs))
    gradients = torch.autograd.grad(expected, [*net.parameters()])
    criterion = DataParallelCriterion(loss, dim=dim)
    result = criterion(DataParallelModel(net, CPUS, dim=dim)(inputs))
    result.backward()
    assert_close(result, expected)
    assert_close([parameter.grad for parameter in net.parameters()], [*gradients])


@pytest.mark.parametrize("form", [POSITIONS["a mean"], POSITIONS["a sum"]])
@pytest.mark.parametrize(("rows", "positions"), SIZES)
def test_positions_of_an_lstm_are_no_rows(rows, positions, form):
    assert_exact(PositionsFirst(), form, torch.randn(rows, positions, 4))


@pytest.mark.parametrize("form", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize(("rows", "positions"), SIZES)
def test_positions_may_be_the_first_dimension(rows, positions, form):
    inputs = torch.randn(positions, rows, 4)
    assert_exact(nn.Linear(4, 3), lambda out: form(out.transpose(0, 1)), inputs, dim=1)


@pytest.mark.parametrize("rows", [3, 4, 7])
def test_classes_of_pixels_of_one_row_are_no_rows(rows):
    """Reshaped pixels of one row are a view, whose memory has the classes at the outside."""

    def distance(out):
        return out.permute(0, 2, 3, 1).reshape(-1, 3).square().sum(1).sqrt().mean()

    def shares(out):
        return F.softmax(out, 1).permute(0, 2, 3, 1).reshape(-1, 3).mean(0).square().sum()

    for loss in (distance, shares):
        assert_exact(nn.Conv2d(2, 3, 3, padding=1), loss, torch.randn(rows, 2, 4, 4))


def test_moved_positions_of_an_lstm_are_no_rows():
    assert_exact(PositionsFirst(), POSITIONS["a moved mean"], torch.randn(12, 4, 4))


TENSORS_LATER = {
    "a list": lambda out: (
        torch.cat([out.transpose(0, 1), out.transpose(0, 1)]).mean(0).square().mean()
    ),
    "an equation": lambda out: torch.einsum("tbc->tb", out.transpose(0, 1)).square().mean(),
}


@pytest.mark.parametrize("form", TENSORS_LATER.values(), ids=TENSORS_LATER)
def test_moved_rows_may_be_in_another_argument_than_the_first(form):
    """``torch.cat`` raised ``AttributeError: 'list' object has no attribute 'shape'``."""
    assert_exact(nn.Linear(4, 3), form, torch.randn(7, 5, 4))


@pytest.mark.parametrize("batch", [6, 12])
def test_a_sum_over_the_rows_of_such_outputs_is_refused(batch):
    """One of 6 rows was wrong: halves of two rows have another memory than shards."""
    model = DataParallelModel(PositionsFirst(), CPUS)
    with pytest.raises(ValueError, match="some rows|whole=True"):
        DataParallelCriterion(lambda out: out.mean(0).square().mean())(
            model(torch.randn(batch, 6, 4))
        )
