"""The loss of an update that is a function of sums over its rows.

The criterion runs on each shard, where its sums and its formula are noted
(:mod:`balanced_parallel.loss.formula`). The loss of the batch is the formula of the sums of all
shards, computed once per process. Its derivative at each sum is handed back to the shards.

The rows of a sum may depend on each other, as in a contrastive loss. So the sums of halves of some
shards are compared with those of all of them together. A formula contains all numbers of the
criterion, so that of other rows has to be the same.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor, nn

from ..batch import containers
from ..batch.marks import objects_in
from ..batch.rows import ParallelModel
from ..runtime.collectives import SumOverRanks, world_size
from ..runtime.devices import move
from ..runtime.torch_private import is_differentiable
from .additive import AdditiveLoss, note_statistics
from .comparison import ComparisonOfSums, ShardStatistics, Sums
from .copies import (
    Calls,
    Criterion,
    CriterionCopies,
    ShardLoss,
    parameters_in,
    tensors_outside,
)
from .coupled import CoupledLoss
from .entries import LoggedMeans, LoggedSums, places_beside_loss, places_to_log, refuse_total
from .formula import Constant, Form, Formula, Statistic, Unknown, Value
from .names import ALWAYS, SIZED, ChangedLossError, SumName, UnknownMeanError
from .notes import SumNotes
from .rules import refuse_coupled, unwrap
from .sums import LossSum, add_up, weighted_sum, widen


class Noted(NamedTuple):
    """The result of a criterion for a shard, with its formula and the sums that are noted."""

    result: Any
    formula: Formula
    statistics: Sequence[Statistic]

    def names(self, *, with_numbers: bool = False) -> list[SumName]:
        """Returns the names of the sums. Numbers to log may be part of their text."""
        formula = self.formula
        entries = formula.entries.items()
        numbers = [place for place, leaf in entries if isinstance(leaf, (int, float))]
        text = formula.text_of(formula.losses + numbers * with_numbers)
        names = []
        for number, each in enumerate(formula.inputs):
            role = "count" if each.is_count else "total"
            sizes = each.per_row, formula.lengths, formula.averaged, formula.numbers
            names.append(SumName(number, role, each.kind, text, *sizes))
        return names

    def tensors(self, device: torch.device) -> list[Tensor]:
        """Returns the sums as tensors on a device."""
        tensors = []
        for each in self.statistics:
            value: Any = each.value
            is_ready = isinstance(value, Tensor) and (value.device == device or value.dim())
            tensors.append(value if is_ready else add_up([value], device))
        return tensors


def note_sums(shard: ShardLoss, *, is_split: bool = True, is_blind: bool = False) -> Noted:
    """Calls a criterion, and notes the sums that its result is computed of.

    Raises:
        UnknownMeanError: with ``is_split``, if a loss is not a function of sums over the rows.
    """
    if is_split:
        _refuse_parameters(shard.output)
    criterion = shard.criterion
    targets = *shard.targets, *shard.kwargs.values()
    notes: SumNotes = shard.notes or SumNotes()
    values = shard.output, *targets
    notes.of_batch(values, shard.rows, is_blind=is_blind, has_columns=shard.has_columns)
    notes.of_targets(targets).of_entries(values)
    notes.of_constants(_constants_in(criterion)).of_criterion(parameters_in(criterion))
    with notes:
        result = shard.call()
    if shard.collectives.is_used:
        notes.average(result)
    formula, statistics = notes.formula(result)
    unknown = [place for place, leaf in formula.entries.items() if isinstance(leaf, Unknown)]
    if unknown and not is_split:
        notes.average(result)
        return Noted(result, *notes.formula(result))
    unknown = [place for place in unknown if place in formula.losses]
    if unknown:
        _refuse_unknown(criterion, unknown[0], has_unknown_count=notes.has_unknown_count)
    if is_split and formula.losses and not statistics:
        raise UnknownMeanError(
            f"the loss of {containers.describe(criterion)} is a constant for some rows, "
            f"{formula.text_of(formula.losses)}",
            f"; {ALWAYS}",
        )
    return Noted(result, formula, statistics)


def _constants_in(criterion: Criterion) -> list[object]:
    """Returns the tensors that a criterion has, or reads, beside its parameters and arguments."""
    function, arguments, settings = unwrap(criterion)
    outside = itertools.chain(*tensors_outside(function).values())
    buffers = criterion.buffers() if isinstance(criterion, nn.Module) else ()
    return [arguments, settings, *buffers, *(each for each in outside if not each.requires_grad)]


def _refuse_parameters(output: object) -> None:
    """Raises ``ValueError`` for an output that is a parameter, whose sum each shard would add."""
    for place, leaf in containers.leaves(output, "output"):
        if isinstance(leaf, nn.Parameter) and leaf.dim():
            raise ValueError(
                f"{place} is a parameter of the model of shape {tuple(leaf.shape)}, which has no rows, expected a value for each "
                "row, as parameter.expand(len(inputs), -1), or a criterion that has the parameter itself"
            )


def single_mean(shard: ShardLoss, least: float) -> LossSum:
    """Returns the :class:`LossSum` of a criterion that is a linear combination of sums over one
    count, whose lower bound is ``least``.

    Raises:
        UnknownMeanError: it is another one, or none.
    """
    if not shard.rows:
        return LossSum(widen(shard.nothing()), 0.0)
    noted = note_sums(shard)
    formula = noted.formula
    _refuse_totals(noted.result, formula)
    mean = formula.mean_of(formula.losses)
    if mean is None or mean.bound != least:
        raise ChangedLossError(
            f"the means of {containers.describe(shard.criterion)} have different counts, and had one in the batches before: "
            f"{formula.text_of(formula.losses)}",
            f"; {ALWAYS}, a function (output, *targets) -> scalar; or make another TrainStep where the loss changes",
        )
    devices = (each.value.device for each in noted.statistics if isinstance(each.value, Tensor))
    sums = noted.tensors(next(devices))
    whole = _sum_of(noted, mean, sums, shard)
    terms = dict(zip(noted.names(), sums, strict=True))
    return dataclasses.replace(
        whole, terms=terms, logged=_values_to_log(formula, sums, shard.criterion)
    )


def _values_to_log(formula: Formula, sums: Sequence[Tensor], criterion: object) -> LoggedMeans:
    """Returns the values to log of a shard. Those that are unknown are None."""
    logged: dict[str, LoggedSums | None] = {}
    if not formula.logged:
        return logged
    numbers = [each.number for each in formula.inputs]
    totals = dict(zip(numbers, (total.detach() for total in sums), strict=True))
    for place, leaf in formula.entries.items():
        if place not in formula.logged:
            continue
        if isinstance(leaf, (Value, Constant)):
            entry = formula.entry(place, criterion)
            inputs = [totals[each.number] for each in entry.inputs]
            logged[place] = LoggedSums(entry.compute, inputs)
        elif isinstance(leaf, Unknown) or (leaf is not None and formula.has_read):
            logged[place] = None
    return logged


def _sum_of(noted: Noted, mean: Form, sums: Sequence[Tensor], shard: ShardLoss) -> LossSum:
    """Returns the sum of the losses, and its weight.

    A count of zero is a very small one in it, a power of two: the sum over it may be another than
    zero, as that of all anchors over the number of positives.
    """
    formula = noted.formula
    count: Any = 0.0
    factor: Any = 1.0
    values = []
    for each, value in zip(noted.statistics, sums, strict=True):
        if mean.kind == "mean" and each.number == mean.place:
            count = each.value
            value = factor = torch.where(value != 0, value, _SMALL)
            if mean.least:
                value = factor = value.clamp(min=mean.least)
        values.append(value)
    entries = dict(containers.leaves(formula.compute(values, shard.criterion)))
    losses = [weighted_sum(entries[place], 1) for place in formula.losses]
    return LossSum(functools.reduce(torch.add, losses) * factor, count)


def _with_graph(tensor: Tensor) -> Tensor:
    """Returns a copy with a graph of its own, which a criterion may write to."""
    leaf = tensor.detach()
    return leaf.requires_grad_().clone() if leaf.is_floating_point() or leaf.is_complex() else leaf


def _refuse_totals(result: object, formula: Formula, sums: Iterable[Tensor] = ()) -> None:
    """Raises ``ValueError`` if one of several losses is called their total, or has a sum of others.

    The values of the sums tell of one that is computed twice.
    """
    places_to_log(result)
    places: dict[int, str] = {}
    for place in formula.losses if len(formula.losses) > 1 else ():
        for each in formula.inputs_of([place]):
            if each.is_count or not each.learns:  # A number of rows, for example.
                continue
            if each.number in places:
                refuse_total(f"the same {each.kind} in {places[each.number]} and {place}")
            places[each.number] = place
    terms: dict[str, set[str]] = {}
    for each, total in zip(formula.inputs, sums, strict=False):
        if each.number in places and (value := total.tolist()):
            terms.setdefault(places[each.number], set()).add(f"{each.kind} {value}")
    for whole, part in itertools.permutations(terms, 2):
        if terms[part] < terms[whole]:
            refuse_total(f"the sums of {part} in {whole} too")


def _refuse_unknown(criterion: object, place: str, *, has_unknown_count: bool = False) -> NoReturn:
    refuse_coupled(criterion)
    if has_unknown_count:
        raise UnknownMeanError(
            f"the loss{place} of {containers.describe(criterion)} is a sum over a number that was read from values of the batch, "
            "as int(mask.sum()), len(errors[mask]) or an entry of a list, which may have a lower bound in each shard",
            SIZED,
        )
    raise UnknownMeanError(
        f"the loss{place} of {containers.describe(criterion)} is not a function of sums over the rows, so that of several shards "
        "of a batch is unknown",
        ", expected losses of torch, such as F.cross_entropy(output, target), errors.mean(), errors.sum(), and functions of "
        "these numbers: give DataParallelCriterion weight=, a function (output, *targets) -> scalar that returns the mean's "
        "divisor; weight='rows' for a mean over rows with equal weights; whole=True if its rows depend on each other; "
        "a criterion of the output alone, as lambda output: output.loss, for a loss that the model has computed, without "
        "torch.compile; an attribute reduction has no effect on a forward of its own, and a target that is a scalar may differ "
        "between shards: pass a number, as float(scale), or a buffer",
    )


def statistics_of(
    shard: ShardLoss, *, is_split: bool = True, has_graph: bool = False, with_numbers: bool = False
) -> ShardStatistics:
    """Returns the sums of a shard, whose output has a graph or needs one.

    Losses have a graph, and values to log have none.
    """
    nothing = shard.nothing()
    if not shard.rows:
        return ShardStatistics({}, None, nothing)
    if isinstance(shard.criterion, AdditiveLoss):
        noted = Noted(None, *note_statistics(shard))
    elif has_graph or shard.notes is not None:
        noted = note_sums(shard, is_split=is_split)
    else:
        with torch.enable_grad():
            output = containers.map_tensors(_with_graph, shard.output)
            objects = objects_in(output)
            shard = shard._replace(output=output)
            noted = note_sums(shard, is_split=is_split, is_blind=bool(objects))
        if objects and len(noted.formula.entries) > 1 and not places_beside_loss(noted.result):
            raise ValueError(
                f"the output has {containers.describe(objects[0])}, whose gradient two passes do not see, and the criterion "
                "returned several values, expected the loss in an entry 'loss', and values to log in the others"
            )
    names = noted.names(with_numbers=with_numbers)
    tensors = dict(zip(names, noted.tensors(nothing.device), strict=True))
    return ShardStatistics(tensors, noted.formula, nothing)


class LossOfSums(CoupledLoss):
    """The loss of an update that is a function of sums over its rows, or of the statistics of an
    :class:`AdditiveLoss`. A shard without rows adds nothing.

    Once a batch has shown that it is a linear combination of sums over one count,
    :func:`single_mean` computes the loss in one pass.
    """

    _is_first_pass = False
    _is_by_hand = False

    def __init__(
        self, copies: CriterionCopies, home: torch.device, *, is_split: bool = True
    ) -> None:
        super().__init__(copies, home, is_split=is_split)
        self.comparison = ComparisonOfSums(copies, home, statistics_of)
        self._total: Sums = {}
        self._formula: Formula | None = None
        self._slopes: dict[SumName, Tensor | None] = {}

    def of_model(self, model: ParallelModel | None) -> Self:
        """Tells the model, which may compute the loss."""
        self.comparison.of_model(model)
        return self

    @property
    def formula(self) -> Formula:
        """The formula of the batch, once a shard with rows has run."""
        assert self._formula is not None
        return self._formula

    def value(self, calls: Calls) -> Any:
        """Returns the loss of a batch. Every rank has the statistics of all ranks."""
        self._is_by_hand = True
        self.comparison.use(functools.partial(statistics_of, with_numbers=True))
        parts = self._parts(calls)
        self._add(parts, calls)
        return self.finish(parts[0].nothing)

    def finish(self, nothing: Tensor) -> Any:
        """Returns the loss of all statistics. An evaluation has those of several batches."""
        ranks = self._sum_over_ranks(nothing)
        if not ranks:
            raise ValueError(
                "the batch has no rows, expected one at least: there are no statistics"
            )
        if self._is_by_hand and len(ranks) < world_size() and self.formula.outside:
            raise ValueError(
                "the criterion uses parameters that are not its own, and a rank has no rows, expected rows on each rank: add a "
                "penalty to the loss that the criterion returned, or use TrainStep"
            )
        self.comparison.compare(nothing.device)

        def finish_leaf(place: str, leaves: list[Any]) -> Any:
            (leaf,) = leaves
            if isinstance(leaf, Unknown):
                _refuse_unknown(self.copies.criterion, place)
            loss = None if leaf is None else weighted_sum(leaf, 1)
            return None if loss is None else move(loss, self.copies.output_device or loss.device)

        return containers.zip_leaves(finish_leaf, [self._compute()])

    def collect(self, calls: Calls) -> list[Any]:
        """Adds the statistics of a micro-batch in the first pass."""
        self._is_first_pass = not torch.is_grad_enabled()
        parts = self._parts(calls)
        self._is_first_pass = False
        detached = [
            part._replace(tensors=containers.map_tensors(Tensor.detach, part.tensors))
            for part in parts
        ]
        self._add(detached, calls)
        return parts

    def differentiate(self, scaler: torch.amp.GradScaler | None) -> None:
        """Computes the loss of all statistics, and its derivative at each of them."""
        has_rows = bool(self._total)
        ranks = self._sum_over_ranks(torch.zeros((), device=self.home))
        self.is_shared = True
        self.comparison.compare(self.home)
        if has_rows:
            learning = [name for name in self._total if self._learns(name)]
            sums = [self._total[name] for name in learning]
            slopes = self._derivatives(self._compute, sums, ranks, scaler)
            self._slopes = dict(zip(learning, slopes, strict=True))

    def hand_back_parts(self, parts: list[Any]) -> list[LossSum]:
        """Returns a loss for each part.

        They have no weight if nothing was counted, so that nothing is updated.

        Raises:
            UnknownMeanError: the model has operations on sums without a graph, which the first of
                two passes does not show: it has no graph at all.
        """
        for formula in filter(None, [part.formula for part in parts]):
            if formula.graphs != self.formula.graphs:
                raise UnknownMeanError(
                    f"the loss of {containers.describe(self.copies.criterion)} has operations on sums in a torch.no_grad() block "
                    "in the model's forward, which two passes do not see",
                    ", expected sum.detach() in place of the block, or in a criterion of the outputs",
                )
            pairs = zip(self.formula.inputs, formula.inputs, strict=True)
            if any(each.learns and not first.learns for first, each in pairs):
                raise UnknownMeanError(
                    f"a sum of {containers.describe(self.copies.criterion)} has a gradient, which it had not in the first of two "
                    "passes",
                    ", expected losses of the tensors of the output, in lists, mappings and dataclasses",
                )
        losses = []
        for loss, part in zip(super().hand_back_parts(parts), parts, strict=True):
            weight = 0.0 if self._formula is not None and self._is_empty else loss.weight
            sums = [*part.tensors.values()]
            logged = part.formula and _values_to_log(part.formula, sums, self.copies.criterion)
            losses.append(dataclasses.replace(loss, weight=weight, logged=logged))
        return losses

    @functools.cached_property
    def mean(self) -> Form | None:
        """The mean over one count that an update that was split has shown,"""
        is_known = self.is_split and self._formula is not None
        return self.formula.mean_of(self.formula.losses) if is_known else None

    @functools.cached_property
    def _is_empty(self) -> bool:
        """True if nothing was counted. To read the counts waits for the device."""
        needed = self.formula.inputs_of(self.formula.losses)
        pairs = zip(self.formula.inputs, self._total.values(), strict=True)
        counts = [
            total
            for each, total in pairs
            if each in needed and each.is_count and not each.is_bounded
        ]
        return bool(counts) and not any(map(bool, counts))

    @functools.cached_property
    def _needed(self) -> list[bool]:
        needed = self.formula.inputs_of(self.formula.losses)
        return [each.learns and each in needed for each in self.formula.inputs]

    def _learns(self, name: SumName) -> bool:
        """Returns True for the sums of losses that have a gradient."""
        return self._needed[name.number]

    def _trained(self) -> list[Tensor]:
        """Returns the parameters of the formula that learn."""
        return [*super()._trained(), *self.formula.outside.values()]

    def _values_to_log(self, result: object) -> LoggedMeans:
        """Returns none: each part has its own."""
        # To read sums waits for the device.
        sums = self._total.values() if self.comparison.has_samples else ()
        _refuse_totals(result, self.formula, sums)
        return {}

    def _parts(self, calls: Calls) -> list[ShardStatistics]:
        compute = functools.partial(
            statistics_of,
            is_split=self.is_split,
            has_graph=not self._is_first_pass,
            with_numbers=self._is_by_hand,
        )
        parts: list[ShardStatistics] = calls.run(compute)
        if self.is_split and self.comparison.refutes_columns(parts, calls):
            parts = calls.run(compute)
        return parts

    def _add(self, parts: list[ShardStatistics], calls: Calls) -> None:
        if self.is_split:
            self.comparison.take([part.tensors for part in parts], calls)
        for part in parts:
            if part.tensors:
                self.comparison.check_names([self._total or part.tensors, part.tensors])
                # The first replica has the parameters themselves.
                self._formula = self._formula or part.formula
            for name, tensor in part.tensors.items():
                total = self._total.get(name)
                self._total[name] = (
                    widen(tensor) if total is None else total + move(widen(tensor), total.device)
                )

    def _take(self, part: ShardStatistics) -> list[tuple[Tensor, Tensor | None]]:
        device = part.nothing.device
        pairs: list[tuple[Tensor, Tensor | None]] = []
        for name, tensor in part.tensors.items():
            slope = self._slopes.get(name)
            pairs.append((tensor, slope if slope is None else move(slope, device)))
        return pairs or [(part.nothing, None)]

    def _sum_over_ranks(self, nothing: Tensor) -> list[int]:
        """Sums the statistics of all ranks, with the graph of ``nothing``.

        Returns the ranks with rows.

        Every rank calls this.
        """
        empty = not self._total
        shapes = {name: each.detach().to("meta") for name, each in self._total.items()}
        layouts = enumerate(self.comparison.gather(None if empty else (self._formula, shapes)))
        by_rank = {number: layout for number, layout in layouts if layout is not None}
        self.comparison.check_names([tensors for _, tensors in by_rank.values()])
        if world_size() == 1 or not by_rank:
            return [*by_rank]
        formula, tensors = next(iter(by_rank.values()))
        assert formula is not None
        # All ranks take the branches of one.
        self._formula = dataclasses.replace(self._formula or formula, branches=formula.branches)
        for name, tensor in tensors.items():
            # Every rank computes the whole loss, and the backward sums its gradients over the
            # ranks, which DistributedDataParallel averages.
            part = torch.zeros_like(tensor, device=nothing.device) if empty else self._total[name]
            learns = is_differentiable(part) and self._learns(name)
            self._total[name] = SumOverRanks.apply(part + nothing if learns else part, None)
        return [*by_rank]

    def _compute(self) -> Any:
        """Returns the loss of the statistics of all rows."""
        sums = [*self._total.values()]
        compute = functools.partial(self.formula.compute, sums)
        criterion = self.copies.criterion
        if self.formula.branches and self.formula.branches_otherwise(sums, criterion):
            raise UnknownMeanError(
                f"the loss of {containers.describe(criterion)} has an if, max or min of sums over the rows, and takes another "
                "branch for the sums of all rows than for those of a shard",
                ", expected torch.where, torch.maximum, torch.minimum or clamp",
            )
        if isinstance(criterion, AdditiveLoss):
            return self.copies.run_once(compute, sums[0].device)
        return compute(criterion)


def divide_by(divisors: Sequence[float]) -> Callable[[LossSum | None], LossSum | None]:
    """Returns a function that divides one mean after the other, and returns a sum."""
    remaining = iter(divisors)

    def divide(mean: LossSum | None) -> LossSum | None:
        divisor = next(remaining)
        factor = 1 / divisor if divisor else 0.0
        return None if mean is None else LossSum(mean.total * factor, None)

    return divide


def sums_of_update(calls: Calls) -> list[LossSum]:
    """Returns the part of each replica in the only forward of an update, for any function of sums.

    Weights add up to 1, so that nothing is divided.
    """
    loss = LossOfSums(calls.copies, torch.device("cpu")).of_model(calls.outputs.model_of())
    parts = loss.collect(calls)
    loss.differentiate(None)
    share = 1 / len(parts)
    losses = loss.hand_back_parts(parts)
    return [
        dataclasses.replace(part, weight=share if part.weight is None else part.weight)
        for part in losses
    ]


_SMALL = 2.0**-63  # A sum of 1e19 in float32 can be divided by it.
