"""One replica's part of a loss: a sum, and what it is to be divided by. In the three ways in which a criterion allows it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..batch import nested
from .rules import loss_weight
from .weighting import LossSum, check_weight, map_weights, read_weights, weighted_sum, widen, zero_of

__all__: list[str] = []

Criterion = nn.Module | Callable[..., Tensor]


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
        return loss_of((criterion or self.criterion)(*nested.spread(self.output), *self.targets, **self.kwargs))

    def weigh(self) -> Tensor:
        """What a criterion that :func:`loss_weight` knows divides its mean by."""
        return loss_weight(self.criterion, *nested.spread(self.output), *self.targets, **self.kwargs)

    def nothing(self) -> Tensor:
        """Zero, connected to the output and to the criterion's parameters."""
        learned = list(self.criterion.parameters()) if isinstance(self.criterion, nn.Module) else []
        tensors = [leaf for _, leaf in nested.leaves(self.output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return zero_of(*tensors, *learned) if tensors or learned else torch.zeros(())


def loss_of(result: Any) -> Any:
    """The loss in what a criterion returns: of a record with a loss among other things, such as that of
    ``AdaptiveLogSoftmaxWithLoss``, the loss."""
    return result if isinstance(result, Tensor) else getattr(result, "loss", result)


def total_of(shard: Shard) -> Any:
    """Returns the :class:`LossSum` of a criterion that is a sum, or a structure of them.

    A criterion is not called without rows, which are an error for some losses.
    """
    if not shard.rows:
        return LossSum(shard.nothing(), None)
    return nested.map_leaves(lambda leaf: leaf if leaf is None else LossSum(weighted_sum(leaf, 1), None), shard.call())


def mean_and_weight(weigh: Callable[[Shard], Any], minimum: float) -> Callable[[Shard], Any]:
    """Makes :class:`LossSum` of a criterion that is a mean, or of each of the means that it returns: ``mean x weight``.

    Args:
        weigh: the weight of a shard, or a structure with one for each mean.
        minimum: of what the criterion divides by.
    """

    def term(shard: Shard) -> Any:
        with torch.no_grad():
            weights = read_weights(weigh(shard))
        if not shard.rows or weights == 0 == minimum:
            # whatever the criterion makes of nothing (nan, an error), it counts for nothing
            return map_weights(lambda weight: LossSum(shard.nothing(), weight), weights)
        return _weighted(shard.call(), weights, minimum, "the loss")

    return term


def _weighted(means: Any, weights: Any, minimum: float, place: str) -> Any:
    if isinstance(weights, float):
        return nested.map_leaves(
            lambda mean: None if mean is None else LossSum(weighted_sum(mean, max(weights, minimum)), weights), means
        )
    container = nested.open_container(means)
    names = [] if container is None else [name.strip(".[]'\"") for name in container.places]
    given = [*map(str, weights)] if isinstance(weights, dict) else [*map(str, range(len(weights)))]
    if container is None or (names if isinstance(weights, dict) else [*map(str, range(len(names)))]) != given:
        raise ValueError(
            f"{place} is {nested.describe(means)}, and its weights have the entries {', '.join(given)}: expected one weight for "
            "each mean, in the same order"
        )
    children = weights.values() if isinstance(weights, dict) else weights
    pairs = zip(container.children, children, container.places, strict=True)
    return container.rebuild([_weighted(mean, weight, minimum, place + where) for mean, weight, where in pairs])


def sum_and_weight(shard: Shard) -> LossSum:
    """A :class:`LossSum` of a loss of torch: :func:`sum_of_terms`, and how many terms."""
    weight = shard.weigh()
    return LossSum(sum_of_terms(shard), weight)


def merge(parts: Sequence[Any], together: Callable[[list[LossSum]], Any]) -> Any:
    """Returns ``together(sums)`` of the replicas' parts of each loss, in the structure in which the criterion returns several."""
    form = next((part for part in parts if not isinstance(part, LossSum)), None)
    if form is None:
        return together(list(parts))
    # a replica that counts nothing was not asked, and has one part for all
    filled = [_repeated(part, form) if isinstance(part, LossSum) else part for part in parts]
    return nested.zip_leaves(lambda place, sums: None if None in sums else together(sums), filled, "the loss")


def _repeated(part: LossSum, form: Any) -> Any:
    return nested.map_leaves(lambda _: part, form)


def sum_of_terms(shard: Shard) -> Tensor:
    """Of a loss of torch, asked for the sum of its terms: no division, hence no nan where there is nothing to count."""
    if not shard.rows:  # multi_margin_loss of no rows is whatever its memory held before
        return widen(shard.nothing())
    if "reduction" in shard.kwargs:  # else it would win over the sum that is asked for
        shard = shard._replace(kwargs={name: value for name, value in shard.kwargs.items() if name != "reduction"})
    halves = [leaf for leaf in nested.spread(shard.output) if isinstance(leaf, Tensor) and leaf.dtype == torch.float16]
    if halves and not torch.is_autocast_enabled(halves[0].device.type):  # all is float16, and a sum in it overflows
        return weighted_sum(shard.call(), check_weight(shard.weigh()))
    if halves:  # autocast computes losses in float32, but not on the CPU
        output = tuple(widen(leaf) if isinstance(leaf, Tensor) else leaf for leaf in nested.spread(shard.output))
        shard = shard._replace(output=output)
    return widen(shard.call(_summing(shard.criterion)))


def _summing(criterion: Criterion) -> Criterion:
    if not isinstance(criterion, nn.Module):
        return functools.partial(criterion, reduction="sum")
    summing = type(criterion).__new__(type(criterion))
    object.__setattr__(summing, "__dict__", criterion.__dict__ | {"reduction": "sum"})  # copy.copy takes ten times as long
    return summing
