"""Losses of the micro-batches of one batch. Weights that depend on the targets alone are computed once for the batch."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..runtime.collectives import sum_over_ranks
from .criterion import DataParallelCriterion
from .weighting import LossSum, Weight

__all__: list[str] = []


class BatchLosses(NamedTuple):
    """A way to compute the losses of the micro-batches of one batch.

    Args:
        compute: returns one :class:`LossSum` per replica of a micro-batch's outputs and targets.
        weight: weight of the whole batch on this rank, if ``compute`` returns sums without weights.
        is_divided: ``compute`` returns sums that are divided already.
    """

    compute: Callable[..., list[LossSum]]
    weight: Weight = 0.0
    is_divided: bool = False


def losses_of_batch(criterion: DataParallelCriterion, targets: Sequence[tuple[Any, ...]], *, is_whole: bool) -> BatchLosses:
    """Chooses the way to compute the losses of the micro-batches of one batch.

    Args:
        criterion: the criterion.
        targets: targets of the whole batch, in any number of parts.
        is_whole: no other batch is added before the update. Ranks then sum the divisors of several means.
    """
    weights = [weight for part in targets if (weight := criterion.weigh_targets(*part)) is not None]
    if len(weights) == len(targets) > 0:
        return BatchLosses(criterion.weighed_sums, functools.reduce(operator.add, weights))
    parts = [divisors for part in targets if is_whole and (divisors := criterion.divisors_of_targets(*part)) is not None]
    if not parts or len(parts) < len(targets):
        return BatchLosses(criterion.loss_sums)
    total = sum_over_ranks(torch.tensor(parts, dtype=torch.float64).sum(0)).clamp(min=criterion.minimum)
    return BatchLosses(functools.partial(criterion.divided_sums, total.tolist()), is_divided=True)
