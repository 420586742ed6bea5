"""Losses and gradients of DataParallelCriterion: equality with the plain program, and errors."""

import functools
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers.loops import CPUS, Calls
from helpers.problems import assert_exact, build_net, class_targets
from torch import nn
from torch.testing import assert_close
from transformers.modeling_outputs import SequenceClassifierOutput

from balanced_parallel import DataParallelCriterion, DataParallelModel, PerReplica, gather

pytestmark = pytest.mark.usefixtures("double")


class Outputs(NamedTuple):
    main: torch.Tensor
    other: torch.Tensor


def shaped(form):
    """Returns a network with its output in another form."""
    return Calls(lambda net, x: form(net(x)))


def cross_entropy_of(pick):
    return lambda output, target: F.cross_entropy(pick(output), target)


FORMS = {
    "bare": (lambda out: out, F.cross_entropy),
    "tuple of one": (lambda out: (out,), F.cross_entropy),
    "tuple": (
        lambda out: (out, out * 2),
        lambda one, two, target: F.cross_entropy(one + two, target),
    ),
    "list": (lambda out: [out, out * 2], cross_entropy_of(lambda out: out[0] + out[1])),
    "mapping": (lambda out: {"logits": out}, cross_entropy_of(lambda out: out["logits"])),
    "named tuple": (lambda out: Outputs(out, out), cross_entropy_of(lambda out: out.main)),
    "ModelOutput": (
        lambda out: SequenceClassifierOutput(logits=out),
        cross_entropy_of(lambda out: out.logits),
    ),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("ignored", [0, 3])
def test_all_forms_of_outputs_equal_the_plain_program(name, ignored):
    form, criterion = FORMS[name]
    plain = (
        criterion if not name.startswith("tuple") else lambda out, target: criterion(*out, target)
    )
    weight = None if name in ("bare", "tuple of one") else lambda *given: (given[-1] != -100).sum()
    assert_exact(
        shaped(form),
        criterion,
        torch.randn(7, 4),
        class_targets(7, ignored),
        plain=plain,
        weight=weight,
    )


def test_reduction_none_returns_losses_for_gather():
    net = build_net()
    x = torch.randn(7, 4)
    target = class_targets(7)
    for criterion in (
        nn.CrossEntropyLoss(reduction="none"),
        functools.partial(F.cross_entropy, reduction="none"),
    ):
        losses = DataParallelCriterion(criterion)(DataParallelModel(net, CPUS)(x), target)
        assert [len(loss) for loss in losses] == [3, 2, 2]
        assert_close(gather(losses), F.cross_entropy(net(x), target, reduction="none"))


def test_flattened_targets_and_outputs_equal_the_plain_program():
    x = torch.randn(5, 3, 4)
    target = torch.randint(5, (5, 3))
    target[:2] = -100
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    flat = DataParallelModel(shaped(lambda out: out.flatten(0, 1)), CPUS)
    deep = DataParallelModel(shaped(lambda out: out.transpose(1, 2)), CPUS)
    expected = F.cross_entropy(flat.module(x), target.flatten())
    assert_close(criterion(flat(x), target.flatten()), expected)
    assert_close(criterion(list(flat(x)), target.flatten()), expected)
    assert_close(criterion(deep(x), target), expected)
    with pytest.raises(ValueError, match="the targets have 4 rows, but the inputs have 5"):
        criterion(deep(x), target[:4])


@pytest.mark.parametrize(
    "loss",
    [
        nn.MSELoss(),
        lambda out, target: F.mse_loss(out, target),
        lambda out, target: (out - target).pow(2).mean(),
    ],
)
def test_sums_of_half_precision_losses_do_not_overflow(loss):
    output = torch.full((64, 4), 50.0, dtype=torch.float16)
    target = torch.zeros(64, 4, dtype=torch.float16)
    halves = PerReplica([output[:40], output[40:]], [40, 24])
    criterion = DataParallelCriterion(loss)
    assert criterion(halves, target).item() == 2500  # although the sum of the squares exceeds 65504
    with torch.autocast("cpu", torch.float16):
        assert criterion(halves, target).item() == 2500


def test_class_weights_in_half_precision_keep_their_dtype():
    output = torch.randn(7, 5).half()
    target = class_targets(7, 2)
    criterion = nn.CrossEntropyLoss(weight=torch.rand(5).half())
    found = DataParallelCriterion(criterion)([output[:4], output[4:]], target)
    assert_close(found, criterion(output, target).float(), rtol=2e-3, atol=0)


def test_invalid_criteria_and_outputs_raise_an_error():
    net = build_net()
    x = torch.randn(7, 4)
    model = DataParallelModel(net, CPUS)
    with pytest.raises(TypeError, match="expected a module or a function"):
        DataParallelCriterion("cross entropy")
    with pytest.raises(
        TypeError,
        match=r"given a tensor of shape \(7, 5\), expected the list.*criterion\(\[output\]",
    ):
        DataParallelCriterion(F.mse_loss)(net(x), x)
    with pytest.raises(
        ValueError, match=r"(?s)the loss has shape \(3, 5\), expected a scalar.*in replica 0"
    ):
        DataParallelCriterion(lambda out, y: out, weight=lambda *_: 1)(model(x), x)
    with pytest.raises(
        TypeError,
        match=r"returned an object of type str, expected a tensor with one element\nin replica",
    ):
        DataParallelCriterion(lambda out, y: {"loss": "high"}, weight=lambda *_: 1)(model(x), x)
    with pytest.raises(IndexError, match=r"in replica \d on device cpu"):
        DataParallelCriterion(F.cross_entropy)(model(x), torch.full((7,), 99))
    with pytest.raises(
        ValueError, match=r"an output is on meta, expected one of device_ids=\['cpu'\]"
    ):
        DataParallelCriterion(F.mse_loss, ["cpu"])([torch.zeros(2, device="meta")], torch.zeros(2))


def test_the_loss_without_rows_is_zero():
    """Without rows, torch's multi_margin_loss returns uninitialized memory."""
    criterion = DataParallelCriterion(nn.MultiMarginLoss())
    outputs = [torch.empty(0, 5, requires_grad=True)]
    for _ in range(20):
        held = [torch.full((), 7e120) for _ in range(8)]
        del held
        sums = criterion.kind.sums(criterion.cut(outputs, (torch.empty(0, dtype=torch.long),), {}))
        assert sums[0].total.item() == 0


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="it is new in torch 2.13")
def test_a_linear_cross_entropy_ignores_labels_by_default():
    criterion = nn.LinearCrossEntropyLoss(4, 5)
    rows = torch.randn(6, 4)
    target = torch.tensor([0, 1, -100, 2, -100, 3])
    outputs = PerReplica(rows.split(3), [3, 3])
    assert_close(DataParallelCriterion(criterion)(outputs, target), criterion(rows, target))
