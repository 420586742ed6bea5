"""One replica's part of a loss: the sum of its terms, and their weight.

There are three ways to compute it. A criterion that is a sum is called as it is. The mean of any criterion is multiplied by its
weight. A loss of torch is called with ``reduction="sum"``.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..batch import nested
from ..batch.per_replica import PerReplica
from ..batch.row_marks import Arguments
from ..runtime.tensors import is_differentiable
from .rules import loss_weight
from .weighting import LossSum, check_loss, weighted_sum, widen, zero_of
from .weights import check_weight, map_weights, read_weights

__all__: list[str] = []

Criterion = nn.Module | Callable[..., Tensor]


class Shard(NamedTuple):
    """Arguments of one replica: its copy of the criterion, its number of rows, its output, and its rows of the targets."""

    criterion: Criterion
    rows: int
    output: Any
    targets: tuple[Any, ...]
    kwargs: dict[str, Any]
    weights: Any = None  # numbers that are known before the replica runs

    def call(self, criterion: Criterion | None = None) -> Any:
        """Calls the criterion, or another in its place, and returns the loss. See :func:`loss_of`."""
        loss = loss_of(call_spread(criterion or self.criterion, self.output, self.targets, self.kwargs))
        if loss is None:
            raise TypeError("the criterion returned None, expected a loss: a scalar tensor, or a structure of them")
        return loss

    def weigh(self) -> Tensor:
        """Returns the divisor of the criterion's mean, as :func:`loss_weight` computes it."""
        return loss_weight(self.criterion, *nested.spread(self.output), *self.targets, **self.kwargs)

    def nothing(self) -> Tensor:
        """Returns a zero that is connected to the output and to the criterion's parameters."""
        parameters = list(self.criterion.parameters()) if isinstance(self.criterion, nn.Module) else []
        tensors = [leaf for _, leaf in nested.leaves(self.output) if isinstance(leaf, Tensor) and is_differentiable(leaf)]
        return zero_of(*tensors, *parameters) if tensors or parameters else torch.zeros(())


class Shards(NamedTuple):
    """Arguments of all replicas.

    Args:
        outputs: one per replica.
        sizes: rows of the targets of each.
        batches: targets and keyword arguments of each, marked and not moved.
        devices: one per replica.
        dim: dimension of the rows in tensors that are not marked.
    """

    outputs: PerReplica
    sizes: list[int]
    batches: list[Arguments]
    devices: list[torch.device]
    dim: int


def call_spread(function: Callable[..., Any], output: Any, targets: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function of output and targets. The entries of a tuple fill its leading arguments, which an error tells."""
    leading = nested.spread(output)
    try:
        return function(*leading, *targets, **kwargs)
    except TypeError as error:
        if len(leading) == 1 or "positional argument" not in str(error):
            raise
        raise TypeError(
            f"{error}: the output is a tuple, whose {len(leading)} entries fill the first {len(leading)} arguments; name each of "
            "them, or take *arguments, or return a list from the model, which is one argument"
        ) from error


def loss_of(result: Any) -> Any:
    """Returns the loss in the result of a criterion.

    It is the attribute ``loss`` of a record, such as that of ``AdaptiveLogSoftmaxWithLoss``, otherwise the result itself.
    """
    return result if isinstance(result, Tensor) else getattr(result, "loss", result)


def total_of(shard: Shard) -> Any:
    """Returns the :class:`LossSum` of a criterion that is a sum, or a structure of them.

    Without rows, the criterion is not called, because some losses raise an error then.
    """
    if not shard.rows:
        return LossSum(shard.nothing(), None)
    return nested.map_leaves(lambda leaf: leaf if leaf is None else LossSum(weighted_sum(leaf, 1), None), shard.call())


@dataclasses.dataclass(frozen=True)
class MeanAndWeight:
    """A function that computes ``mean x weight`` of a shard, as :class:`LossSum`.

    Args:
        weigh: returns the weight of a shard, or a structure with one weight for each mean that the criterion returns.
        minimum: lower bound of the criterion's divisor.
    """

    weigh: Callable[[Shard], Any]
    minimum: float

    def __call__(self, shard: Shard) -> Any:
        """Returns the :class:`LossSum` of a shard, or a structure of them."""
        weights = self.read([shard])[0] if shard.weights is None else shard.weights
        if not shard.rows or weights == 0 == self.minimum:
            # The criterion would return nan or raise an error.
            return map_weights(lambda weight: LossSum(shard.nothing(), weight), weights)
        return _weighted(shard.call(), weights, self.minimum, "the loss")

    @torch.no_grad()
    def read(self, shards: Sequence[Shard]) -> list[Any]:
        """Returns the weights of several shards as numbers. The host waits once at most."""
        weights: list[Any] = read_weights([self.weigh(shard) for shard in shards])
        return weights


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
    """Returns the :class:`LossSum` of a loss of torch: :func:`sum_of_terms` and its weight."""
    weight = shard.weigh()
    return LossSum(sum_of_terms(shard), weight)


def merge(parts: Sequence[Any], together: Callable[[list[LossSum]], Any]) -> Any:
    """Returns ``together(sums)`` for each loss that the criterion returns, in the same structure.

    Args:
        parts: one per replica: a :class:`LossSum`, or a structure of them.
        together: combines the sums of all replicas.
    """
    form = next((part for part in parts if not isinstance(part, LossSum)), None)
    if form is None:
        return together(list(parts))
    # A replica without rows has one sum for all losses.
    filled = [_repeated(part, form) if isinstance(part, LossSum) else part for part in parts]
    return nested.zip_leaves(lambda place, sums: None if None in sums else together(sums), filled, "the loss")


def add_means(part: Any, reason: str = "") -> LossSum:
    """Returns the sum of all losses of one replica.

    Args:
        part: their sums, with one weight.
        reason: the error of ``weight=`` without outputs, if there was one.
    """
    sums = [leaf for _, leaf in nested.leaves(part) if leaf is not None]
    if len({one.weight for one in sums}) > 1:
        raise ValueError(
            "the criterion returns means with divisors of their own, which have to be known before the first micro-batch: call "
            "step(inputs, targets) with a weight= that depends on the targets alone; or, in place of TrainStep, call "
            "criterion(outputs, targets), add up the losses, and call backward"
            + (f". Without outputs, weight= raised {reason}" if reason else "")
        )
    return LossSum(functools.reduce(torch.add, [one.total for one in sums]), sums[0].weight)


def _repeated(part: LossSum, form: Any) -> Any:
    return nested.map_leaves(lambda _: part, form)


def sum_of_terms(shard: Shard) -> Tensor:
    """Returns the sum of the terms of a loss of torch. There is no division, so no nan without counted targets."""
    if not shard.rows:  # multi_margin_loss of no rows returns uninitialised memory
        return widen(shard.nothing())
    if "reduction" in shard.kwargs:  # it would override the sum
        shard = shard._replace(kwargs={name: value for name, value in shard.kwargs.items() if name != "reduction"})
    halves = [leaf for leaf in nested.spread(shard.output) if isinstance(leaf, Tensor) and leaf.dtype == torch.float16]
    if halves and not torch.is_autocast_enabled(halves[0].device.type):  # a sum in float16 overflows
        weight = shard.weigh()
        if weight.is_cpu:
            return weighted_sum(shard.call(), check_weight(weight))
        terms = shard.call(_reducing(shard.criterion, "none"))  # a mean would need the number of counted targets
        return widen(terms).sum()
    if halves:  # autocast computes losses in float32, but not on the CPU
        output = tuple(widen(leaf) if isinstance(leaf, Tensor) else leaf for leaf in nested.spread(shard.output))
        shard = shard._replace(output=output)
    return check_loss(shard.call(_reducing(shard.criterion, "sum")))


def _reducing(criterion: Criterion, reduction: str) -> Criterion:
    """Returns the criterion with another reduction."""
    if not isinstance(criterion, nn.Module):
        return functools.partial(criterion, reduction=reduction)
    changed = type(criterion).__new__(type(criterion))
    object.__setattr__(changed, "__dict__", criterion.__dict__ | {"reduction": reduction})  # copy.copy takes ten times as long
    return changed
