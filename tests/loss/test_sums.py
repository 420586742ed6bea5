"""Losses of torch on devices and their divisors, registered divisors, and the weighted mean of losses.

Calls of criteria and weights with outputs that are tuples.
"""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from helpers.problems import (
    assert_same_gradients,
    build_net,
    class_targets,
    gradients,
    plain_program,
)
from torch import nn
from torch.testing import assert_close

from balanced_parallel import (
    AdditiveLoss,
    DataParallelCriterion,
    DataParallelModel,
    PerReplica,
    loss_weight,
    scatter,
    simulate,
    weighted_mean,
)

pytestmark = pytest.mark.usefixtures("double")


def test_weight_of_dense_targets_excludes_ignored_labels():
    output = torch.randn(2, 5, 3, 4)
    target = torch.randint(5, (2, 3, 4))
    kept = (target != 1).sum()
    assert loss_weight(nn.CrossEntropyLoss(ignore_index=1), output, target) == kept
    weights = torch.rand(5)
    assert_close(
        loss_weight(nn.CrossEntropyLoss(weights, ignore_index=1), output, target),
        weights[target[target != 1]].sum(),
    )
    assert loss_weight(nn.CrossEntropyLoss(), output, torch.rand(2, 5, 3, 4)) == 24


def test_weight_of_elementwise_losses_with_element_weights():
    output = torch.rand(4, 3)
    target = torch.rand(4, 3)
    weight = torch.rand(4, 3)
    assert loss_weight(F.mse_loss, output, target) == 12
    assert_close(loss_weight(F.mse_loss, output, target, weight=weight), weight.sum())
    assert loss_weight(F.binary_cross_entropy, output, target, weight) == 12
    with pytest.raises(
        ValueError,
        match=r"weight of shape \(9, 3\) for an output of shape \(4, 3\).*with the targets",
    ):
        loss_weight(nn.BCELoss(weight=torch.rand(9, 3)), output, target)


class Focal(nn.CrossEntropyLoss):
    def forward(self, output, target):
        return (F.cross_entropy(output, target, reduction="none") ** 2).mean()


class SoftDiceLoss(nn.Module):
    def forward(self, output, target):
        return 1 - 2 * (output * target).sum() / (output.sum() + target.sum())


def info_nce(output, target):
    return F.cross_entropy(output @ target.t(), torch.arange(len(output)))


@pytest.mark.parametrize("criterion", [SoftDiceLoss(), info_nce, functools.partial(info_nce)])
def test_a_loss_that_couples_rows_raises_an_error(criterion):
    with pytest.raises(
        TypeError,
        match=r"rows depend on each other.* whole=True, which computes it once for all rows",
    ):
        loss_weight(criterion, torch.rand(4, 2), torch.rand(4, 2))


@pytest.mark.parametrize(
    "criterion",
    [nn.Identity(), Focal(), lambda output, target: output.sum(), max, functools.partial(max)],
)
def test_an_unknown_criterion_raises_an_error_with_a_fix(criterion):
    with pytest.raises(TypeError, match=r"weight=.*loss_weight\.register"):
        loss_weight(criterion, torch.zeros(2), torch.zeros(2))


def test_weights_registered_for_a_subclass_replace_the_rule_of_torch():
    class Halved(nn.CrossEntropyLoss):
        pass

    @loss_weight.register(Halved)
    def _(criterion, output, target):
        return output.new_tensor(len(target) / 2)

    output = torch.randn(6, 5)
    target = torch.randint(5, (6,))
    criterion = DataParallelCriterion(Halved())
    sums = criterion.kind.sums(criterion.cut([output[:2], output[2:]], (target,), {}))
    assert [one.weight for one in sums] == [1, 2]
    assert_close(sums[0].total, F.cross_entropy(output[:2], target[:2]))


def test_deprecated_reductions_raise_an_error():
    with pytest.raises(ValueError, match="size_average= or reduce=.*use reduction="):
        loss_weight(
            functools.partial(F.mse_loss, size_average=False), torch.zeros(2), torch.zeros(2)
        )


def test_weighted_mean_and_its_gradients_are_exact():
    losses = [torch.tensor(value, requires_grad=True) for value in (1.0, 2.0, 6.0)]
    mean = weighted_mean(losses, [1, torch.tensor(2), 3.0])
    mean.backward()
    assert mean.item() == pytest.approx(23 / 6)
    assert [loss.grad.item() for loss in losses] == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    assert weighted_mean([torch.tensor(2.0)], [0]).isnan()


def test_weighted_mean_ignores_nan_with_weight_zero():
    x = torch.randn(3, requires_grad=True)
    mask = torch.tensor([0.0, 0.0, 0.0])
    nothing = (
        x * mask
    ).sum() / mask.sum()  # 0 / 0: its backward gives nan even for a gradient of zero
    assert nothing.isnan()
    mean = weighted_mean([nothing, (x * 2).sum()], [mask.sum(), torch.tensor(5)])
    mean.backward()
    assert_close(mean, (x * 2).sum())
    assert x.grad.tolist() == [2, 2, 2]


def test_weighted_mean_does_not_round_half_precision_and_large_counts():
    mean = weighted_mean([torch.tensor(60000.0, dtype=torch.float16)] * 4, [1000] * 4)
    assert (mean.dtype, mean.item()) == (torch.float32, 60000)
    mean = weighted_mean(
        [torch.tensor(0.0), torch.tensor(1.0)], [torch.tensor(2**40), torch.tensor(1)]
    )
    assert mean.item() == pytest.approx(1 / (2**40 + 1), rel=1e-12)


def test_weighted_mean_of_invalid_arguments_raises_an_error():
    with pytest.raises(ValueError, match="2 losses and 1 weights"):
        weighted_mean([torch.zeros(()), torch.zeros(())], [1])
    with pytest.raises(ValueError, match="0 losses and 0 weights"):
        weighted_mean([], [])
    with pytest.raises(ValueError, match=r"shape \(2,\), expected a scalar"):
        weighted_mean([torch.zeros(2)], [1])


MIXED = [("sim:0", "cpu"), ("cpu", "sim:0"), ("sim:1", "cpu", "sim:0")]


@pytest.mark.parametrize("devices", MIXED, ids=" ".join)
@pytest.mark.parametrize("by_hand", [False, True])
def test_losses_on_gpus_and_the_cpu_have_gradients_of_all_replicas(devices, by_hand):
    inputs = torch.randn(7, 4)
    targets = class_targets(7, ignored=2)
    loss, expected = plain_program(build_net(), F.cross_entropy, inputs, (targets,))
    with simulate(2):
        net = build_net()
        outputs = DataParallelModel(net, devices)(inputs)
        if by_hand:
            pairs = [*zip(outputs, scatter(targets, devices), strict=True)]
            found = weighted_mean(
                [F.cross_entropy(*pair) for pair in pairs],
                [(shard != -100).sum() for _, shard in pairs],
            )
        else:
            found = DataParallelCriterion(F.cross_entropy)(outputs, targets)
        found.backward()
        assert found.device == outputs[0].device
        assert_close(found.detach().cpu(), loss)
        assert_same_gradients([gradient.cpu() for gradient in gradients(net)], expected)


TUPLES = PerReplica(
    [(torch.zeros(3, 5), torch.ones(3)), (torch.zeros(2, 5), torch.ones(2))], [3, 2]
)
TARGETS = torch.zeros(5, dtype=torch.long)


def on_a_pair(output, target):
    return F.cross_entropy(output[0], target) + output[1].mean()


def on_two(scores, norms, target):
    return F.cross_entropy(scores, target) + norms.mean()


CALLS = {
    "criterion": lambda: DataParallelCriterion(on_a_pair, weight="rows"),
    "weight": lambda: DataParallelCriterion(on_two, weight=lambda output, target: len(output[0])),
    "whole": lambda: DataParallelCriterion(on_a_pair, whole=True),
    "statistics": lambda: DataParallelCriterion(AdditiveLoss(on_a_pair, lambda total: total)),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_error_about_the_number_of_arguments_tells_of_the_tuple(name):
    message = (
        "takes 2 positional arguments but 3 were given: the output is a tuple, whose 2 entries fill the first 2 arguments; name "
        "each of them, or take *arguments, or return a list from the model, which is one argument"
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        CALLS[name]()(TUPLES, TARGETS)


@pytest.mark.parametrize(
    "outputs", [TUPLES, TUPLES.map(lambda pair: pair[0], dim=0)], ids=["tuple", "tensor"]
)
def test_other_type_errors_stay(outputs):
    def fails(*arguments):
        raise TypeError("of its own")

    with pytest.raises(TypeError, match=r"of its own\nin replica 0") as raised:
        DataParallelCriterion(fails, weight="rows")(outputs, TARGETS)
    assert "tuple" not in str(raised.value)
