"""A step of one's own, as docs/internals.md writes it, against plain PyTorch."""

import pytest
import torch
from helpers.optimizers import sgd
from helpers.pages import blocks
from helpers.plain import Plain
from helpers.ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    DiceLoss,
    parallelize,
)


def own_step():
    """Returns the class of the page."""
    (block,) = [block for block in blocks("docs/internals.md", "python") if "OwnStep" in block]
    names = {"torch": torch}
    exec(block, names)
    return names["OwnStep"]


def rmse(output, target):
    return F.mse_loss(output, F.one_hot(target, 3).float()).sqrt()


def draw(rows):
    inputs = torch.randn(rows, 4)
    targets = torch.randint(3, (rows,))
    targets[: rows // 4] = -100
    return inputs, targets


CRITERIA = {
    "one pass": nn.CrossEntropyLoss(),
    "one count": lambda output, target: F.cross_entropy(output, target) * 2,
    "a function of sums": lambda output, target: rmse(output, target.clamp(min=0)),
    "statistics": lambda output, target: DiceLoss()(output[:, :1], (target[:, None] > 0).float()),
}


@pytest.mark.parametrize("name", [*CRITERIA])
def test_the_page_equals_plain_pytorch(name):
    net = nn.Linear(4, 3)
    plain = Plain(net, CRITERIA[name], lr=0.5, clip=0.1)
    model = DataParallelModel(net, ["cpu"] * 2)
    step = own_step()(model, DataParallelCriterion(CRITERIA[name]), sgd(net, lr=0.5))
    for batch in [draw(rows) for rows in (11, 9, 4)]:
        assert_close(step(*batch), plain(*batch))
    assert_close(net.weight, plain.module.weight)


def train_rank(rank, name):
    net = nn.Linear(4, 3)
    plain = Plain(net, CRITERIA[name], lr=0.5, clip=0.1)
    model, criterion = parallelize(net, CRITERIA[name], ["cpu"], strategy="ddp")
    step = own_step()(model, criterion, sgd(net, lr=0.5))
    for inputs, targets in [draw(rows) for rows in (11, 9, 4)]:
        rows = slice(0, 7) if rank == 0 else slice(7, None)  # The last batch has none of rank 1.
        assert_close(step(inputs[rows], targets[rows]), plain(inputs, targets))
    assert_close(net.weight, plain.module.weight)


@pytest.mark.parametrize("name", ["one pass", "a function of sums"])
def test_ranks_with_other_numbers_of_rows(name):
    run_ranks(2, train_rank, name)
