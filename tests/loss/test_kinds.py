"""The kind of a loss is chosen once, from the settings of a criterion, and no user of the criterion changes it."""

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import assert_exact_update, build_net
from helpers.slow import pairs
from helpers.steps import still_step
from torch import nn

from balanced_parallel import DataParallelCriterion, DiceLoss, verify


def two_means(output, target):
    return F.cross_entropy(output, target) + 0.1 * output.square().mean()


def one_mean(output, target):
    return F.cross_entropy(output, target, ignore_index=0)


def spread_of_outputs(output, target):
    return (output @ output.t()).logsumexp(1).mean() + F.cross_entropy(output, target)


def summed(output, target):
    return F.cross_entropy(output, target, reduction="sum") + output.square().sum()


def weigh(output, target):
    return (target != 0).sum()


class Focal(nn.CrossEntropyLoss):
    """Another loss than that of its base class."""

    def forward(self, output, target):
        return (F.cross_entropy(output, target, reduction="none") ** 2).mean()


class Shifted(nn.Module):
    """A cross entropy with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.full((3,), 0.5))

    def forward(self, output, target):
        return F.cross_entropy(output + self.shift, target)


CRITERIA = {
    "a sum": (lambda: nn.CrossEntropyLoss(reduction="sum"), {}),
    "a sum by a setting": (lambda: summed, {"reduction": "sum"}),
    "a mean of torch": (lambda: nn.CrossEntropyLoss(ignore_index=0), {}),
    "a mean with class weights": (
        lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])),
        {},
    ),
    "a mean over rows": (lambda: nn.CrossEntropyLoss(), {"weight": "rows"}),
    "a mean with a weight": (lambda: one_mean, {"weight": weigh}),
    "two means": (lambda: two_means, {}),
    "a mean inside": (lambda: one_mean, {}),
    "a mean of a module with a parameter": (Shifted, {}),
    "a mean of a subclass of a loss of torch": (Focal, {}),
    "a function of sums": (DiceLoss, {}),
    "a function of all rows": (lambda: spread_of_outputs, {"whole": True}),
}


@pytest.fixture
def net(double):
    return build_net(3)


@pytest.mark.parametrize(("name", "limit", "devices"), pairs([*CRITERIA], [None, 1, 2], [1, 3]))
def test_every_kind_equals_the_plain_program_and_leaves_the_criterion_as_it_is(
    net, name, devices, limit
):
    make, settings = CRITERIA[name]
    plain = make().double() if isinstance(make(), nn.Module) else make()
    criterion = DataParallelCriterion(plain, **settings)
    before = {
        key: value
        for key, value in vars(criterion).items()
        if not key.startswith("_") and key != "training"
    }
    step = still_step(net, criterion, devices, micro_batch_size=limit)
    for _ in range(3):
        assert_exact_update(step, net, plain, torch.randn(7, 4), torch.randint(3, (7,)))
    if limit == 1:
        verify(
            net,
            criterion,
            torch.randn(7, 4),
            torch.randint(3, (7,)),
            device_ids=["cpu"] * 2,
            micro_batch_size=2,
        )
    assert all(vars(criterion)[key] is value for key, value in before.items())


def test_the_number_of_counted_targets_stays_whole():
    """A float32 would round 2**24 + 1."""
    targets = torch.zeros(1, dtype=torch.long).expand(2**24 + 1)
    kind = DataParallelCriterion(nn.CrossEntropyLoss()).kind
    assert int(kind.of_batch([(targets,)], is_whole=True).weight) == 2**24 + 1
