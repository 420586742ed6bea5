"""``reduction`` of a criterion that is set after it was wrapped is followed, as its other settings are."""

import pytest
import torch
from helpers.layouts import make_update
from helpers.plain import Plain
from helpers.problems import build_net, class_targets
from torch import nn
from torch.testing import assert_close

from balanced_parallel import DataParallelCriterion, DataParallelModel


@pytest.mark.parametrize(
    ("way", "settings"),
    [("by hand", {}), (None, {}), (1, {}), (2, {"reproducible": "bits"})],
    ids=str,
)
def test_a_reduction_that_is_set_later_is_followed(way, settings):
    """The sum was divided, as the mean before."""
    net = build_net().double()
    plain = Plain(net, nn.CrossEntropyLoss())
    model = DataParallelModel(net, ["cpu"] * 3)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    update = make_update(model, criterion, way, **settings)
    for reduction in ("mean", "sum", "mean"):
        for loss in (plain.criterion, criterion.module):
            loss.reduction = reduction
        batch = torch.randn(7, 4).double(), class_targets(7, ignored=2)
        assert_close(update(*batch), plain(*batch), rtol=1e-7, atol=1e-10)
        assert criterion.reduction == reduction
    plain.assert_same(net, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(("name", "value"), [("weight", "rows"), ("minimum", 1.0), ("whole", True)])
def test_settings_that_are_assigned_later_are_refused(name, value):
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    with pytest.raises(
        AttributeError, match=rf"{name} was assigned to a DataParallelCriterion, expected a new one"
    ):
        setattr(criterion, name, value)
