"""Criteria that read Python numbers from a batch, and criteria that change after the first batch: exact or refused."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.problems import build_net
from helpers.slow import slow
from helpers.steps import still_step
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    AdditiveLoss,
    DataParallelCriterion,
    PerReplica,
    Rows,
)

pytestmark = pytest.mark.usefixtures("double")

COUNTS = {
    "a bounded item": lambda mask: torch.clamp(mask.sum(), min=1).item(),
    "a bounded integer": lambda mask: max(1, int(mask.sum())),
    "a bounded float": lambda mask: float(mask.sum().clamp(min=1)),
    "an item and a small number": lambda mask: mask.sum().item() + 1e-6,
    "a count or one": lambda mask: mask.sum().item() or 1,
    "a condition": lambda mask: int(mask.sum()) if mask.sum() else 1,
    "indices or one": lambda mask: len(mask.nonzero()) or 1,
    "the larger of a size and one": lambda mask: max(torch.where(mask)[0].shape[0], 1),
    "a number of selected rows": lambda mask: len(mask[mask]),
    "a number of selected elements": lambda mask: mask.masked_select(mask).nelement(),
    "true rows": lambda mask: max(sum(1 for row in mask if row), 1),
    "numbers of true rows": lambda mask: max(
        len([row for row in range(len(mask)) if mask[row]]), 1
    ),
    "a list": lambda mask: max(1, sum(mask.tolist())),
    "an array": lambda mask: max(1.0, float(mask.numpy().sum())),
    "the larger of numpy": lambda mask: float(np.maximum(np.asarray(mask).sum(), 1)),
    "a tensor of a number": lambda mask: (
        torch.as_tensor([len(mask[mask])], dtype=torch.float).clamp(min=1).item()
    ),
}


def update(criterion, micro_batch_size, *batches):
    """Runs updates of a step with three replicas, or of a loop by hand without ``micro_batch_size``."""
    net = build_net()
    step = still_step(net, DataParallelCriterion(criterion), micro_batch_size=micro_batch_size)
    for inputs, *targets in batches:
        if micro_batch_size is None:
            step.criterion(step.model(inputs), *targets)
        else:
            step(inputs, tuple(targets))


@pytest.mark.parametrize("micro_batch_size", [None, 1, slow(2)])
@pytest.mark.parametrize("name", COUNTS)
def test_a_count_that_is_read_from_values_is_refused(name, micro_batch_size):
    """One row for each replica counts one, with every target and with none: as many as the rows."""
    count = COUNTS[name]

    def loss(output, values, mask):
        return ((output - values).abs().sum(1) * mask).sum() / count(mask)

    inputs = torch.randn(3, 4)
    values = torch.randn(3, 5)
    mask = torch.ones(3, dtype=torch.bool)
    with pytest.raises(
        ValueError,
        match=r"sum over a number|expected a number that follows|for some rows, and .* for others",
    ):
        update(
            loss, micro_batch_size, (inputs, values, mask), (inputs, values, torch.arange(3) < 1)
        )


def over_selected(output, values, mask):
    return F.mse_loss(output[mask], values[mask], reduction="sum") / (len(output[mask]) or 1)


def over_a_mean_of_targets(output, values, mask):
    return (output.abs().sum(1) * mask).sum() / max(
        1, round(mask.double().mean().item() * len(mask))
    )


def over_true_rows(output, values, mask):
    return (output.abs().sum(1) * mask).sum() / max(sum(1 for row in mask if row), 1)


@pytest.mark.parametrize("loss", [over_selected, over_a_mean_of_targets, over_true_rows])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_a_number_is_refused_in_the_first_batch(loss, micro_batch_size):
    with pytest.raises(
        ValueError,
        match=r"a sum over a number that was read from values.*clamp\(min=1\).*weight=.*minimum=1",
    ):
        update(
            loss,
            micro_batch_size,
            (torch.randn(12, 4), torch.randn(12, 5), torch.ones(12, dtype=torch.bool)),
        )


def test_a_count_of_entries_of_a_list_is_refused():
    """One image with a box, and one without, have the divisor 1."""

    def loss(output, targets):
        return output.abs().sum() / max(sum(len(target["boxes"]) for target in targets), 1)

    boxes = [{"boxes": torch.zeros(1, 4)} for _ in range(3)]
    with pytest.raises(ValueError, match="an entry of a list"):
        DataParallelCriterion(loss)(PerReplica(torch.randn(3, 5).split(1), [1, 1, 1]), Rows(boxes))


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_a_factor_that_is_read_from_values_is_refused(micro_batch_size):
    def loss(output, values, mask):
        return F.mse_loss(output, values) + 0.5 * float(mask.any()) * output.abs().mean()

    inputs = torch.randn(12, 4)
    values = torch.randn(12, 5)
    masks = torch.ones(12, dtype=torch.bool), torch.arange(12) < 4
    with pytest.raises(
        ValueError, match=r"computes mse_loss \+ mean \* 0.5 for some rows, and .* for others"
    ):
        update(loss, micro_batch_size, *((inputs, values, mask) for mask in masks))


NUMBERS = {
    "an item": lambda mask: 1 / max(int(mask.sum()), 1),
    "a size": lambda mask: 1 / (len(mask[mask]) or 1),
    "a root": lambda mask: max(mask.sum().item(), 1.0) ** -0.5,
}


@pytest.mark.parametrize("of_rows", [False, True])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_differs_between_two_comparisons_is_refused(name, micro_batch_size, of_rows):
    """Each shard of the third batch has as many targets, and was not compared with its halves."""

    def loss(output, values, mask):
        errors = (output - values).pow(2).sum(1) * mask
        number = NUMBERS[name](mask)
        return (errors * number).sum() if of_rows else errors.sum() * number

    none = torch.zeros(6, dtype=torch.bool)
    batches = [(torch.randn(6, 4), torch.randn(6, 5), mask) for mask in (none, none, ~none)]
    with pytest.raises(
        ValueError, match="added up from their halves, expected a number that follows"
    ):
        update(loss, micro_batch_size, *batches)


def test_numbers_that_the_sums_do_not_depend_on_are_exact():
    """A shift that is read in each shard cancels. Its 1st, 2nd, 4th, ... change is compared."""
    sizes = []

    def loss(output, values):
        sizes.append(len(output))
        shift = values.max().item()
        return ((output - shift) - (values - shift)).pow(2).mean().sqrt()

    net = build_net()
    step = still_step(net, DataParallelCriterion(loss), micro_batch_size=None)
    for number in range(7):
        inputs, values = torch.randn(7, 4), torch.randn(7, 5)
        assert_close(step(inputs, values), F.mse_loss(net(inputs), values).sqrt())
        compared = [size for size in sizes if size > 3]
        assert bool(compared) == (number in (0, 1, 3))  # the third change is not
        sizes.clear()


def errors_of(output, values, mask):
    return (output - values).pow(2).sum(1), mask.double()


def constant_below(output, values, mask):
    errors, mask = errors_of(output, values, mask)
    return (errors * mask).sum() / mask.sum() if mask.sum() > 2 else torch.tensor(0.0)


def zero_below(output, values, mask):
    errors, mask = errors_of(output, values, mask)
    return (errors * mask).sum() / mask.sum() if mask.sum() > 2 else output.sum() * 0


def term_above(output, values, mask):
    errors, mask = errors_of(output, values, mask)
    has_term = mask.sum() > 2
    return errors.mean() + ((errors * mask).sum() / mask.sum() if has_term else 0)


BEFORE = [0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("micro_batch_size", [None, 1, 3])
@pytest.mark.parametrize(
    ("loss", "masks"),
    [
        (constant_below, [[1, 1, 1, 1, 1, 0, 1]]),
        (constant_below, [*BEFORE, [1, 0, 0, 1, 0, 1, 0]]),
        (zero_below, [*BEFORE, [1, 0, 0, 1, 0, 1, 0]]),
        (term_above, [*BEFORE, [1, 0, 0, 1, 0, 1, 0]]),
    ],
)
def test_a_branch_that_is_another_one_for_all_rows_is_refused(loss, masks, micro_batch_size):
    """Each shard counted one target, and the loss was zero: all of them count three."""
    batches = [
        (torch.randn(7, 4), torch.randn(7, 5), torch.tensor(mask, dtype=torch.bool))
        for mask in masks
    ]
    match = (
        r"an if, max or min of sums .* for the sums of all rows|for some rows, and .* for others"
    )
    if loss is constant_below and micro_batch_size is not None:
        match += "|depends on no parameter"
    with pytest.raises((ValueError, RuntimeError), match=match):
        update(loss, micro_batch_size, *batches)


@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_a_constant_for_rows_without_targets_is_refused(micro_batch_size):
    def loss(output, values, mask):
        return F.mse_loss(output[mask], values[mask]) if mask.any() else torch.tensor(0.0)

    batch = torch.randn(7, 4), torch.randn(7, 5), torch.arange(7) < 3
    with pytest.raises(
        ValueError, match=r"constant for some rows, tensor\(0.0\); expected the same"
    ):
        update(loss, micro_batch_size, batch)


class Changing(nn.Module):
    """A loss that is another one after some batches, as a flag tells."""

    def __init__(self, after, before=F.mse_loss):
        super().__init__()
        self.before = before
        self.after = after
        self.has_begun = False

    def forward(self, output, values):
        return (self.after if self.has_begun else self.before)(output, values)


def hard_examples(output, values, has_begun=True):
    """Keeps the terms when the threshold begins."""
    errors = (output - values).pow(2).sum(1)
    return errors[errors > (errors.detach().median() if has_begun else 0.0)].mean()


CHANGES = {
    "contrast": (
        lambda out, values: (
            F.mse_loss(out, values) + F.cross_entropy(out @ out.T, torch.arange(len(out)))
        ),
    ),
    "spread": (lambda out, values: F.mse_loss(out, values) + F.relu(100 - out.std(0)).mean(),),
    "one divisor": (
        lambda out, values: F.mse_loss(out, values) + F.mse_loss(out - out.mean(0), values),
    ),
    "hard examples": (
        hard_examples,
        lambda out, values: hard_examples(out, values, has_begun=False),
    ),
}


@pytest.mark.parametrize("before", [1, slow(2), 3])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("name", CHANGES)
def test_a_criterion_that_changes_after_some_batches_is_compared_again(
    name, micro_batch_size, before
):
    criterion = DataParallelCriterion(Changing(*CHANGES[name]))
    inputs = torch.randn(12, 4)
    values = torch.randn(12, 5)
    net = build_net()
    step = still_step(net, criterion, micro_batch_size=micro_batch_size)
    run = (
        (lambda: criterion(step.model(inputs), values))
        if micro_batch_size is None
        else (lambda: step(inputs, values))
    )
    for _ in range(before):
        assert_close(run(), criterion.module(net(inputs), values), check_dtype=False)
    criterion.module.has_begun = True
    with pytest.raises(
        ValueError, match=r"does not add up over the rows|have different counts|for some rows"
    ):
        run()


def test_statistics_that_change_are_compared_again():
    class Changes(AdditiveLoss):
        is_mean = False

        def statistics(self, output, values):
            return output.mean() if self.is_mean else output.sum()

        def finish(self, total):
            return total

    criterion = DataParallelCriterion(Changes())
    outputs = PerReplica(torch.randn(8, 5).split(4), [4, 4])
    criterion(outputs, torch.zeros(8))
    criterion.module.is_mean = True
    with pytest.raises(ValueError, match="statistics do not add up"):
        criterion(outputs, torch.zeros(8))
