"""Criteria of user code: their reductions and weights.

Each loop equals the plain program, or the error says what to write.
"""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers.loops import CPUS, Calls, assert_equal_program
from helpers.problems import CLASSES, assert_exact_update, build_net
from helpers.steps import still_step
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

    @pytest.mark.parametrize("positives", [0, 1, 5])
    def test_minimum_bounds_the_divisor_of_a_weighted_mean(self, positives):
        losses = torch.rand(7)
        counts = torch.zeros(7)
        counts[:positives] = 1
        parts = zip(losses.split([3, 2, 2]), counts.split([3, 2, 2]), strict=True)
        means = [(loss.sum() / count.sum().clamp(min=1), count.sum()) for loss, count in parts]
        mean = weighted_mean(*zip(*means, strict=True), minimum=1)
        assert_close(mean, losses.sum() / max(positives, 1))

    @pytest.mark.parametrize("kept", [(3, 4, 6), (0, 3, 4), ()])
    def test_several_means_have_their_own_divisors(self, kept):
        def criterion(output, target):
            some = target > 0
            return {
                "class": F.cross_entropy(output, target),
                "box": output[some].pow(2).sum() / some.sum().clamp(min=1),
            }

        def total(net):
            return sum(criterion(net(x), target).values())

        net = build_net()
        x = torch.randn(7, 4)
        target = torch.zeros(7, dtype=torch.long)
        target[list(kept)] = torch.arange(1, 1 + len(kept))
        of_targets = {"class": len, "box": lambda target: (target > 0).sum()}

        def of_outputs(output, target, counts=of_targets):
            return {name: count(target) for name, count in counts.items()}

        for weight in (of_targets, of_outputs):
            split = DataParallelCriterion(criterion, weight=weight, minimum=1)
            assert_equal_program(
                build_net(),
                lambda *batch, split=split: sum(split(*batch).values()),
                total,
                [x],
                [target],
            )
        step = still_step(
            net, DataParallelCriterion(criterion, weight=of_targets, minimum=1), micro_batch_size=1
        )
        assert_exact_update(
            step, net, lambda output, target: sum(criterion(output, target).values()), x, target
        )

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

    def test_several_means_by_rows_as_sums_and_with_a_replica_of_weight_zero(self):
        x = torch.randn(7, 4)
        target = torch.rand(7, CLASSES)
        net = build_net()
        outputs = DataParallelModel(net, CPUS)(x)
        means = DataParallelCriterion(
            lambda o, t: (F.mse_loss(o, t), F.l1_loss(o, t), None), weight="rows"
        )(outputs, target)
        assert_close(means[0], F.mse_loss(net(x), target))
        assert_close(means[1], F.l1_loss(net(x), target))
        assert means[2] is None
        sums = DataParallelCriterion(
            lambda o, t: [F.mse_loss(o, t, reduction="sum"), o.sum()], reduction="sum"
        )(outputs, target)
        assert_close(sums[1], net(x).sum())
        x = torch.randn(6, 4)
        target = torch.tensor([1, 2, -100, -100, 0, 3])  # a replica of weight zero
        criterion = DataParallelCriterion(
            lambda o, t: {"nll": F.cross_entropy(o, t)}, weight=lambda o, t: (t != -100).sum()
        )
        found = criterion(DataParallelModel(net, CPUS)(x), target)
        assert_close(found["nll"], F.cross_entropy(net(x), target))
