"""A loop over rows is a sum over the rows, whatever it computes of each: exact in any layout. Others are refused."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import CLASSES, assert_exact, assert_exact_update
from helpers.ranks import on_ranks
from helpers.slow import slow
from helpers.steps import make_step, parallel_step, still_step
from torch import nn

from balanced_parallel import DataParallelCriterion, Rows, simulate

pytestmark = pytest.mark.usefixtures("double")


def pairs(out, values):
    return zip(out, values, strict=True)


def dice(one, other):
    one = one.sigmoid()
    return 1 - (2 * (one * other).sum() + 1) / (one.sum() + other.sum() + 1)


def added_in_place(out, values, total):
    for one, other in pairs(out, values):
        loss = (one - other).square().sum()
        loss += 0.1 * one.abs().max()
        total += loss.sqrt()
    return total / out.shape[0]


def cut_by_values(out, values):
    losses = []
    for one, other in pairs(out, values):
        count = 1 + int((other > 0.5).sum())
        losses.append(one[:count].exp().mean())
    return torch.stack(losses).mean()


LOOPS = {
    "a mean of a list": lambda out, values: sum(map(F.mse_loss, out, values)) / len(out),
    "a stack": lambda out, values: torch.stack([dice(*pair) for pair in pairs(out, values)]).mean(),
    "by index": lambda out, values: torch.stack(
        [(out[row] - values[row, :]).norm() for row in range(len(out))]
    ).sum(),
    "selected": lambda out, values: torch.cat(
        [out.select(0, row)[:2] * values[row - len(out), 0] for row in range(len(out))]
    ).mean(),
    "from zero in place": lambda out, values: added_in_place(out, values, torch.zeros(())),
    "from a number": lambda out, values: added_in_place(out, values, 0.0),
    "medians": lambda out, values: sum(one.median() for one in out.exp().unbind()) / len(values),
    "targets of each": lambda out, values: torch.stack(
        [F.cross_entropy(one[None], label[None]) for one, label in pairs(out, values.argmax(1))]
    ).mean(),
    "cut by values": cut_by_values,
    "a function of two": lambda out, values: (
        torch.stack([one.exp().max() for one in out]).mean() / F.mse_loss(out, values)
    ).sqrt(),
    "weights of each": lambda out, values: (
        sum((one * other[0]).sum() for one, other in pairs(out, values))
        / sum(other[0] for other in values)
    ),
}


@pytest.mark.parametrize("rows", [7, slow(3)])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_over_rows_is_exact(name, rows):
    module, criterion = nn.Linear(4, CLASSES), LOOPS[name]
    inputs, values = torch.randn(rows, 4), torch.rand(rows, CLASSES)
    assert_exact(module, criterion, inputs, values)
    step = still_step(module, DataParallelCriterion(criterion), 1, micro_batch_size=2)
    assert_exact_update(step, module, criterion, inputs, values)


def test_a_loop_over_rows_is_exact_on_distinct_devices():
    module, criterion = nn.Linear(4, CLASSES), LOOPS["a stack"]
    inputs, values = torch.randn(5, 4), torch.rand(5, CLASSES)
    plain = criterion(module(inputs), values)
    with simulate(3) as cluster:
        step = make_step(copy.deepcopy(module), criterion, devices=cluster.devices, lr=0.0)
        for _ in range(2):
            torch.testing.assert_close(step(inputs, values).cpu(), plain.detach())


@on_ranks(2)
def test_a_loop_over_rows_is_exact_on_ranks(rank):
    for name, sizes in (("a mean of a list", [1, 4]), ("a stack", [5, 0])):
        torch.manual_seed(0)
        module, criterion = nn.Linear(4, CLASSES), LOOPS[name]
        inputs, values = torch.randn(5, 4), torch.rand(5, CLASSES)
        plain = criterion(module(inputs), values).detach()
        step = parallel_step(module, criterion, lr=0.0)
        batch = inputs.split(sizes)[rank], values.split(sizes)[rank]
        for _ in range(2):
            torch.testing.assert_close(step(*batch), plain)


class Detector(nn.Module):
    """Returns an entry for each row, with another number of boxes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, CLASSES)

    def forward(self, inputs):
        scores = self.layer(inputs)
        return [{"boxes": row[: 1 + int(row[0] > 0)]} for row in scores]


def test_a_loop_over_entries_of_lists_is_exact():
    """A mean of a stack of one loss for each image was refused."""

    def criterion(outputs, targets):
        return torch.stack(
            [
                (one["boxes"] - other["boxes"]).abs().mean() + one["boxes"].square().sum()
                for one, other in pairs(outputs, targets)
            ]
        ).mean()

    module, inputs = Detector(), torch.randn(7, 4)
    boxes = [{"boxes": torch.rand(1)} for _ in range(7)]
    found = DataParallelCriterion(criterion)
    plain = criterion(module(inputs), boxes)
    step = make_step(module, found, devices=1, lr=0.0, micro_batch_size=3)
    for _ in range(2):
        torch.testing.assert_close(step(inputs, Rows(boxes)), plain.detach())


OTHERS = {
    "the first row": lambda out, values: F.mse_loss(out[0], values[0]),
    "neighbours": lambda out, values: sum(
        (one - other).square().sum() for one, other in itertools.pairwise(out)
    ),
    "the first row beside each": lambda out, values: torch.stack(
        [(one - out[0]).norm() for one in out]
    ).mean(),
    "the largest": lambda out, values: max(map(F.mse_loss, out, values)),
    "a count of chosen rows": lambda out, values: (
        sum(one.abs().sum() for one in out) / max(sum(bool(row[0] > 0.5) for row in values), 1)
    ),
}


@pytest.mark.parametrize("rows", [7, 3])
@pytest.mark.parametrize("name", OTHERS)
def test_a_loop_over_other_rows_is_refused(name, rows):
    module, criterion = nn.Linear(4, CLASSES), DataParallelCriterion(OTHERS[name])
    step = still_step(module, criterion, 3, micro_batch_size=None)
    with pytest.raises(ValueError, match="over the rows|a sum over a number|for some rows"):
        step(torch.randn(rows, 4), torch.rand(rows, CLASSES))
