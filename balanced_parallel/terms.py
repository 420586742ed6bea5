"""One replica's part of a loss: a sum, and what it is to be divided by. In the three ways in which a criterion allows it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import nesting
from .losses import loss_weight
from .weighting import Weight, weighted_sum, widen, zero_of

__all__: list[str] = []

Criterion = nn.Module | Callable[..., Tensor]


class Terms(NamedTuple):
    """The loss of each replica as a sum and what it is to be divided by: ``None`` where the criterion is itself a sum, empty
    where that was counted before."""

    sums: list[Tensor]
    weights: list[Weight] | None


class Shard(NamedTuple):
    """What one replica has: its copy of the criterion, how many rows, its output, and its rows of the targets."""

    criterion: Criterion
    rows: int
    output: Any
    targets: tuple[Any, ...]
    kwargs: dict[str, Any]

    def call(self, criterion: Criterion | None = None) -> Any:
        """What the criterion, or another in its place, returns. Of AdaptiveLogSoftmaxWithLoss, and of others that return a
        record, its loss."""
        result = (criterion or self.criterion)(*nesting.spread(self.output), *self.targets, **self.kwargs)
        return result if isinstance(result, Tensor) else getattr(result, "loss", result)

    def weigh(self) -> Tensor:
        """What a criterion that :func:`loss_weight` knows divides its mean by."""
        return loss_weight(self.criterion, *nesting.spread(self.output), *self.targets, **self.kwargs)

    def nothing(self) -> Tensor:
        """Zero, connected to the output and to the criterion's parameters."""
        learned = list(self.criterion.parameters()) if isinstance(self.criterion, nn.Module) else []
        tensors = [leaf for _, leaf in nesting.leaves(self.output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return zero_of(*tensors, *learned) if tensors or learned else torch.zeros(())


def total_of(shard: Shard) -> Tensor:
    """Of a criterion that is a sum. No rows are not asked: for some losses they are an error."""
    return weighted_sum(shard.call(), 1) if shard.rows else shard.nothing()


def mean_and_weight(weigh: Callable[[Shard], Weight]) -> Callable[[Shard], tuple[Tensor, Weight]]:
    """Of a criterion that is a mean, of which only the value and the weight are known: ``mean x weight``."""

    def term(shard: Shard) -> tuple[Tensor, Weight]:
        with torch.no_grad():
            weight = weigh(shard)
        if not weight:  # whatever the criterion makes of nothing (nan, an error), it counts for nothing
            return shard.nothing(), weight
        return weighted_sum(shard.call(), weight), weight

    return term


def sum_and_weight(shard: Shard) -> tuple[Tensor, Weight]:
    """Of a loss of torch: :func:`sum_of_terms`, and how many terms."""
    weight = shard.weigh()
    return sum_of_terms(shard), weight


def sum_of_terms(shard: Shard) -> Tensor:
    """Of a loss of torch, asked for the sum of its terms: no division, hence no nan where there is nothing to count."""
    if not shard.rows:  # multi_margin_loss of no rows is whatever its memory held before
        return widen(shard.nothing())
    halves = [leaf for leaf in nesting.spread(shard.output) if isinstance(leaf, Tensor) and leaf.dtype == torch.float16]
    if halves and not torch.is_autocast_enabled(halves[0].device.type):  # all is float16, and a sum in it overflows
        return mean_and_weight(Shard.weigh)(shard)[0]
    if halves:  # autocast computes losses in float32, but not on the CPU
        output = tuple(widen(leaf) if isinstance(leaf, Tensor) else leaf for leaf in nesting.spread(shard.output))
        shard = shard._replace(output=output)
    return widen(shard.call(_summing(shard.criterion)))


def _summing(criterion: Criterion) -> Criterion:
    if not isinstance(criterion, nn.Module):
        return functools.partial(criterion, reduction="sum")
    summing = type(criterion).__new__(type(criterion))
    object.__setattr__(summing, "__dict__", criterion.__dict__ | {"reduction": "sum"})  # copy.copy takes ten times as long
    return summing
