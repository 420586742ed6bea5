"""Criteria of user code: their reductions and weights.

Each loop equals the plain program, or the error says what to write.
"""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers.loops import CPUS, Calls, assert_equal_program
from helpers.problems import CLASSES, build_net
from torch import nn
from torch.testing import assert_close

from balanced_parallel import DataParallelCriterion, DataParallelModel, gather, weighted_mean

pytestmark = pytest.mark.usefixtures("double")


class TestReduction:
    """The divisor of a class that computes its loss itself is not believed."""

    @pytest.mark.parametrize("setting", ["sum", "none"])
    def test_reduction_attribute_of_a_subclass_with_its_own_forward_is_ignored(self, setting):
        class BNLLLoss(nn.BCEWithLogitsLoss):
            def forward(self, output, target):
                return F.binary_cross_entropy_with_logits(output, target, reduction="sum") * (
                    1 / len(output)
                )

        x = torch.randn(7, 4)
        target = torch.rand(7, CLASSES)
        module = build_net()
        criterion = BNLLLoss(reduction=setting)
        assert_equal_program(
            module,
            DataParallelCriterion(criterion, weight="rows"),
            lambda net: criterion(net(x), target),
            [x],
            [target],
        )
        with pytest.raises(
            ValueError, match="does not add up over the rows: .*weight='rows' for a mean over rows"
        ):
            DataParallelCriterion(criterion)(DataParallelModel(module, CPUS)(x), target)

    @pytest.mark.parametrize(
        "settings",
        [{"size_average": False}, {"reduce": False}, {"size_average": True}, {"reduction": "mean"}],
    )
    def test_reduction_passed_to_the_call_is_used(self, settings):
        net = build_net()
        x = torch.randn(7, 4)
        target = torch.rand(7, CLASSES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = F.mse_loss(net(x), target, **settings)
        found = DataParallelCriterion(F.mse_loss)(
            DataParallelModel(net, CPUS)(x), target, **settings
        )
        assert_close(gather(found) if isinstance(found, list) else found, expected)

    def test_invalid_settings_of_a_criterion_raise_an_error(self):
        for settings, message in (
            ({"reduction": "total"}, "reduction='total', expected 'sum', 'mean' or 'none'"),
            ({"weight": "row"}, "weight='row', expected a function .* or 'rows'"),
            ({"minimum": -1}, "minimum=-1, expected the smallest divisor"),
            ({"dim": "rows"}, "dim='rows', expected an integer"),
        ):
            with pytest.raises((ValueError, TypeError), match=message):
                DataParallelCriterion(lambda output, target: output.mean(), **settings)
        with pytest.raises(
            ValueError, match="reduction='sum' was given for a loss with reduction='mean'"
        ):
            DataParallelCriterion(nn.MSELoss(), reduction="sum")


class TestWeight:
    def test_weight_receives_the_arguments_of_the_criterion(self):
        def criterion(one, two, target, *, mask):
            return ((one - two - target).pow(2).mean(1) * mask).sum() / mask.sum()

        module = Calls(lambda net, x: (net(x), net(x * 2)))
        x = torch.randn(7, 4)
        target = torch.rand(7, CLASSES)
        mask = torch.tensor(
            [1.0, 1, 0, 0, 0, 0, 1]
        )  # the loss of the second of three shards is nan, of weight zero
        split = DataParallelCriterion(
            criterion, weight=lambda one, two, target, *, mask: mask.sum()
        )
        call = functools.partial(split, mask=mask)
        assert_equal_program(
            module, call, lambda module: criterion(*module(x), target, mask=mask), [x], [target]
        )

    def test_invalid_weights_raise_an_error(self):
        for weight, message in (
            (-1.0, "a weight is -1.0, expected"),
            (float("nan"), "a weight is nan, expected"),
            (torch.tensor(float("inf")), "a weight is inf, expected"),
            (torch.ones(2), r"a weight has shape \(2,\), expected a scalar"),
            ("many", "a weight is an object of type str"),
        ):
            error = TypeError if weight == "many" else ValueError
            criterion = DataParallelCriterion(
                lambda output, target: output.mean(), weight=lambda *_, weight=weight: weight
            )
            with pytest.raises(error, match=message):
                criterion([torch.zeros(2)], torch.zeros(2))
            with pytest.raises(error, match=message):
                weighted_mean([torch.tensor(1.0)], [weight])

    def test_weights_must_match_the_means(self):
        outputs = DataParallelModel(build_net(), CPUS)(torch.randn(7, 4))
        target = torch.rand(7, CLASSES)
        for weights in ([1, 2, 3], {"two": 1, "one": 2}):
            criterion = DataParallelCriterion(
                lambda o, t: {"one": o.mean(), "two": t.mean()}, weight=lambda o, t, w=weights: w
            )
            with pytest.raises(ValueError, match="expected a mean for each weight, in their order"):
                criterion(outputs, target)
        listed = DataParallelCriterion(
            lambda o, t: [F.mse_loss(o, t), F.l1_loss(o, t)],
            weight=lambda o, t: [len(o), o.numel()],
        )
        assert_close(listed(outputs, target)[1], F.l1_loss(outputs.gather(), target))
