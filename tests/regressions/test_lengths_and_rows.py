"""Rows whose lengths differ between shards, and a first shard of one row."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers.optimizers import sgd
from helpers.ranks import on_ranks
from helpers.steps import make_step
from torch import nn
from torch.testing import assert_close

from balanced_parallel import DataParallelCriterion, parallelize

pytestmark = pytest.mark.usefixtures("double")


def test_rows_that_are_compared_later_are_seen_in_micro_batches_of_one_row():
    """One row and its copies show nothing, so a sample waits for another row."""
    number = 0

    def criterion(output, target):
        if number < 4:
            return F.mse_loss(output, target)
        errors = output - target
        return (errors - errors.mean(0)).square().mean()

    torch.manual_seed(0)
    step = make_step(nn.Linear(4, 5), criterion, devices=1, micro_batch_size=1)
    for number in range(4):  # noqa: B007 - the criterion reads it
        step(torch.randn(6, 4), torch.rand(6, 5))
    number = 4
    with pytest.raises(ValueError, match="does not add up over the rows"):
        step(torch.randn(6, 4), torch.rand(6, 5))


def test_the_steps_of_a_gan_do_not_warn():
    """The generator's step leaves gradients in the discriminator, which its own step drops."""
    generator = nn.Linear(3, 4)
    discriminator = nn.Linear(4, 1)
    first = make_step(
        nn.Sequential(generator, discriminator),
        lambda scores: F.softplus(-scores).mean(),
        sgd(generator),
    )
    second = make_step(discriminator, nn.BCEWithLogitsLoss())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            second(torch.randn(6, 4), torch.ones(6, 1))
            first(torch.randn(6, 3))


@on_ranks(2)
def test_a_rank_without_rows_may_have_another_length(rank):
    """The output of a rank without rows is that of an earlier batch, of another length."""
    net = nn.Linear(4, 5)
    model, criterion = parallelize(net, nn.MSELoss(), strategy="ddp")
    for number, length in enumerate((3, 4)):
        inputs = torch.randn(4, length, 4)
        target = torch.rand(4, length, 5)
        rows = slice(2 * rank, 2 * rank + 2) if number == 0 else slice(0, 4 * rank)
        loss = criterion(model(inputs[rows]), target[rows])
        assert_close(loss.detach(), F.mse_loss(net(inputs), target).detach())
        loss.backward()


class WithSums(nn.Linear):
    """Returns rows with a gradient, and the sums of the inputs, which have none."""

    def forward(self, inputs):
        return {"rows": super().forward(inputs), "sums": inputs.sum(1)}


@on_ranks(2)
def test_an_output_without_a_gradient_has_none_on_a_rank_without_rows(rank):
    """A collective ran in the backward of that rank alone, and the process was aborted."""
    net = WithSums(4, 5).double()

    def criterion(output, target):
        return (output["rows"] - target).square().mean() * output["sums"].std()

    model, whole = parallelize(net, DataParallelCriterion(criterion, whole=True), strategy="ddp")
    for first in (2, 0, 1):
        inputs = torch.randn(6, 4).double()
        target = torch.rand(6, 5).double()
        mine = slice(0, first) if rank == 0 else slice(first, 6)
        loss = whole(model(inputs[mine]), target[mine])
        assert_close(loss.detach(), criterion(net(inputs), target).detach())
        loss.backward()
