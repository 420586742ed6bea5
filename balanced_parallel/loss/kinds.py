"""The kind of a loss: how the parts of shards become the loss of the batch.

It is chosen once, from the settings of a criterion::

    Sum          the parts add up; of a criterion that communicates with the other ranks, their mean
    KnownMean    a loss of torch: called with reduction="sum", and divided once by its weight
    WeighedMean  mean x weight of each shard, divided once by the sum of the weights
    MeansInside  the criterion is a function of sums over the rows
    OneCount     the same, once a batch has shown a linear combination of sums over one count
    Coupled      a function of statistics that add up (Dice), or of all outputs (contrastive)

A kind is immutable, and does not know the batches. What these show of a loss (:meth:`Kind.learned`)
is another kind, which the user of the criterion keeps.
"""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..batch import containers
from ..batch.marks import parameters_of
from ..batch.outputs import PerReplica
from ..batch.rows import Batch, ParallelModel, move_leaves, spread
from ..runtime.collectives import gather_objects, world_size
from ..runtime.module_state import copy_state
from .additive import AdditiveLoss
from .comparison import ComparisonOfSums
from .copies import Calls, Criterion, CriterionCopies, ShardLoss, call_spread
from .coupled import CoupledLoss, WholeLoss
from .entries import add_means
from .inside import ForwardNotes, note_again
from .means import (
    LossOfSums,
    divide_by,
    note_sums,
    single_mean,
    statistics_of,
    sums_of_update,
)
from .names import ChangedLossError, compare_names, sizes_of
from .rules import (
    counts_classes,
    find_torch_loss,
    has_sum,
    is_known,
    loss_weight,
    reduction_in,
    reduction_of,
    unwrap,
)
from .sums import (
    Bound,
    LossSum,
    Weight,
    add_numbers,
    bounds_of,
    check_loss,
    divide_once,
    flat_weights,
    is_structure,
    map_weights,
    merge,
    weighted_sum,
    widen,
)
from .validation import add_uncounted, check_settings

Divisor = (
    Callable[..., object] | str | Mapping[Any, Callable[..., object]] | Sequence[Callable[..., Any]]
)
_HOST = torch.device("cpu")
_LEARNED = (
    "weight= returned a tensor with a gradient, expected a divisor without one: leave weight= out for a criterion that is a "
    "function of sums over the rows, as (w * errors).sum() / w.sum(); detach() the weights if the criterion does"
)


class Kind(abc.ABC):
    """The way in which the parts of a loss become that of the batch."""

    # over the micro-batches of an update; two if all rows must be seen before the first backward
    passes: ClassVar[int] = 1
    couples_rows: ClassVar[bool] = False  # parts of the rows have no loss of their own
    knows_divisor: ClassVar[bool] = True  # The loss has not to run for it.
    loss: type[CoupledLoss]  # The loss of an update of two passes, or by hand.
    reduction: str = "sum"
    is_mean: bool = False  # the sum of all parts is divided by the sum of their weights
    least: float = 0.0  # the smallest divisor
    weight: Weight = 0.0  # The weight of a batch on this process. Zero if the parts have it.
    asks: bool = False  # Ranks sum the divisors of a batch.

    def value(self, calls: Calls) -> Any:
        """Returns the loss of a batch, with the graph of its outputs. All ranks call this."""
        calls.agree()
        is_split = len(calls.shards) > 1 or world_size() > 1
        loss = self.loss(calls.copies, _HOST, is_split=is_split)
        return loss.of_model(calls.outputs.model_of()).value(calls)

    def sums(self, calls: Calls) -> list[LossSum]:
        """Returns the part of each replica, for a kind of one pass.

        :class:`TrainStep` divides their sum later.
        """
        raise NotImplementedError

    def sums_of_only(self, calls: Calls) -> list[LossSum]:
        """Returns the part of each replica, in the only micro-batch of an update."""
        return self.sums(calls)

    def begin_by_hand(self, outputs: PerReplica) -> None:
        """Begins a loss of outputs alone."""
        return

    def begin_step(self, model: ParallelModel, batch: Batch) -> None:
        """Begins a batch of a step, whose loss is one of outputs alone."""
        return

    def called_with(self, kwargs: dict[str, object]) -> tuple["Kind", dict[str, Any]]:
        """Returns the kind of a call with keyword arguments, which may select another reduction,
        and these arguments.
        """
        return self, kwargs

    def of_batch(self, targets: Sequence[tuple[object, ...]], *, is_whole: bool) -> "Kind":
        """Returns the kind of one batch, from its targets in any number of parts.

        With ``is_whole``, no other batch is added before the update. Ranks then sum the divisors of
        several means.
        """
        return self

    def learned(self, copies: CriterionCopies, loss: CoupledLoss | None = None) -> "Kind":
        """Returns the kind for the next batch. ``loss`` is that of an update of two passes."""
        return self

    def learned_from(self, row: ShardLoss) -> "Kind":
        """Returns the kind for a loss that a row has shown."""
        return self


@dataclass(frozen=True)
class LossSettings:
    """The settings of a criterion whose parts of rows have losses of their own."""

    criterion: Criterion
    weight: Divisor | None
    minimum: Any
    reduction: str  # A call may select another.

    @functools.cached_property
    def class_loss(self) -> tuple[Any, dict[str, Any]] | None:
        """The loss and its settings, if the divisor is the number of class indices that are not
        ignored.
        """
        function, _, settings = unwrap(self.criterion)
        return (function, settings) if counts_classes(self.criterion) else None

    def kind(self, reduction: str | None = None) -> Kind:
        """Returns the kind for a reduction."""
        reduction = reduction or self.reduction
        if reduction == "none":
            return Unreduced(self, reduction)
        if reduction == "sum":
            return Sum(self, reduction)
        if self.weight is None and reduction == "mean" and not is_known(self.criterion):
            return MeansInside(self, reduction)
        is_sum_known = self.weight is None and has_sum(self.criterion)
        return (KnownMean if is_sum_known else WeighedMean)(
            self, reduction, max(flat_weights(self.minimum))
        )


@dataclass(frozen=True, eq=False)
class _OfRows(Kind):
    """A loss of parts of the rows. Its reduction may be selected by a call."""

    settings: LossSettings
    reduction: str

    def called_with(self, kwargs: dict[str, Any]) -> tuple[Kind, dict[str, Any]]:
        """Returns the kind of a call, and its keyword arguments."""
        if {"size_average", "reduce"} & kwargs.keys() and find_torch_loss(
            self.settings.criterion
        ) is not None:
            others = {
                name: value
                for name, value in kwargs.items()
                if name not in ("size_average", "reduce")
            }
            kwargs = {**others, "reduction": reduction_in(kwargs)}  # the others are deprecated
        return self.settings.kind(kwargs["reduction"]) if "reduction" in kwargs else self, kwargs

    def learned(self, copies: CriterionCopies, loss: CoupledLoss | None = None) -> Kind:
        """Returns the kind for the next batch."""
        is_used = copies.collectives.is_used
        return Sum(self.settings, self.reduction, is_mean=True) if is_used else self


class _OfOnePass(_OfRows):
    """A loss whose parts are computed from a shard alone."""

    @abc.abstractmethod
    def _part(self, shard: ShardLoss) -> Any:
        """Returns the :class:`LossSum` of a shard, or a structure of them.

        It runs in the thread of the replica.
        """

    def _parts(self, calls: Calls) -> list[Any]:
        return calls.run(self._part)

    def value(self, calls: Calls) -> Any:
        """Returns the loss of a batch."""
        calls.agree()
        device = calls.copies.output_device
        return merge(
            self._parts(calls),
            lambda sums: divide_once(sums, device or sums[0].total.device, self.least),
        )

    def sums(self, calls: Calls) -> list[LossSum]:
        """Returns the part of each replica."""
        return [add_means(part) for part in self._parts(calls)]


class Unreduced(_OfOnePass):
    """A criterion with ``reduction="none"``: the losses of each replica as they are."""

    def value(self, calls: Calls) -> PerReplica:
        """Returns the loss of a batch."""
        return PerReplica(calls.run(ShardLoss.call), calls.outputs.sizes, calls.outputs.dim)

    def _part(self, shard: ShardLoss) -> Any:
        raise ValueError(
            "the criterion has reduction='none', expected a scalar loss: use reduction='mean' or 'sum'"
        )


@dataclass(frozen=True, eq=False)
class Sum(_OfOnePass):
    """A criterion that is a sum. It is not called without rows.

    One that communicates with the other ranks is a mean over them.
    """

    is_mean: bool = False

    def _part(self, shard: ShardLoss) -> Any:
        weight = 1.0 if self.is_mean else None
        if not shard.rows:
            return LossSum(shard.nothing(), weight)

        def part_of(leaf: Any) -> LossSum | None:
            return None if leaf is None else LossSum(weighted_sum(leaf, 1), weight)

        return containers.map_leaves(part_of, shard.call())


@dataclass(frozen=True, eq=False)
class _Mean(_OfOnePass):
    """A mean over a weight."""

    least: float
    is_mean: bool = True


@dataclass(frozen=True, eq=False)
class KnownMean(_Mean):
    """A mean that torch computes.

    Its sum and its weight are known, and the weight often before the sum.
    """

    weight: Weight = 0.0
    is_counted: bool = False  # The weight is that of a batch.

    def weight_of(self, targets: tuple[Any, ...]) -> Weight | None:
        """Returns the number of targets that count, or None."""
        target = targets[0] if len(targets) == 1 else None
        loss = self.settings.class_loss
        if (
            loss is None
            or self.reduction != "mean"
            or not isinstance(target, Tensor)
            or target.is_floating_point()
        ):
            return None
        function, settings = loss
        if settings.get("weight", getattr(function, "weight", None)) is not None:
            return None
        count: Tensor = (
            target != settings.get("ignore_index", getattr(function, "ignore_index", -100))
        ).sum()
        return count

    def of_batch(self, targets: Sequence[tuple[object, ...]], *, is_whole: bool) -> Kind:
        """Returns the kind of one batch."""
        counts = [weight for weight in map(self.weight_of, targets) if weight is not None]
        if not targets or len(counts) < len(targets):
            return self
        return dataclasses.replace(self, weight=sum(counts[1:], counts[0]), is_counted=True)

    def _parts(self, calls: Calls) -> list[Any]:
        parts = calls.run(self._part)
        names = [[*part.terms] for part in parts if part.terms]
        for each in names[1:]:
            compare_names(names[0], each)
        return parts

    def sums(self, calls: Calls) -> list[LossSum]:
        """Returns the part of each replica."""
        return calls.run(self._part)

    def _part(self, shard: ShardLoss) -> LossSum:
        """Returns the sum of the terms. There is no division, so no nan without counted targets."""
        # multi_margin_loss of no rows returns uninitialised memory. An output without rows may have
        # the length of another batch.
        if not shard.rows:
            return LossSum(widen(shard.nothing()), 0.0)
        weight = 0.0 if self.is_counted else call_weight(None, shard)
        if "reduction" in shard.kwargs:  # it would override the sum
            shard = shard._replace(
                kwargs={name: value for name, value in shard.kwargs.items() if name != "reduction"}
            )
        terms = None if self.settings.class_loss else sizes_of(shard, weight)
        # a sum overflows
        if torch.float16 in [getattr(leaf, "dtype", None) for leaf in spread(shard.output)]:
            total = widen(shard.call(_reducing(shard.criterion, "none"))).sum()
        else:
            total = check_loss(shard.call(_reducing(shard.criterion, "sum")))
        return LossSum(total, weight, terms)


@dataclass(frozen=True, eq=False)
class WeighedMean(_Mean):
    """A mean, or several, with weights that a function of a shard returns, in the same structure."""

    divisors: Sequence[float] = ()  # The divisors of several means of a batch on all ranks.

    @property
    def asks(self) -> bool:  # type: ignore[override]
        """True for several means."""
        return is_structure(self.settings.weight)

    def of_batch(self, targets: Sequence[tuple[object, ...]], *, is_whole: bool) -> Kind:
        """Returns the kind of one batch."""
        weight = self.settings.weight
        if not (is_whole and targets and is_structure(weight)):
            return self
        counts = [flat_weights(_weights_of_targets(weight, part)) for part in targets]
        everywhere = itertools.chain(*gather_objects(counts))
        # The sums are equal in any order of the parts.
        sums = list(map(add_numbers, zip(*everywhere, strict=True)))
        totals = torch.tensor(sums, dtype=torch.float64)
        bounds = bounds_of(self.settings.minimum, weight)
        divisors = [float(bound.of(total)) for total, bound in zip(totals, bounds, strict=False)]
        return dataclasses.replace(self, divisors=divisors, is_mean=False)

    def sums(self, calls: Calls) -> list[LossSum]:
        """Returns the part of each replica."""
        is_merged = any(
            shard.is_joined and shard.target_rows < len(shard.rows or ()) for shard in calls.shards
        )
        if is_merged and self.settings.weight == "rows":
            raise ValueError(
                "weight='rows' with samples joined into fewer rows, expected a function that counts what the mean does"
            )
        if not self.divisors:
            return super().sums(calls)
        weight = None if any(self.divisors) else 0.0
        sums = []
        for part in self._parts(calls):
            quotients = containers.map_leaves(divide_by(self.divisors), part)
            sums.append(dataclasses.replace(add_means(quotients), weight=weight))
        return sums

    def _parts(self, calls: Calls) -> list[Any]:
        unmoved = [
            ShardLoss(
                calls.copies.criterion,
                shard.target_rows,
                output,
                *move_leaves(tuple(shard.targets), None),
            )
            for output, shard in zip(calls.outputs, calls.shards, strict=True)
        ]
        try:
            weights = self._read(unmoved)
        except Exception:  # noqa: BLE001 - it needs outputs and targets on one device; or it fails there too, for the user to see
            weights = [weight for (weight,) in calls.run(lambda shard: self._read([shard]))]
        return calls.run(self._part, weights)

    def _part(self, shard: ShardLoss, weights: Any = None) -> Any:
        minimum = self.settings.minimum
        bounds = bounds_of(minimum, weights)
        is_skipped = weights == 0 == minimum and not shard.collectives.sums_rows
        if not shard.rows or is_skipped:
            # The criterion would return nan or raise an error.
            nothing = shard.nothing()
            if shard.rows:
                nothing = add_uncounted(nothing, shard)
            return map_weights(lambda weight: LossSum(nothing, weight, bound=next(bounds)), weights)
        means = shard.call()
        if shard.collectives.is_used:
            weights = 1.0
            bounds = bounds_of(0.0, 1.0)
        return _weighted(means, weights, bounds, "the loss")

    def _read(self, shards: Sequence[ShardLoss]) -> list[Any]:
        """Returns the weights of several shards as numbers. The host waits once at most."""
        weighed = [call_weight(self.settings.weight, shard) for shard in shards]
        if any(tensor.requires_grad for tensor in containers.tensors_in(weighed)):
            raise ValueError(_LEARNED)
        numbers = iter(flat_weights(weighed))
        weights: list[object] = map_weights(lambda _: next(numbers), weighed)
        return weights


class MeansInside(_OfRows):
    """A function of sums over the rows, which a criterion computes inside."""

    passes = 2
    loss = LossOfSums
    knows_divisor = False

    def begin_by_hand(self, outputs: PerReplica) -> None:
        """Notes the sums of the forward, which may have computed the loss."""
        note_again(outputs)

    def begin_step(self, model: ParallelModel, batch: Batch) -> None:
        """Begins to note the sums of a model that may compute the loss."""
        model.begin_step(batch, ForwardNotes())

    def learned(self, copies: CriterionCopies, loss: CoupledLoss | None = None) -> Kind:
        """Returns the kind for the next batch."""
        if isinstance(loss, LossOfSums) and loss.mean is not None:
            return OneCount(self.settings, self.reduction, loss.mean.bound)
        return super().learned(copies)

    @torch.enable_grad()
    def learned_from(self, row: ShardLoss) -> Kind:
        """Returns the kind for a loss that a row has shown. A graph tells which sums are counts."""
        formula = note_sums(row, is_split=False).formula
        mean = formula.mean_of(formula.losses)
        return self if mean is None else OneCount(self.settings, self.reduction, mean.bound)


@dataclass(frozen=True, eq=False)
class OneCount(MeansInside):
    """A linear combination of sums over one count.

    Sums of some batches are compared with those of halves.
    """

    passes = 1
    least: float = 0.0
    is_mean: bool = True

    def sums(self, calls: Calls) -> list[LossSum]:
        """Returns the part of each replica."""
        comparison = ComparisonOfSums(calls.copies, _HOST, statistics_of)
        parts = calls.run(functools.partial(single_mean, least=self.least))
        if world_size() == 1:  # Other ranks do not compare now.
            comparison.of_model(calls.outputs.model_of())
        comparison.take([part.terms or {} for part in parts], calls)
        rows = sum(shard.target_rows for shard in calls.shards)
        comparison.compare_alone(parts[0].total.device, of_one_row=rows == 1)
        return parts

    def sums_of_only(self, calls: Calls) -> list[LossSum]:
        """Returns the part of each replica in the only forward of an update.

        The loss may have become another function there, whose sums this forward has all. It is
        computed again then, from the state before.
        """
        criterion = calls.copies.criterion
        put_back = copy_state(criterion) if isinstance(criterion, nn.Module) else list
        try:
            return self.sums(calls)
        except ChangedLossError:
            if world_size() > 1:  # The ranks would have to agree.
                raise
        put_back()
        return sums_of_update(calls)


@dataclass(frozen=True, eq=False)
class Coupled(Kind):
    """A loss whose rows depend on each other."""

    loss: type[CoupledLoss]
    passes = 2
    couples_rows = True


def kind_of(criterion: Any, weight: Any, reduction: str | None, whole: bool, minimum: Any) -> Kind:
    """Chooses the kind of a loss.

    Raises ``TypeError`` or ``ValueError`` for settings that are invalid, or contradict the
    reduction of a loss of torch.
    """
    check_settings(criterion, weight, reduction, minimum, whole=whole)
    if whole:
        return Coupled(WholeLoss)
    if isinstance(criterion, AdditiveLoss):
        return Coupled(LossOfSums)
    return LossSettings(criterion, weight, minimum, reduction or reduction_of(criterion)).kind()


def call_weight(weight: object, shard: ShardLoss) -> Any:
    """Returns the divisor of the mean of a shard, or a structure of several.

    A function gets the arguments of the criterion, without the keyword arguments that it does not
    accept. Without ``weight``, the divisor is that of :func:`loss_weight`.
    """
    if weight is None:
        return loss_weight(shard.criterion, *spread(shard.output), *shard.targets, **shard.kwargs)
    if weight == "rows":
        return shard.rows
    if not callable(weight):
        return _weights_of_targets(weight, shard.targets)
    kwargs = shard.kwargs
    parameters = parameters_of(weight) if shard.kwargs else None
    if parameters is not None and not any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters
    ):
        names = {parameter.name for parameter in parameters}
        kwargs = {name: value for name, value in kwargs.items() if name in names}
    return call_spread(weight, shard.output, shard.targets, kwargs)


def _weights_of_targets(weight: Any, targets: tuple[object, ...]) -> Any:
    return map_weights(lambda count: count(*targets), weight)


def _reducing(criterion: Criterion, reduction: str) -> Criterion:
    """Returns the criterion with another reduction."""
    if not isinstance(criterion, nn.Module):
        return functools.partial(criterion, reduction=reduction)
    changed = type(criterion).__new__(type(criterion))
    # copy.copy takes ten times as long
    object.__setattr__(changed, "__dict__", criterion.__dict__ | {"reduction": reduction})
    return changed


def _weighted(means: Any, weights: Any, bounds: Iterator[Bound], place: str) -> Any:
    if isinstance(weights, float):
        bound = next(bounds)
        factor = (
            float(bound.of(torch.tensor(weights, dtype=torch.float64)))
            if bound.minimum
            else weights
        )

        def weigh(mean: Any) -> Any:
            return (
                None if mean is None else LossSum(weighted_sum(mean, factor), weights, bound=bound)
            )

        return containers.map_leaves(weigh, means)
    container = containers.open_container(means)
    entries = weights if isinstance(weights, dict) else dict(enumerate(weights))
    names = [*map(str, entries)]
    has_names = container is not None and (
        isinstance(weights, list) or containers.entry_names(container) == names
    )
    if container is None or not has_names or len(container.children) != len(names):
        raise ValueError(
            f"{place} is {containers.describe(means)}, expected a mean for each weight, in their order: {', '.join(names)}"
        )
    pairs = zip(container.children, entries.values(), container.places, strict=True)
    return container.rebuild(
        [_weighted(mean, weight, bounds, place + where) for mean, weight, where in pairs]
    )
