"""``AdditiveLoss``: statistics of any structure, and errors in one line."""

import pytest
import torch
from helpers.coupled import (
    correlation_loss,
    correlation_statistics,
)
from helpers.problems import build_net
from helpers.ranks import run_ranks
from torch.testing import assert_close

from balanced_parallel import (
    AdditiveLoss,
    DataParallelCriterion,
    DataParallelModel,
    PerReplica,
    Rows,
    parallelize,
)


def value_of(statistics, finish=torch.sum):
    criterion = DataParallelCriterion(AdditiveLoss(statistics, finish))
    return criterion(PerReplica([torch.arange(6.0).reshape(3, 2), torch.ones(2, 2)], [3, 2]))


REFUSED = [
    (
        r"number 1 of the first rows, 128 times, is 1\.9, but 768 added up from their halves; expected sums",
        lambda out: (out.sum(), out.mean()),
    ),
    ("computes number 0 of shape .* for others; expected .* equal shapes", lambda out: out),
    ("number 0", lambda out: out.amax(0)),
    ("the statistics contain str 'a', expected tensors and numbers", lambda out: (out.sum(), "a")),
    (
        r"of shape \(2,\) for some rows, and number 0 of shape \(1,\) for others; expected .* equal shapes",
        lambda out: out.sum(0)[: 1 if (out == 1).all() else 2],
    ),
]


@pytest.mark.parametrize(("message", "statistics"), REFUSED)
def test_statistics_that_do_not_add_up_are_refused_in_the_first_batch(message, statistics):
    with pytest.raises((TypeError, ValueError), match=message):
        value_of(statistics)


@pytest.mark.parametrize("setting", [{"weight": "rows"}, {"minimum": 1.0}, {"reduction": "sum"}])
def test_settings_of_a_divisor_are_refused(setting):
    with pytest.raises(ValueError, match="given with an AdditiveLoss"):
        DataParallelCriterion(AdditiveLoss(correlation_statistics, correlation_loss), **setting)
    with pytest.raises(ValueError, match="given with whole=True"):
        DataParallelCriterion(correlation_loss, whole=True, **setting)


def test_settings_of_other_kinds_are_refused():
    with pytest.raises(
        TypeError, match="statistics=3, expected a function, or a subclass with a method statistics"
    ):
        AdditiveLoss(3, sum)
    with pytest.raises(TypeError, match="finish=None, expected a function"):
        AdditiveLoss(torch.sum)
    with pytest.raises(ValueError, match="whole='yes', expected True or False"):
        DataParallelCriterion(correlation_loss, whole="yes")


def test_an_output_without_rows_must_be_the_same_everywhere():
    def loss(features, auxiliary):
        return features.square().sum() + auxiliary

    criterion = DataParallelCriterion(loss, whole=True)
    net = build_net()
    outputs = DataParallelModel(net, ["cpu"] * 2)(torch.randn(5, 4))
    with pytest.raises(ValueError, match="has no rows and differs between replicas"):
        criterion(outputs.map(lambda output: (output, output.mean())))


NAMES = ["a", "bb", "ccc", "dddd", "eeeee"]


def named_loss(output, names, tags):
    assert [len(names), len(tags)] == [len(output)] * 2
    return (
        (output @ output.t()).sum(1) * torch.tensor([float(len(name)) for name in names])
    ).mean()


def loss_of_named_rows(rank):
    torch.manual_seed(0)
    net = build_net()
    inputs = torch.randn(5, 4)
    expected = named_loss(net(inputs), NAMES, NAMES)
    model, criterion = parallelize(net, DataParallelCriterion(named_loss, whole=True), ["cpu"])
    rows = slice(0, 3) if rank == 0 else slice(3, 5)
    return criterion(
        model(inputs[rows]), Rows(NAMES[rows]), NAMES[rows]
    ).detach(), expected.detach()


def test_entries_of_all_ranks_are_in_the_order_of_the_rows():
    for loss, expected in run_ranks(2, loss_of_named_rows):
        assert_close(loss, expected)
