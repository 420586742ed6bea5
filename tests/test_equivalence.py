"""The oracle: whatever the split, loss and gradients are those of the plain program. In float64, to 1e-10."""

import pytest
import torch
from problems import LOSSES, OnTop, assert_same_gradients, gradients, make_targets, plain_program, zero_gradients

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep

pytestmark = pytest.mark.usefixtures("double")

ROWS = [1, 2, 7, 9, 12]


def split_program(module, criterion, inputs, targets, devices=3):
    model = DataParallelModel(module, ["cpu"] * devices)
    loss = DataParallelCriterion(criterion)(model(inputs), *targets)
    loss.backward()
    return loss.detach(), gradients(module, criterion)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", LOSSES)
def test_three_replicas_equal_the_plain_program(name, rows):
    make_criterion, kind = LOSSES[name]
    module, criterion, inputs = OnTop(name), make_criterion(), torch.randn(rows, 4)
    for ignored in [0, rows // 2, -(-rows // 3), rows] if kind == "classes" else [0]:  # among them a whole shard, and all
        targets = make_targets(kind, rows, ignored)
        loss, expected = plain_program(module, criterion, inputs, targets)
        found_loss, found = split_program(module, criterion, inputs, targets)
        torch.testing.assert_close(found_loss, loss, rtol=1e-10, atol=1e-10, equal_nan=True)
        assert_same_gradients(found, expected)
        zero_gradients(module, criterion)


@pytest.mark.parametrize("micro_batch_size", [None, 1, 2])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_equal_the_plain_program(name, rows, micro_batch_size):
    make_criterion, kind = LOSSES[name]
    module, criterion, inputs = OnTop(name), make_criterion(), torch.randn(rows, 4)
    targets = make_targets(kind, rows, rows // 2)
    loss, expected = plain_program(module, criterion, inputs, targets)
    parameters = [*module.parameters(), *(criterion.parameters() if isinstance(criterion, torch.nn.Module) else ())]
    step = TrainStep(
        DataParallelModel(module, ["cpu"] * 3),
        DataParallelCriterion(criterion),
        torch.optim.SGD(parameters, lr=0.1),
        micro_batch_size=micro_batch_size,
    )
    before = [parameter.detach().clone() for parameter in parameters]
    torch.testing.assert_close(step(inputs, targets), loss, rtol=1e-10, atol=1e-10)
    assert_same_gradients(gradients(module, criterion), expected)
    for parameter, old, gradient in zip(parameters, before, expected, strict=True):
        torch.testing.assert_close(parameter, old if gradient is None else old - 0.1 * gradient, rtol=1e-10, atol=1e-10)


def test_the_oracle_sees_a_mean_of_means(monkeypatch):
    def mean_of_means(sums, weights, device):
        return sum(total / weight for total, weight in zip(sums, weights, strict=True)) / len(sums)

    monkeypatch.setattr("balanced_parallel.criterion.divide_once", mean_of_means)
    with pytest.raises(AssertionError, match="not close"):
        test_three_replicas_equal_the_plain_program("MSELoss", 7)
