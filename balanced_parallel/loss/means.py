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
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor, nn

from ..batch import containers
from ..batch.marks import objects_in
from ..batch.rows import NOTHING, ParallelModel, Shard
from ..runtime.collectives import world_size
from ..runtime.devices import move
from .additive import LossOfSums
from .comparison import BYTES_TOGETHER, ROWS_TO_CHECK, ComparisonOfSums, ShardStatistics, Sums
from .copies import Calls, ShardLoss
from .entries import LoggedMeans, LoggedSums, places_beside_loss, places_to_log, refuse_total
from .formula import OVER_NUMBER, Constant, Form, Formula, Statistic, Unknown, Value
from .inside import RowsOfForward, evaluating, run_rows, take_rows
from .names import ALWAYS, MASKED, ChangedLossError, SumName, UnknownMeanError, compare_names
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
        entries = self.formula.entries.items()
        numbers = [place for place, leaf in entries if isinstance(leaf, (int, float))]
        text = self.formula.text_of(self.formula.losses + numbers * with_numbers)
        names = []
        for number, each in enumerate(self.formula.inputs):
            role = "total" if each.key is None else "count"
            sizes = each.per_row, self.formula.lengths
            names.append(SumName(number, role, each.kind, text, *sizes))
        return names

    def tensors(self, device: torch.device) -> list[Tensor]:
        """Returns the sums as tensors on a device."""
        values = [0.0 if each.value is None else each.value for each in self.statistics]
        return [add_up([value], device) for value in values]


def note_sums(shard: ShardLoss, *, is_split: bool = True, is_blind: bool = False) -> Noted:
    """Calls a criterion, and notes the sums that its result is computed of.

    Raises:
        UnknownMeanError: with ``is_split``, if a loss is not a function of sums over the rows.
    """
    if is_split:
        _refuse_parameters(shard.output)
    criterion, (_, arguments, settings) = shard.criterion, unwrap(shard.criterion)
    targets = shard.targets, shard.kwargs
    notes: SumNotes = shard.notes or SumNotes()
    notes.of_batch((shard.output, *targets), shard.rows, is_blind=is_blind).of_targets(targets)
    notes.of_constants((arguments, settings))
    if isinstance(criterion, nn.Module):
        notes.of_constants([*criterion.buffers()]).of_criterion(criterion.parameters())
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
        has_scalars = any(not tensor.dim() for tensor in containers.tensors_in(targets))
        _refuse_unknown(
            criterion,
            unknown[0],
            has_unknown_count=notes.has_unknown_count,
            has_scalars=has_scalars,
        )
    return Noted(result, formula, statistics)


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
    return dataclasses.replace(whole, terms=terms, logged=_values_of(noted, sums))


def _values_of(noted: Noted, sums: Sequence[Tensor]) -> LoggedMeans:
    """Returns the values to log of a shard. Those that are unknown are None."""
    pairs = zip(noted.statistics, sums, strict=True)
    detached = {each.number: total.detach() for each, total in pairs}
    logged: dict[str, LoggedSums | None] = {}
    for place, leaf in noted.formula.entries.items():
        if place not in noted.formula.logged or leaf is None:
            continue
        if isinstance(leaf, (int, float)) and not noted.formula.has_read:
            continue
        entry = noted.formula.entry(place) if isinstance(leaf, (Value, Constant)) else None
        logged[place] = None
        if entry is not None:
            totals = [detached[each.number] for each in entry.inputs]
            logged[place] = LoggedSums(entry.compute, totals)
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
        if mean.kind == "mean" and each.key == mean.key:
            count = each.value
            value = factor = torch.where(value != 0, value, _SMALL)
            if mean.least:
                value = factor = value.clamp(min=mean.least)
        values.append(value)
    criterion = shard.criterion
    parameters = [*criterion.parameters()] if isinstance(criterion, nn.Module) else []
    entries = dict(containers.leaves(formula.compute(values, parameters)))
    losses = [weighted_sum(entries[place], 1) for place in formula.losses]
    return LossSum(functools.reduce(torch.add, losses) * factor, count)


def _with_graph(tensor: Tensor) -> Tensor:
    """Returns a copy with a graph of its own, which a criterion may write to."""
    leaf = tensor.detach()
    return leaf.requires_grad_().clone() if leaf.is_floating_point() or leaf.is_complex() else leaf


def _refuse_totals(result: object, formula: Formula) -> None:
    """Raises ``ValueError`` if one of several losses is called their total, or has a sum of others."""
    places_to_log(result)
    places: dict[int, str] = {}
    for place in formula.losses if len(formula.losses) > 1 else ():
        for each in formula.inputs_of([place]):
            if each.key is None and each.number in places:
                refuse_total(f"the same {each.kind} in {places[each.number]} and {place}")
            places[each.number] = place


def _refuse_unknown(
    criterion: object, place: str, *, has_unknown_count: bool = False, has_scalars: bool = False
) -> NoReturn:
    refuse_coupled(criterion)
    if has_unknown_count:
        raise UnknownMeanError(
            f"the loss{place} of {containers.describe(criterion)} is a sum over a number that was read from values of the batch, "
            "as int(mask.sum()), len(errors[mask]) or an entry of a list, which may have a lower bound in each shard",
            _COUNTS,
        )
    setting = getattr(criterion, "reduction", "mean")
    note = (
        ""
        if setting == "mean"
        else f" (the attribute reduction={setting!r} has no effect on a forward of its own)"
    )
    if has_scalars:
        note += "; a target that is a scalar tensor may differ between shards: pass a number, as float(scale), or a buffer"
    raise UnknownMeanError(
        f"the loss{place} of {containers.describe(criterion)} is not a function of sums over the rows, so that of several shards "
        "of a batch is unknown",
        ", expected losses of torch, such as F.cross_entropy(output, target), errors.mean(), errors.sum(), and functions of "
        "these numbers: give DataParallelCriterion weight=, a function (output, *targets) -> scalar that returns the mean's "
        "divisor; weight='rows' for a mean over rows with equal weights; whole=True if its rows depend on each other; "
        "a criterion of the output alone, as lambda output: output.loss, for a loss that the model has computed, without "
        f"torch.compile{note}",
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
    if has_graph or shard.notes is not None:
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


class ComparisonOfMeans(ComparisonOfSums):
    """Compares sums that are noted, also in the forward of a model, and the formulas of all shards."""

    _model: ParallelModel | None = None
    _is_of_model = False  # The model computes the loss.

    def of_model(self, model: ParallelModel | None) -> Self:
        """Tells the model, which may compute the loss. Without it, its rows are not compared."""
        self._model = model
        return self

    def take(self, statistics: Sequence[Sums], calls: Calls) -> None:
        """Compares the formulas of all shards, and takes samples as in :class:`ComparisonOfSums`."""
        self.check_names([each for each in statistics if each])
        if not any(calls.outputs.notes or ()):
            super().take(statistics, calls)
        elif not self.samples and self._is_due(statistics):
            rows = take_rows(calls.outputs)
            self.samples += [] if rows is None else [rows]

    def _compare(self, samples: Sequence[Any], device: torch.device) -> None:
        of_forward = [sample for sample in samples if isinstance(sample, RowsOfForward)]
        if not of_forward:
            super()._compare(samples, device)
        elif self._model is not None:
            self._is_of_model = True
            self._compare_rows(self._model, of_forward[0])

    def _compare_rows(self, model: ParallelModel, sample: RowsOfForward) -> None:
        """Compares the sums of three rows with those of each: in evaluation mode, if a loss is
        computed there.
        """
        run = functools.partial(self._run_rows, model, sample, layers=False)
        try:
            *parts, whole = run()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001 - detectors have no loss in evaluation mode
            run = functools.partial(self._run_rows, model, sample, layers=True)
            try:
                *parts, whole = run()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - it may raise anything
                self._refuse(f"a row alone raises {type(error).__name__}: {error}", error)
        sums = [whole[0], *(part[0] for part in parts)]
        self.compare_sums(sums, lambda: [run()[-1][0]], whole[1] // 2)

    def _run_rows(
        self, model: ParallelModel, sample: RowsOfForward, *, layers: bool
    ) -> list[tuple[Sums, int]]:
        """Returns the sums of rows of a forward, with the number of these.

        The model is in evaluation mode, or its ``layers`` alone.
        """
        parts = []
        with evaluating(model.module, layers=layers):
            for outputs, targets in run_rows(model, sample, ROWS_TO_CHECK, BYTES_TOGETHER):
                rows = outputs.sizes[0] or 0
                shard = Shard(NOTHING, targets, None, rows, self.home)
                (part,) = Calls(self.copies, outputs, [shard]).run(self._statistics)
                parts.append((part.tensors, rows))
        return parts

    def _kind(self, place: Any) -> Hashable:
        kind: str = place.kind
        return kind

    def _name(self, number: int, place: Any) -> str:
        return f"the {place.role} of {place.kind}"

    def check_names(self, parts: Sequence[Sums]) -> None:
        """Raises ``UnknownMeanError`` for sums of other formulas."""
        for part in parts:
            compare_names([*parts[0]], [*part])

    def _refuse(self, reason: str, cause: Exception | None = None) -> NoReturn:
        refuse_coupled(self.copies.criterion)
        is_of_number = reason.startswith("the count of") and OVER_NUMBER in reason
        of_rows = _DEPENDENT_IN_MODEL if self._is_of_model else _DEPENDENT
        advice = _COUNTS if is_of_number else of_rows
        raise UnknownMeanError(
            f"the loss of {containers.describe(self.copies.criterion)} does not add up over the rows: {reason}",
            advice,
        ) from cause


class LossOfMeans(LossOfSums):
    """The loss of an update that is a function of sums over its rows.

    Once a batch has shown that it is a linear combination of sums over one count,
    :func:`single_mean` computes the loss in one pass.
    """

    comparison: ComparisonOfMeans
    _is_first_pass = False
    _is_by_hand = False

    def of_model(self, model: ParallelModel | None) -> Self:
        """Tells the model, which may compute the loss."""
        self.comparison.of_model(model)
        return self

    def collect(self, calls: Calls) -> list[Any]:
        """Adds the statistics of a micro-batch in the first pass."""
        self._is_first_pass = not torch.is_grad_enabled()
        parts = super().collect(calls)
        self._is_first_pass = False
        return parts

    @property
    def formula(self) -> Formula:
        """The formula of the batch, once a shard with rows has run."""
        formula: Formula = self._structure
        return formula

    @functools.cached_property
    def mean(self) -> Form | None:
        """The mean over one count that an update that was split has shown, and values to log."""
        if not self.is_split or self._structure is None:
            return None
        entries = self.formula.entries
        logged = [place for place in self.formula.logged if isinstance(entries[place], Value)]
        if None in map(self.formula.entry, logged):
            return None
        return self.formula.mean_of(self.formula.losses)

    @functools.cached_property
    def _is_empty(self) -> bool:
        """True if nothing was counted. To read the counts waits for the device."""
        sums = dict(zip([each.number for each in self.formula.inputs], self._sums(), strict=True))
        needed = self.formula.inputs_of(self.formula.losses)
        counts = [each for each in needed if each.key is not None and not each.is_bounded]
        return bool(counts) and not any(bool(sums[each.number]) for each in counts)

    def _sum_over_ranks(self, nothing: Tensor) -> list[int]:
        """Sums the statistics of all ranks. Returns the ranks with rows, which have a formula each."""
        formula = self._structure
        ranks = super()._sum_over_ranks(nothing)
        if formula is not None:
            self._structure = formula
        is_partly = ranks and len(ranks) < world_size()
        if self._is_by_hand and is_partly and self.formula.outside:
            raise ValueError(
                "the criterion uses parameters that are not its own, and a rank has no rows, expected rows on each rank: add a "
                "penalty to the loss that the criterion returned, or use TrainStep"
            )
        return ranks

    def _sums(self) -> list[Tensor]:
        return [*self._total.values()]

    def hand_back_parts(self, parts: list[Any]) -> list[LossSum]:
        """Returns a loss for each part.

        They have no weight if nothing was counted, so that nothing is updated.

        Raises:
            UnknownMeanError: the model has operations on sums without a graph, which the first of
                two passes does not show: it has no graph at all.
        """
        for formula in filter(None, [part.structure for part in parts]):
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
        losses = super().hand_back_parts(parts)
        if self._structure is not None and self._is_empty:
            losses = [dataclasses.replace(loss, weight=0.0) for loss in losses]
        return losses

    def _learns(self, place: SumName) -> bool:
        """Returns True for the sums of losses that have a gradient."""
        is_of_loss: bool = self._is_of_loss[place.number]
        return is_of_loss

    @functools.cached_property
    def _is_of_loss(self) -> list[bool]:
        needed = self.formula.inputs_of(self.formula.losses)
        return [each.learns and each in needed for each in self.formula.inputs]

    def _trained(self) -> list[Tensor]:
        """Returns the parameters of the formula that learn."""
        return [*super()._trained(), *self.formula.outside.values()]

    def _values_to_log(self, result: object) -> LoggedMeans:
        """Returns the values beside the loss of all rows."""
        _refuse_totals(result, self.formula)
        logged: dict[str, LossSum | None] = {}
        for place, leaf in containers.leaves(result):
            if place not in self.formula.logged:
                continue
            is_number = isinstance(leaf, (int, float)) and self.formula.has_read
            if is_number or isinstance(leaf, Unknown):
                logged[place] = None
            elif isinstance(leaf, Tensor):
                logged[place] = LossSum(weighted_sum(leaf, 1).detach(), 1.0)
        return logged

    def value(self, calls: Calls) -> Any:
        """Returns the loss of a batch. Every rank has the statistics of all ranks."""
        self._is_by_hand = True
        self.comparison.use(functools.partial(statistics_of, with_numbers=True))
        return super().value(calls)

    def finish(self, nothing: Tensor) -> Any:
        """Returns the loss of all statistics, as in :class:`LossOfSums`."""
        result = super().finish(nothing)
        for place, leaf in containers.leaves(result):
            if isinstance(leaf, Unknown):
                _refuse_unknown(self.copies.criterion, place)

        def move_leaf(leaf: Any) -> Any:
            if leaf is None:
                return None
            tensor = torch.tensor(float(leaf)) if isinstance(leaf, (int, float)) else leaf
            return move(tensor, self.copies.output_device or tensor.device)

        return containers.map_leaves(move_leaf, result)

    def _statistics(self, shard: ShardLoss) -> ShardStatistics:
        return statistics_of(
            shard,
            is_split=self.is_split,
            has_graph=not self._is_first_pass,
            with_numbers=self._is_by_hand,
        )

    def _comparison(self) -> ComparisonOfMeans:
        return ComparisonOfMeans(self.copies, self.home, statistics_of)

    def _finish(self) -> Any:
        result = self.formula.compute(self._sums(), self.copies.parameters)

        def as_scalar(leaf: object) -> Any:
            return leaf.reshape(()) if isinstance(leaf, Tensor) else leaf

        return containers.map_leaves(as_scalar, result)


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
    loss = LossOfMeans(calls.copies, torch.device("cpu")).of_model(calls.outputs.model_of())
    parts = loss.collect(calls)
    loss.differentiate(None)
    share = 1 / len(parts)
    losses = loss.hand_back_parts(parts)
    return [
        dataclasses.replace(part, weight=share if part.weight is None else part.weight)
        for part in losses
    ]


_COUNTS = (
    ", expected a number that follows from the sizes of the rows, as len(errors) does: for a count of some rows, divide by a "
    "tensor, as in errors.sum() / mask.sum().clamp(min=1), or give DataParallelCriterion weight=, a function "
    "(output, *targets) -> scalar that counts them, and minimum=1 for max(count, 1); for a constant, multiply by 1 / constant"
)
_SMALL = 2.0**-63  # A sum of 1e19 in float32 can be divided by it.
_DEPENDENT_IN_MODEL = (
    ". The rows depend on each other, or the model draws random numbers for all of them: return what the loss needs, such as the "
    "embeddings, and compute it in a criterion, with whole=True for a loss of all rows"
)
_DEPENDENT = (
    ". The rows depend on each other, or it draws random numbers: give DataParallelCriterion whole=True; "
    "AdditiveLoss(statistics, finish) for tensors of sums; weight=, a function (output, *targets) -> scalar, for a mean; "
    "weight='rows' for a mean over rows; reduce the rows last, as errors.sum(1).mean() in place of errors.mean(0).sum(); or, "
    f"if each shard pads to its own longest row, write {MASKED}"
)
