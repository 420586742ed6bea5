"""Batches whose rows cost differently, such as sentences of different lengths.

Rows are sorted by cost and cut into devices x micro-batches shards of about the same cost, each
padded to its own longest row. Neighbours run together, since they take the same time::

                 time ->
                 micro-batch 0    micro-batch 1
    device 0     2 rows of 90     6 rows of 30
    device 1     3 rows of 60     9 rows of 20

A batch is a list of samples, of which ``collate`` makes shards.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import Rows, Whole
from ..batch import containers
from ..batch.marks import map_marked
from ..batch.plan import count_micro_batches
from ..batch.rows import Batch, Cut, Mark, Shard, take
from ..runtime import collectives, values
from ..runtime.devices import pin
from .cuts import Combine, cost_of_shard, cut_by_cost, cut_to_budget

Collate = Callable[[list[Any]], object]  # makes inputs and targets of samples


class ByCost(Cut):
    """A cut of batches by the cost of their rows, for ``TrainStep(cut=ByCost(...))``: all devices
    carry about the same.

    Args:
        cost: returns the cost of a sample.
        collate: makes ``(inputs, targets)``, or inputs with ``"labels"``, of any list of samples,
            as in ``step(samples)``. Inputs in :class:`Whole` need not have a row for each sample:
            packed rows, batches of graphs, nested tensors.
        combine: cost of a shard, from the costs of its rows. It must not decrease with another row.
            ``None`` is rows x longest, the size of a padded shard.
        limit: cost per device at most in one forward, in place of ``micro_batch_size``.

    Example:
        >>> net = torch.nn.Embedding(10, 4)
        >>> model = DataParallelModel(net, ["cpu"] * 2)
        >>> criterion = DataParallelCriterion(lambda output, ones: output.sum(), reduction="sum")
        >>> pad = lambda rows: (torch.nn.utils.rnn.pad_sequence(rows, True), torch.ones(len(rows)))
        >>> cut = ByCost(len, collate=pad, limit=8)
        >>> step = TrainStep(model, criterion, torch.optim.SGD(net.parameters(), lr=0.1), cut=cut)
        >>> loss = step([torch.arange(5), torch.arange(1), torch.arange(2)])
    """

    @values.naming_arguments
    def __init__(
        self,
        cost: Callable[[Any], float],
        *,
        collate: Collate,
        combine: Combine | None = None,
        limit: float | None = None,
    ) -> None:
        values.check_type("cost", cost, Callable, "a function of a sample")
        values.check_type("collate", collate, Callable, "a function that makes a batch of samples")
        values.check_type("combine", combine, Callable | None, "a function")
        values.check_cost("limit", limit)
        self.cost = cost
        self.collate = collate
        self.combine = combine
        self.limit = limit

    def __repr__(self) -> str:
        """Returns the settings."""
        settings = [f"{name}={value!r}" for name, value in vars(self).items() if value is not None]
        return f"ByCost({', '.join(settings)})"

    def open(
        self, samples: object, targets: object, mark: Mark, *, unit: str, is_strict: bool
    ) -> "CostBatch":
        """Takes a list of samples apart."""
        return CostBatch(self, samples, targets, mark, unit=unit, is_strict=is_strict)


class CostBatch(Batch):
    """A list of samples that is cut by cost. A shard is what ``collate`` makes of its samples."""

    pads = True

    def __init__(
        self,
        cut: ByCost,
        samples: object,
        targets: object,
        mark: Mark,
        *,
        unit: str,
        is_strict: bool,
    ) -> None:
        if isinstance(samples, (Tensor, Mapping, str, tuple)) or not isinstance(samples, Sequence):
            raise TypeError(
                f"step was given {containers.describe(samples)}, expected a list of samples, of which collate= makes batches: "
                "use DataLoader(..., collate_fn=list)"
            )
        inputs, of_criterion, _ = mark(Rows(samples), targets)
        if of_criterion.inputs not in ((), (None,)):
            raise TypeError(
                "step was given targets beside a list of samples, expected step(samples): collate= makes the targets"
            )
        super().__init__(inputs)
        self.costs = [cut.cost(sample) for sample in samples]
        self._cut = cut
        self._unit = unit
        self._is_strict = is_strict
        self._mark = mark
        self._samples = samples
        self._example = list(samples[:1])
        self.has_example = bool(self._example)

    def plan(
        self,
        devices: Sequence[torch.device],
        weights: Sequence[float] | None,
        limit: float | None,
        agree: Callable[[int], int],
    ) -> Iterator[list[Shard]]:
        """Yields the shards of each micro-batch."""
        if weights is not None:
            raise ValueError(
                f"split={weights} of the model and cost= were given, expected one of them"
            )
        if not self.has_example:
            return iter([])
        shards = [
            [_pinned(self.shard(rows, device)) for rows, device in zip(runs, devices, strict=False)]
            for runs in self._runs(len(devices), limit, agree)
        ]
        shards_of_all = [shard for row in shards for shard in row] or [self.shard([], devices[0])]
        self.counted_targets = [shard.plain_targets() for shard in shards_of_all]
        # it has the rows of another batch: only ranks need it
        is_example = not self.costs and shards_of_all[0].is_joined
        return iter([] if is_example and collectives.world_size() == 1 else shards)

    def largest(self, shares: int | Sequence[float], limit: float | None) -> tuple[float, float]:
        """Returns the cost of the costliest shard, and half of it, but no less than that of a row
        alone.
        """
        if not self.costs:
            return 0, 0
        devices = shares if isinstance(shares, int) else len(shares)
        runs = [
            run for row in self._runs(devices, limit, lambda count: count) for run in row if run
        ]
        cost = max(
            cost_of_shard([self.costs[row] for row in run], self._cut.combine) for run in runs
        )
        alone = cost_of_shard([max(self.costs)], self._cut.combine)
        return cost, max(cost / 2, alone) if cost > alone else 0

    def _runs(
        self, devices: int, limit: float | None, agree: Callable[[int], int]
    ) -> list[list[list[int]]]:
        """Returns the rows of each shard of each micro-batch."""
        combine = self._cut.combine
        most_rows = int(limit) if limit is not None and self._unit == "rows" else None
        needed = count_micro_batches(len(self.costs), most_rows, devices)
        budget = None
        if self.costs and limit is not None and self._unit == "cost":
            alone = cost_of_shard([max(self.costs)], combine)
            budget = limit if self._is_strict else max(limit, alone)
            needed = -(-len(cut_to_budget(self.costs, budget, combine)) // devices)
        count = agree(needed)
        runs = cut_by_cost(self.costs, devices * count, combine, most_rows=most_rows, budget=budget)
        return [runs[devices * place : devices * (place + 1)] or [[]] for place in range(count)]

    def take_example(self, earlier: Sequence[object]) -> Sequence[object]:
        """Returns the first sample. A batch without samples takes the ``earlier`` one."""
        self._example = self._example or [*earlier]
        self.has_example = bool(self._example)
        return self._example

    def shard(self, part: Sequence[int], device: torch.device) -> Shard:
        """Returns what ``collate`` makes of some samples, which must have one row for each."""
        chosen = [self._samples[row] for row in part] or self._example
        of_model, of_criterion = _inputs_and_targets(self._cut.collate(chosen))
        batch = Batch(*self._mark(of_model, of_criterion))
        target_rows = batch.target_rows
        is_joined = batch.rows is None and any(
            isinstance(leaf, Whole) for _, leaf in containers.leaves(batch.inputs)
        )
        if not is_joined and batch.rows != len(chosen):
            self._refuse(
                len(chosen),
                "inputs",
                batch.rows,
                ". If it joins samples, as into one packed row, let it return Whole(...)",
            )
        # targets may be flattened
        if not target_rows or (not is_joined and target_rows % len(chosen)):
            self._refuse(
                len(chosen),
                "targets",
                target_rows,
                ", or a multiple of that. Targets are not in Whole(...)",
            )
        if part:
            return Shard(
                batch.inputs, batch.targets, part, target_rows, device, is_joined=is_joined
            )
        inputs = take(batch.inputs, [], batch.dims[0])
        targets = take(batch.targets, [], batch.dims[1])
        return Shard(inputs, targets, [], 0, device, is_joined=is_joined)

    def _refuse(self, samples: int, name: str, rows: int | None, advice: str) -> NoReturn:
        raise ValueError(
            f"collate was given {samples} samples and returned {name} with {rows or 'no'} rows, expected one for each{advice}"
        )


def _pinned(shard: Shard) -> Shard:
    """Returns a shard with tensors of the host in page-locked memory, so that copies to an
    accelerator do not wait.
    """
    if shard.device.type == "cpu":
        return shard

    def pin_leaf(leaf: object) -> object:
        return pin(leaf) if isinstance(leaf, Tensor) and leaf.layout == torch.strided else leaf

    return shard._replace(
        inputs=map_marked(pin_leaf, shard.inputs), targets=map_marked(pin_leaf, shard.targets)
    )


def _inputs_and_targets(collated: object) -> tuple[object, object]:
    """Splits the result of a ``collate``: a pair, or a mapping with labels.

    ``Whole`` around it marks the inputs.
    """
    if isinstance(collated, Whole):
        inputs, targets = _inputs_and_targets(collated.value)
        if isinstance(inputs, Mapping):
            return {name: Whole(value) for name, value in inputs.items()}, targets
        if isinstance(inputs, tuple) and not containers.is_named_tuple(inputs):
            return tuple(map(Whole, inputs)), targets
        return Whole(inputs), targets
    if isinstance(collated, Mapping) and "labels" in collated:
        return collated, collated["labels"]
    if isinstance(collated, (tuple, list)) and len(collated) == 2:
        return collated[0], collated[1]
    raise ValueError(
        f"collate returned {containers.describe(collated)}, expected (inputs, targets), or a mapping with 'labels'"
    )
