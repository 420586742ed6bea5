"""Cuts an effective batch into micro-batches by the cost of its rows.

Rows are sorted by cost and cut into devices x micro-batches shards. Neighbours run together, since they take the same time::

                 time ->
                 micro-batch 0    micro-batch 1
    device 0     2 rows of 90     6 rows of 30
    device 1     3 rows of 60     9 rows of 20
"""

from collections.abc import Sequence

from torch import Tensor

from ..batch.cost_cuts import Combine, cost_of_shard, cut_by_cost, cut_to_budget
from ..batch.microbatches import count_micro_batches
from ..batch.rows import move_leaves
from ..batch.shards import as_shards, pinned
from ..loss.criterion import DataParallelCriterion
from ..replicas.sync_batchnorm import meets_other_ranks
from ..runtime.collectives import world_size
from .cost_batches import CostedRows, Shard, Source
from .cuts import Cut, Unit
from .gradient_sync import GradientSync
from .micro_batches import Batch, MicroBatch, Model

__all__: list[str] = []


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
