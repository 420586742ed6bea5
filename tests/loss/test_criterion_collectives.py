"""Criteria with collectives of their own, from programs that come from ``DistributedDataParallel``."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from helpers.optimizers import sgd
from helpers.problems import assert_same_gradients, plain_program, whole_gradients
from helpers.ranks import run_ranks
from helpers.slow import pairs
from torch import nn

from balanced_parallel import DataParallelCriterion, TrainStep, parallelize


class Boxes(nn.Module):
    """Divides by the number of boxes, on all ranks as DETR does, or on its own, and counts its calls."""

    def __init__(self, communicates=True):
        super().__init__()
        self.calls = 0
        self.communicates = communicates

    def forward(self, output, target, mask):
        self.calls += 1
        if not self.communicates:
            return local_boxes(output, target, mask)
        count = mask.sum().double().reshape(1)
        dist.all_reduce(count)
        return ((output - target).abs().sum(1) * mask).sum() / torch.clamp(
            count / dist.get_world_size(), min=1
        ).item()


def local_boxes(output, target, mask):
    return ((output - target).abs().sum(1) * mask).sum() / mask.sum().clamp(min=1)


WAYS = {
    "none": {},
    "weight": {"weight": lambda output, target, mask: mask.sum(), "minimum": 7},
    "rows": {"weight": "rows"},
}


def make_batch(rows, number=0):
    torch.manual_seed(10 + number)
    return torch.randn(rows, 4).double(), (
        torch.randn(rows, 3).double(),
        torch.arange(rows) % 3 < 2,
    )


def my_rows(batch, rank, cut):
    mine = slice(0, cut) if rank == 0 else slice(cut, None)
    inputs, targets = batch
    return inputs[mine], tuple(target[mine] for target in targets)


def check_equal(rank, way, strategy, by_hand):
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    plain = copy.deepcopy(net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = make_step(DataParallelCriterion(Boxes(), **WAYS[way]), net, strategy)
        for number, rows in enumerate((7, 5, 2)):
            batch = make_batch(rows, number)
            expected, gradients = plain_program(plain, local_boxes, *batch)
            loss = run(step, by_hand, *my_rows(batch, rank, (rows + 1) // 2))
            torch.testing.assert_close(loss.detach(), expected, rtol=1e-10, atol=0)
            assert_same_gradients(whole_gradients(step.model.parameters()), gradients)
    messages = [
        str(warning.message) for warning in caught if "communicates" in str(warning.message)
    ]
    assert len(messages) == 1
    assert "its values are averaged over them, and weight= is not used" in messages[0]


def make_step(criterion, net=None, strategy="ddp", **settings):
    """Returns a step that does not change the parameters."""
    model, criterion = parallelize(net or nn.Linear(4, 3).double(), criterion, strategy=strategy)
    return TrainStep(model, criterion, sgd(model, lr=0.0), **settings)


def run(step, by_hand, inputs, targets):
    """Returns the loss of an update, or of a forward and a backward by hand."""
    if not by_hand:
        return step(inputs, targets)
    step.model.zero_grad()
    loss = step.criterion(step.model(inputs), *targets)
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("way", "strategy", "by_hand"), pairs([*WAYS], ["ddp", "fsdp"], [True, False])
)
def test_criterion_that_reduces_its_divisor_is_averaged_over_ranks(way, strategy, by_hand):
    run_ranks(2, check_equal, way, strategy, by_hand)


def check_empty(rank, by_hand):
    """A rank without rows comes after the first batch: both ranks raise the same error."""
    step = make_step(DataParallelCriterion(Boxes(), weight="rows"))
    with pytest.warns(UserWarning, match="communicates"):
        run(step, by_hand, *my_rows(make_batch(4), rank, 2))
    with pytest.raises(
        ValueError,
        match="communicates with the other ranks itself, expected rows and one micro-batch",
    ) as caught:
        run(step, by_hand, *my_rows(make_batch(3), rank, 3))
    return str(caught.value)


@pytest.mark.parametrize("by_hand", [True, False])
def test_rank_without_rows_is_refused_by_all_if_the_criterion_communicates(by_hand):
    errors = run_ranks(2, check_empty, by_hand)
    assert errors[0] == errors[1]


def check_refused(rank, settings, micro_batch_size):
    step = make_step(DataParallelCriterion(Boxes(), **settings), micro_batch_size=micro_batch_size)
    with pytest.raises(ValueError, match="communicates .* write it without collectives"):
        step(*my_rows(make_batch(8), rank, 4))


@pytest.mark.parametrize(
    ("settings", "micro_batch_size"),
    [({}, 2), ({"weight": "rows"}, 2), ({"whole": True}, None), ({"reduction": "sum"}, None)],
)
def test_criterion_that_communicates_is_refused_where_it_is_not_called_once(
    settings, micro_batch_size
):
    run_ranks(2, check_refused, settings, micro_batch_size)


def check_local(rank, first_cut):
    """A criterion without collectives is called once for each batch, and ranks ask once, also if one begins without rows."""
    asked = []
    split = DataParallelCriterion(Boxes(communicates=False), weight=WAYS["weight"]["weight"])
    step = make_step(split)
    for cut in (first_cut, 2, 4, 2):
        asked.append(step._forwards.copies.collectives.asks)
        step(*my_rows(make_batch(4), rank, cut))
    return asked, split.module.calls


def test_criterion_without_collectives_is_asked_for_once():
    assert run_ranks(2, check_local, 2) == [
        ([True, False, False, False], 4),
        ([True, False, False, False], 4),
    ]
    assert run_ranks(2, check_local, 4) == [
        ([True, True, False, False], 4),
        ([True, True, False, False], 4),
    ]
