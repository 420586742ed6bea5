"""Outputs of two models for one criterion: the loss and the gradients of the plain program."""

import copy

import pytest
import torch
from helpers.fsdp import whole_gradients
from helpers.problems import assert_equal, assert_same_gradients, gradients, plain_program
from helpers.ranks import on_ranks
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from balanced_parallel import DataParallelCriterion, DataParallelModel, PerReplica, parallelize


def distilled(output, expected, labels):
    return F.cross_entropy(output, labels) + 0.5 * F.mse_loss(output, expected)


def problem(rows=5):
    torch.manual_seed(0)
    student, teacher = (nn.Linear(4, 3, dtype=torch.float64) for _ in range(2))
    inputs = torch.randn(rows, 4, dtype=torch.float64)
    labels = torch.tensor([0, 1, -100, 2, 1])[:rows]
    return student, teacher.requires_grad_(False), inputs, labels


@pytest.mark.parametrize("rows", [5, 2])
def test_a_criterion_of_two_models_is_that_of_the_whole_batch(rows):
    student, teacher, inputs, labels = problem(rows)
    plain = copy.deepcopy(student)
    expected = distilled(plain(inputs), teacher(inputs), labels)
    expected.backward()
    devices = ["cpu"] * 3
    outputs = DataParallelModel(student, devices)(inputs).zip(
        DataParallelModel(teacher, devices)(inputs)
    )
    assert [len(pair) for pair in outputs] == [2] * len(outputs)
    loss = DataParallelCriterion(distilled)(outputs, labels)
    assert_close(loss, expected)
    loss.backward()
    assert_same_gradients(gradients(student), gradients(plain))
    found = DataParallelCriterion(nn.MSELoss())(outputs)
    assert_close(found, F.mse_loss(plain(inputs), teacher(inputs)))
    first, second = outputs.unzip()
    assert_close(second.gather(), teacher(inputs))
    assert first.sizes == outputs.sizes


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@on_ranks(2)
def test_ranks_join_their_outputs(rank, strategy):
    student, teacher, inputs, labels = problem()
    loss, expected = plain_program(
        student, lambda output, labels: distilled(output, teacher(inputs), labels), inputs, labels
    )
    part = slice(5) if rank == 0 else slice(0)  # rank 1 has no rows
    model, criterion = parallelize(student, distilled, ["cpu"], strategy=strategy)
    outputs = model(inputs[part])
    wanted = parallelize(teacher, device_ids=["cpu"])(inputs[part])
    found = criterion(outputs.zip(wanted), labels[part])
    found.backward()
    assert_equal(found, loss)
    assert_same_gradients(whole_gradients(model), expected)


def test_dimensions_and_order_of_the_rows_are_kept():
    first = PerReplica([torch.zeros(7, 3), torch.zeros(7, 2)], [3, 2], dim=1).in_order(
        [4, 0, 2, 1, 3]
    )
    second = PerReplica([torch.arange(3.0), torch.arange(2.0)], [3, 2]).in_order([4, 0, 2, 1, 3])
    outputs = first.zip(second, second)
    assert (outputs.sizes, outputs.dim, outputs.order) == ((3, 2), (1, 0, 0), first.order)
    assert outputs.gather()[1].tolist() == [1, 0, 2, 1, 0]


def test_outputs_of_other_rows_raise_an_error():
    outputs = PerReplica([torch.zeros(3), torch.zeros(2)], [3, 2])
    others = PerReplica([torch.zeros(2), torch.zeros(3)], [2, 3])
    moved = PerReplica([torch.zeros(3), torch.zeros(2)], [3, 2]).in_order([4, 3, 2, 1, 0])
    for join in (
        lambda *parts: parts[0].zip(*parts[1:]),
        lambda *parts: DataParallelCriterion(nn.MSELoss())(parts),
    ):
        with pytest.raises(
            ValueError,
            match=r"outputs have \[3, 2\] rows per replica and \[2, 3\], expected the same rows",
        ):
            join(outputs, others)
        with pytest.raises(
            ValueError, match=r"outputs have \[3, 2\] rows per replica in another order"
        ):
            join(outputs, moved)
    with pytest.raises(TypeError, match="expected the outputs of another model, one per replica"):
        outputs.zip([torch.zeros(3), torch.zeros(2)])
