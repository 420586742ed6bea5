"""Options of :class:`TrainStep` for rows that cost differently.

Ways to cut an effective batch into micro-batches: into equal numbers of rows, or by the cost of the rows.

Batches whose rows cost differently: the cost of each row, and shards that are padded to their own longest row.

Cuts an effective batch into micro-batches by the cost of its rows.

Rows are sorted by cost and cut into devices x micro-batches shards. Neighbours run together, since they take the same time::

                 time ->
                 micro-batch 0    micro-batch 1
    device 0     2 rows of 90     6 rows of 30
    device 1     3 rows of 60     9 rows of 20

Batches that are padded already. Each shard is cut to the longest of its rows.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..batch import containers
from ..batch.plan import Combine, cost_of_shard, cut_by_cost, cut_to_budget
from ..batch.rows import (
    Along,
    Arguments,
    as_arguments,
    as_shards,
    count_micro_batches,
    count_rows,
    inputs_and_targets,
    move_leaves,
    pinned,
    take_rows,
)
from ..loss.criterion import DataParallelCriterion
from ..loss.sums import Weight
from ..replicas.batchnorm import meets_other_ranks
from ..runtime.collectives import world_size
from ..runtime.values import check_number, check_type
from .accumulation import Batch, MicroBatch, Model, cut_micro_batches, most_rows
from .settings import check_micro_batch_cost
from .strategy import GradientSync

__all__: list[str] = []


Unit = Literal["rows", "cost"]


class Cut(NamedTuple):
    """The micro-batches of a batch.

    Args:
        micro_batches: in the order in which they run.
        targets: of the whole batch, in any number of parts.
    """

    micro_batches: list[MicroBatch]
    targets: list[tuple[Any, ...]]


class Cuts(Protocol):
    """A way to cut batches.

    Attributes:
        unit: of the limit, for one device in one forward.
    """

    unit: Unit

    def cut(self, batch: Batch, limit: float | None) -> Cut:
        """Returns the micro-batches of a batch."""

    def largest(self, batch: Batch, limit: float | None) -> tuple[float, float]:
        """Returns the largest share of a device in one forward, and a limit that halves it, 0 if nothing does."""


class EqualRows:
    """Cuts a batch into numbers of rows that differ by at most one."""

    unit: Unit = "rows"

    def __init__(self, model: Model, criterion: DataParallelCriterion, sync: GradientSync) -> None:
        self._model, self._criterion, self._sync = model, criterion, sync

    def cut(self, batch: Batch, limit: float | None) -> Cut:
        """Returns the micro-batches of a batch."""
        rows = None if limit is None else int(limit)
        return Cut(cut_micro_batches(self._model, self._criterion, self._sync, batch, rows), [batch.targets])

    def largest(self, batch: Batch, limit: float | None) -> tuple[int, int]:
        """Returns rows, and half of them, rounded up."""
        rows = most_rows(self._model, batch.inputs, None if limit is None else int(limit))
        return rows, -(-rows // 2) if rows > 1 else 0


class Shard(NamedTuple):
    """Some rows of a batch: arguments of the model and of the criterion.

    Args:
        arguments: of the model, marked with their dimensions of rows.
        targets: of the criterion, marked too.
    """

    arguments: Arguments
    targets: tuple[Any, ...]


class CostedRows(NamedTuple):
    """The rows of a batch.

    Args:
        costs: one for each row.
        shard: returns some rows, by their indices.
        has_example: a shard without rows can be made.
        weight: what the criterion counts in all rows, if shards could lack some of it.
    """

    costs: list[float]
    shard: Callable[[Sequence[int]], Shard]
    has_example: bool
    weight: Weight | None = None


class Source(Protocol):
    """Kind of batches: lists of samples, or padded tensors."""

    def open(self, batch: Batch, model: Model, criterion: DataParallelCriterion) -> CostedRows:
        """Returns the rows of a batch."""


class Samples:
    """Lists of samples. A shard is what ``collate`` makes of its samples.

    Args:
        cost: of a sample.
        collate: returns ``(inputs, targets)`` of a list of samples, or a mapping of inputs with ``"labels"``.
    """

    def __init__(self, cost: Callable[[Any], float], collate: Callable[[list[Any]], Any]) -> None:
        self._cost, self._collate = cost, collate
        self._example: list[Any] = []  # in place of no samples

    def open(self, batch: Batch, model: Model, criterion: DataParallelCriterion) -> CostedRows:
        """Returns the samples of a batch."""
        samples = batch.inputs
        if isinstance(samples, (torch.Tensor, Mapping, str, tuple)) or not isinstance(samples, Sequence):
            raise TypeError(
                f"step was given {containers.describe(samples)}, expected a list of samples, of which collate= makes batches: "
                "use DataLoader(..., collate_fn=list)"
            )
        if batch.targets not in ((), (None,)):
            raise TypeError("step was given targets beside a list of samples, expected step(samples): collate= makes the targets")
        self._example = list(samples[:1]) or self._example

        def shard(rows: Sequence[int]) -> Shard:
            chosen = [samples[row] for row in rows] or list(self._example)
            collated, dims = _checked(self._collate(chosen), len(chosen), model, criterion)
            return collated if rows else rows_of(collated, dims, [])

        return CostedRows([self._cost(sample) for sample in samples], shard, bool(self._example))


def _checked(collated: Any, rows: int, model: Model, criterion: DataParallelCriterion) -> tuple[Shard, tuple[int, int]]:
    """Returns the result of a ``collate``, which has one row for each of ``rows`` samples, and the dimensions of the rows."""
    inputs, targets = inputs_and_targets(collated)
    shard, dims = marked(inputs, containers.spread(targets), model, criterion)
    for name, node, dim in zip(("inputs", "targets"), shard, dims, strict=True):
        rows_of_node = count_rows(node, dim, rows)
        # targets may be flattened
        if rows_of_node is None or rows_of_node % rows or (name == "inputs" and rows_of_node != rows):
            raise ValueError(
                f"collate was given {rows} samples and returned {name} with {rows_of_node or 'no'} rows, expected one row for "
                f"each sample, {rows}"
            )
    return shard, dims


def marked(
    inputs: Any, targets: tuple[Any, ...], model: Model, criterion: DataParallelCriterion
) -> tuple[Shard, tuple[int, int]]:
    """Returns inputs and targets with marks, and the dimension of the rows in what is not marked."""
    arguments, dim = criterion.mark(targets, {}, model.out_dims)
    return Shard(model.mark(as_arguments(inputs)), arguments.inputs), (model.dim, dim)


def rows_of(shard: Shard, dims: tuple[int, int], rows: Sequence[int]) -> Shard:
    """Returns copies of some rows of a shard."""
    return Shard(take_rows(shard.arguments, rows, dims[0]), take_rows(shard.targets, rows, dims[1]))


class CostCuts:
    """Cuts a batch by the cost of its rows.

    Args:
        model, criterion, sync: of the step.
        source: the kind of batches.
        combine: cost of a shard, as in :func:`cut_by_cost`.
        unit: of the limit.
        is_strict: a row over the limit is an error. Otherwise it runs alone.
    """

    def __init__(
        self,
        model: Model,
        criterion: DataParallelCriterion,
        sync: GradientSync,
        source: Source,
        combine: Combine | None,
        unit: Unit,
        *,
        is_strict: bool,
    ) -> None:
        self._model, self._criterion, self._sync = model, criterion, sync
        self._source, self._combine, self.unit, self._is_strict = source, combine, unit, is_strict

    def cut(self, batch: Batch, limit: float | None) -> Cut:
        """Returns the micro-batches of a batch.

        Raises:
            ValueError: costs that are not one number for each row, a row over the budget, or a model with unequal shares.
        """
        if self._model.split is not None:
            raise ValueError(f"split={self._model.split} of the model and cost= were given, expected one of them")
        rows = self._source.open(batch, self._model, self._criterion)
        groups = self._groups(rows, limit)
        shards = [[rows.shard(run) for run in group] for group in groups]
        counted = [shard for group in shards for shard in group] or ([rows.shard([])] if rows.has_example else [])
        targets = [move_leaves(shard.targets, None) for shard in counted]
        self._check_weight(rows, targets)
        if any(device.type != "cpu" for device in self._model.devices):
            shards = [[pinned(shard) for shard in group] for group in shards]
        followers = reversed(range(len(groups)))
        return Cut([_micro_batch(*parts) for parts in zip(shards, groups, followers, strict=True)], targets)

    def largest(self, batch: Batch, limit: float | None) -> tuple[float, float]:
        """Returns the cost of the costliest shard, and half of it, but no less than that of a row alone."""
        costs = self._source.open(batch, self._model, self._criterion).costs
        if not costs:
            return 0, 0
        runs = self._runs(costs, limit, self._count(costs, limit))
        cost = max(cost_of_shard([costs[row] for row in run], self._combine) for run in runs)
        alone = cost_of_shard([max(costs)], self._combine)
        return cost, max(cost / 2, alone) if cost > alone else 0

    def _groups(self, rows: CostedRows, limit: float | None) -> list[list[list[int]]]:
        """Returns the rows of each shard of each micro-batch."""
        if not rows.has_example:  # no shard can be made, not even one without rows
            if world_size() > 1 and meets_other_ranks(self._model.modules()):
                raise RuntimeError("this rank had no sample in its first batch, expected one: others wait for its batch norm")
            return []
        count, devices = self._sync.count_micro_batches(self._count(rows.costs, limit)), len(self._model.devices)
        runs = self._runs(rows.costs, limit, count)
        return [runs[devices * place : devices * (place + 1)] or [[]] for place in range(count)]

    def _count(self, costs: Sequence[float], limit: float | None) -> int:
        """Returns the smallest number of micro-batches within the limit."""
        devices = len(self._model.devices)
        if self.unit == "rows" or limit is None or not costs:
            return count_micro_batches(len(costs), None if limit is None else int(limit), devices)
        return -(-len(cut_to_budget(costs, self._budget(costs, limit), self._combine)) // devices)

    def _runs(self, costs: Sequence[float], limit: float | None, count: int) -> list[list[int]]:
        """Returns the rows of each shard of ``count`` micro-batches."""
        devices = len(self._model.devices)
        most_rows = int(limit) if limit is not None and self.unit == "rows" else None
        budget = self._budget(costs, limit) if limit is not None and self.unit == "cost" and costs else None
        return cut_by_cost(costs, devices * count, self._combine, most_rows=most_rows, budget=budget, together=devices)

    def _budget(self, costs: Sequence[float], limit: float) -> float:
        return limit if self._is_strict else max(limit, cost_of_shard([max(costs)], self._combine))

    def _check_weight(self, rows: CostedRows, targets: Sequence[tuple[object, ...]]) -> None:
        """Raises ``ValueError`` if the criterion counts targets that were cut with the padding."""
        if rows.weight is None or not isinstance(rows.weight, Tensor) or not rows.weight.is_cpu:
            return
        counted = sum(float(self._criterion.weigh_targets(*part) or 0) for part in targets)
        if counted != float(rows.weight):
            raise ValueError(
                f"the criterion counts {float(rows.weight):g} targets, but {counted:g} of them within the lengths that cost= "
                "returned: pad at the end, and the targets with the ignore_index of the criterion"
            )


def _micro_batch(shards: Sequence[Shard], runs: Sequence[Sequence[int]], followers: int) -> MicroBatch:
    sizes = [len(run) for run in runs]
    return MicroBatch(
        as_shards([shard.arguments for shard in shards], sizes),
        as_shards([shard.targets for shard in shards], sizes),
        followers,
        [row for run in runs for row in run],
    )


Trim = int | Mapping[str, int]


class Padded:
    """Padded tensors. A shard has some of their rows, cut to the longest of them.

    Args:
        cost: returns the cost of each row of the inputs.
        trim: dimension of the inputs and the targets that is cut to the largest cost of the rows, or a mapping to it from an
            argument of the model by name, and from ``"targets"``. ``None`` cuts nothing.
    """

    def __init__(self, cost: Callable[[Any], Any], trim: Trim | None) -> None:
        self._cost, self._trim = cost, trim

    def open(self, batch: Batch, model: Model, criterion: DataParallelCriterion) -> CostedRows:
        """Returns the rows of a batch."""
        whole, dims = marked(batch.inputs, batch.targets, model, criterion)
        costs = self._cost(batch.inputs)
        if not isinstance(costs, Iterable) or (isinstance(costs, Tensor) and costs.dim() == 0):
            raise TypeError(f"cost= returned {containers.describe(costs)}, expected one number for each row of the inputs")
        costs = costs.tolist() if isinstance(costs, Tensor) else list(costs)
        rows = count_rows(whole.arguments, dims[0])
        if rows is None or any(isinstance(cost, (list, Tensor)) for cost in costs) or len(costs) != rows:
            raise ValueError(f"cost= returned {len(costs)} costs for {rows or 'no'} rows, expected one number for each row")
        target_rows = count_rows(whole.targets, dims[1], rows)
        if target_rows not in (None, rows):
            raise ValueError(
                f"the targets have {target_rows} rows and the inputs {rows}, expected the same number where rows are cut by cost"
            )
        trims = [] if self._trim is None else _trims(whole, self._trim, model, costs)

        def shard(chosen: Sequence[int]) -> Shard:
            if not trims:
                return rows_of(whole, dims, chosen)
            length = max(int(max((costs[row] for row in chosen), default=1)), 1)
            of_leaves = iter(trims)
            shorter = containers.map_leaves(lambda leaf: _shorten(leaf, next(of_leaves), length), whole)
            return rows_of(shorter, dims, chosen)

        return CostedRows(costs, shard, True, criterion.weigh_targets(*batch.targets) if trims else None)


def _shorten(leaf: Any, dim: int | None, length: int) -> Any:
    """Returns the first ``length`` entries of a tensor along ``dim``."""
    if dim is None:
        return leaf
    if type(leaf) is Along:
        return Along(_shorten(leaf.leaf, dim, length), leaf.dim)
    return leaf.narrow(dim, 0, min(length, leaf.size(dim)))


def _trims(whole: Shard, trim: Trim, model: Model, costs: Sequence[float]) -> list[int | None]:
    """Returns the dimension to cut of each leaf of inputs and targets, or None.

    Raises:
        ValueError: an argument that was not passed, or costs that are not lengths.
    """
    names = list(inspect.signature(model.module.forward).parameters)
    positions = [names[at] if at < len(names) else str(at) for at in range(len(whole.arguments.inputs))]
    values = [*zip(positions, whole.arguments.inputs, strict=True), *whole.arguments.kwargs.items(), ("targets", whole.targets)]
    if isinstance(trim, Mapping) and (unknown := trim.keys() - {name for name, _ in values}):
        raise ValueError(
            f"trim= names {', '.join(map(str, unknown))}, expected some of {', '.join(name for name, _ in values)}: the "
            "arguments of the model that were passed, and the targets"
        )
    dims: list[int | None] = []
    length: int | None = None
    for name, value in values:
        dim = trim.get(name) if isinstance(trim, Mapping) else trim
        for _, leaf in containers.leaves(value):
            tensor = leaf.leaf if type(leaf) is Along else leaf
            has_dim = dim is not None and isinstance(tensor, Tensor) and tensor.dim() > dim
            length = tensor.size(dim) if has_dim and length is None else length
            dims.append(dim if has_dim and (isinstance(trim, Mapping) or tensor.size(dim) == length) else None)
    for row, cost in enumerate(costs):
        if cost != int(cost) or length is None or cost > length:
            raise ValueError(
                f"the cost of row {row} is {cost}, expected a number of entries, at most {length}: trim={trim!r} keeps so many"
            )
    return dims


Cost = Callable[[Any], Any]
Collate = Callable[[list[Any]], Any]


class CostOptions(NamedTuple):
    """The arguments of :class:`TrainStep` for a cost."""

    cost: Cost | None
    collate: Collate | None
    trim: Trim | None
    combine: Combine | None
    micro_batch_cost: float | None


def make_cuts(
    model: Model,
    criterion: DataParallelCriterion,
    sync: GradientSync,
    options: CostOptions,
    micro_batch_size: int | Literal["auto"] | None,
) -> Cuts:
    """Returns the way to cut batches: into equal rows, or by cost.

    Raises:
        TypeError: an option that is not a function.
        ValueError: options that exclude each other, or a budget that is not positive.
    """
    _check(options, micro_batch_size)
    cost, collate, trim, combine, _ = options
    if cost is None:
        return EqualRows(model, criterion, sync)
    source = Padded(cost, trim) if collate is None else Samples(cost, collate)
    unit: Unit = "rows" if isinstance(micro_batch_size, int) else "cost"
    return CostCuts(model, criterion, sync, source, combine, unit, is_strict=micro_batch_size != "auto")


def _check(options: CostOptions, micro_batch_size: int | Literal["auto"] | None) -> None:
    cost, collate, trim, combine, micro_batch_cost = options
    names = [name for name, value in options._asdict().items() if value is not None]
    if cost is None and names:
        raise ValueError(f"{names[0]}= was given without cost=, expected the cost of a row too, such as cost=len")
    for name, function in (("cost", cost), ("collate", collate), ("combine", combine)):
        check_type(name, function, Callable | None, "a function")
    for dim in trim.values() if isinstance(trim, Mapping) else [trim] if trim is not None else []:
        check_number("trim", dim, "a dimension, or a mapping to dimensions from the names of arguments", whole=True)
    if collate is not None and trim is not None:
        raise ValueError("collate= and trim= were given: expected collate= for lists of samples, trim= for padded batches")
    if micro_batch_cost is not None and micro_batch_size is not None:
        raise ValueError(f"micro_batch_size={micro_batch_size!r} and micro_batch_cost= were given, expected one of them")
    check_micro_batch_cost(micro_batch_cost)
