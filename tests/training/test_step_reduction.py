"""``reduction`` of a criterion that is set after it was wrapped is followed, as its other settings are."""

import pytest
import torch
from helpers.optimizers import sgd
from helpers.problems import build_net, class_targets
from torch import nn

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep

REDUCTIONS = ("mean", "sum", "mean")
ROWS = 7


def plain():
    net = build_net().double()
    loss = nn.CrossEntropyLoss()
    optimizer = sgd(net)
    losses = []
    for number, loss.reduction in enumerate(REDUCTIONS):
        inputs = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(number)).double()
        optimizer.zero_grad()
        value = loss(net(inputs), class_targets(ROWS, ignored=2))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, list(net.parameters())


@pytest.mark.parametrize(
    "settings",
    [None, {}, {"micro_batch_size": 1}, {"micro_batch_size": 2, "reproducible": "bits"}],
    ids=str,
)
def test_a_reduction_that_is_set_later_is_followed(settings):
    """The sum was divided, as the mean before."""
    losses, parameters = plain()
    net = build_net().double()
    loss = nn.CrossEntropyLoss()
    model = DataParallelModel(net, ["cpu"] * 3)
    criterion = DataParallelCriterion(loss)
    optimizer = sgd(net)
    step = TrainStep(model, criterion, optimizer, **settings or {})
    for number, loss.reduction in enumerate(REDUCTIONS):
        inputs = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(number)).double()
        targets = class_targets(ROWS, ignored=2)
        if settings is None:
            optimizer.zero_grad()
            value = criterion(model(inputs), targets)
            value.backward()
            optimizer.step()
        else:
            value = step(inputs, targets)
        assert value.item() == pytest.approx(losses[number], rel=1e-7)
        assert criterion.reduction == loss.reduction
    torch.testing.assert_close(list(net.parameters()), parameters, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(("name", "value"), [("weight", "rows"), ("minimum", 1.0), ("whole", True)])
def test_settings_that_are_assigned_later_are_refused(name, value):
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    with pytest.raises(
        AttributeError, match=rf"{name} was assigned to a DataParallelCriterion, expected a new one"
    ):
        setattr(criterion, name, value)
