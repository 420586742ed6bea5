"""Criteria with state of the rows that they have seen: an error, since a shard has not seen the others."""

import pytest
import torch
import torch.nn.functional as F
from helpers.steps import make_step
from torch import nn
from torch.testing import assert_close

from balanced_parallel import DataParallelCriterion, DataParallelModel

pytestmark = pytest.mark.usefixtures("double")


class Stateful(nn.Module):
    """A mean error over something that calls before have left."""

    def __init__(self, state, advance, use):
        super().__init__()
        self.state = torch.ones(()) if state == "one" else state
        self.advance = advance
        self.use = use

    def forward(self, output, target):
        errors = (output - target).square().mean(1)
        loss = self.use(errors, self.state)
        self.state = self.advance(self.state, errors.detach(), target)
        return loss


STATES = {
    "a running mean": (1.0, lambda state, errors, target: 0.9 * state + errors.mean().item()),
    "its tensor": ("one", lambda state, errors, target: 0.9 * state + errors.mean()),
    "written in place": ("one", lambda state, errors, target: state.mul_(0.9).add_(errors.mean())),
    "the largest": (0.0, lambda state, errors, target: max(state, float(errors.max()))),
    "the first loss": (None, lambda state, errors, target: first(state, errors)),
    "the first labels": (None, lambda state, errors, target: first(state, target)),
}


def first(state, values):
    return values.mean() if state is None else state


def divide(errors, state):
    return errors.mean() / (1 if state is None else state + 1)


def weigh(errors, state):
    weights = (errors - (1 if state is None else state)).sigmoid()
    return (errors * weights).sum() / weights.sum()


def run_twice(update):
    for _ in range(2):
        update(torch.randn(9, 4), torch.rand(9, 5))


KEPT = "The criterion keeps values of the rows|other values|for some rows, and"


@pytest.mark.parametrize("use", [divide, weigh])
@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("state", STATES)
def test_state_of_the_rows_of_a_shard_is_an_error(state, rows, use):
    """The next losses were divided by the mean of the first shard."""
    criterion = Stateful(*STATES[state], use)
    step = make_step(nn.Linear(4, 5), criterion, devices=3)
    with pytest.raises(ValueError, match=KEPT):
        run_twice(step)


@pytest.mark.parametrize("state", STATES)
def test_state_of_the_rows_is_an_error_by_hand(state):
    model = DataParallelModel(nn.Linear(4, 5), ["cpu"] * 3)
    criterion = DataParallelCriterion(Stateful(*STATES[state], divide))
    with pytest.raises(ValueError, match=KEPT):
        run_twice(lambda inputs, target: criterion(model(inputs), target))


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = torch.ones(())

    def forward(self, output, target):
        loss = F.cross_entropy(output, target)
        result = loss / self.mean
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return result


def test_state_is_an_error_where_the_first_row_has_no_count():
    step = make_step(nn.Linear(4, 5), Normalised(), devices=3)
    with pytest.raises(ValueError, match="keeps values of the rows"):
        step(torch.randn(7, 4), torch.tensor([-100, 1, 2, -100, 1, 2, -100]))


class Logging(nn.Module):
    """A criterion that keeps what it never reads, and a counter of its own type."""

    def __init__(self):
        super().__init__()
        self.last = None
        self.mean = 0.0
        self.calls = torch.zeros(())

    def forward(self, output, target):
        loss = F.mse_loss(output, target)
        self.last = loss.detach()
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        self.calls = self.calls + 1
        return loss + 0.1 * self.calls * output.square().mean()


def test_values_that_are_kept_and_not_read_are_no_state():
    net = nn.Linear(4, 5)
    plain = Logging()
    step = make_step(net, Logging(), devices=3)
    for size in (9, 8, 7, 6, 9):
        batch = torch.randn(size, 4), torch.rand(size, 5)
        expected = plain(net(batch[0]), batch[1])
        assert_close(step(*batch), expected.detach())
