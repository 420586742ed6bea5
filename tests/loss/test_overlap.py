"""Dice, Tversky and Jaccard against their definitions by counts, for predictions that are certain."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from balanced_parallel import DataParallelCriterion, DiceLoss, JaccardLoss, TverskyLoss

CLASSES = 4


def certain_logits(predicted):
    return 200.0 * F.one_hot(predicted, CLASSES).double().movedim(-1, 1)


def by_counts(predicted, target, formula):
    """The mean over classes of ``formula(tp, fp, fn)``, where the target is not ignored."""
    kept = target != -100
    losses = []
    for label in range(CLASSES):
        mine = (predicted == label) & kept
        wanted = target == label
        losses.append(
            1 - formula((mine & wanted).sum(), (mine & ~wanted).sum(), (~mine & wanted).sum())
        )
    return torch.stack(losses).mean().double()


FORMULAS = [
    (DiceLoss(smooth=1.0), lambda tp, fp, fn: (2 * tp + 1) / (2 * tp + fp + fn + 1)),
    (JaccardLoss(smooth=0.5), lambda tp, fp, fn: (tp + 0.5) / (tp + fp + fn + 0.5)),
    (
        TverskyLoss(0.3, 0.7, smooth=2.0),
        lambda tp, fp, fn: (tp + 2) / (tp + 0.3 * fp + 0.7 * fn + 2),
    ),
]


@pytest.mark.parametrize(("criterion", "formula"), FORMULAS)
def test_overlaps_equal_the_counts_of_class_indices_and_of_binary_targets(criterion, formula):
    predicted = torch.randint(CLASSES, (5, 3, 6))
    target = torch.randint(CLASSES, (5, 3, 6))
    target[0, :, :4] = -100
    found = criterion(certain_logits(predicted), target)
    assert_close(found, by_counts(predicted, target, formula), rtol=1e-6, atol=0)
    predicted = torch.rand(7, 9) > 0.5
    target = torch.rand(7, 9) > 0.3
    counts = (predicted & target).sum(), (predicted & ~target).sum(), (~predicted & target).sum()
    found = criterion(200.0 * predicted.double() - 100, target.double())
    assert_close(found, 1 - formula(*counts).double(), rtol=1e-6, atol=0)


def test_half_precision_is_summed_in_float32():
    output = torch.zeros(40_000, 2, dtype=torch.float16)
    target = torch.zeros(40_000, dtype=torch.int64)
    assert (
        DiceLoss()(output, target).dtype == torch.float32
    )  # the sum of 40,000 probabilities is no float16
    assert DataParallelCriterion(DiceLoss())([output], target).isfinite()


def test_targets_of_other_shapes_are_refused():
    with pytest.raises(
        ValueError, match=r"the output has shape \(2, 3, 4\) and the target \(2, 3\)"
    ):
        DiceLoss()(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="alpha=-1"):
        TverskyLoss(alpha=-1)
