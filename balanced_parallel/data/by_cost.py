"""Batches whose rows cost differently, such as sentences of different lengths.

Rows are sorted by cost and cut into devices x micro-batches shards of about the same cost, each
padded to its own longest row. Neighbours run together, since they take the same time::

                 time ->
                 micro-batch 0    micro-batch 1
    device 0     2 rows of 90     6 rows of 30
    device 1     3 rows of 60     9 rows of 20

A batch is a list of samples, of which ``collate`` makes shards, or padded tensors, which are
trimmed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import Rows, Whole
from ..batch import containers
from ..batch.marks import map_marked, parameters_of, without_mark
from ..batch.plan import count_micro_batches
from ..batch.rows import Batch, Cut, Mark, Shard, take
from ..runtime import collectives
from ..runtime.devices import pin
from ..runtime.values import check_cost, check_number, check_type
from .cuts import Combine, cost_of_shard, cut_by_cost, cut_to_budget

Collate = Callable[[list[Any]], object]  # makes inputs and targets of samples
Trim = int | Mapping[str, int]


class ByCost(Cut):
    """A cut of batches by the cost of their rows, for ``TrainStep(cut=ByCost(...))``: all devices
    carry about the same.

    Args:
        cost: returns the cost of a sample, with ``collate``; otherwise the costs of all rows,
            ``cost(inputs)``.
        collate: makes ``(inputs, targets)``, or inputs with ``"labels"``, of any list of samples,
            as in ``step(samples)``. Inputs in :class:`Whole` need not have a row for each sample:
            packed rows, batches of graphs, nested tensors.
        trim: dimension of padded inputs and targets that is cut to the largest cost in a shard, or
            a mapping to it from an argument of the model by name, and from ``"targets"``. ``None``
            cuts nothing.
        combine: cost of a shard, from the costs of its rows. It must not decrease with another row.
            ``None`` is rows x longest, the size of a padded shard.
        limit: cost per device at most in one forward, in place of ``micro_batch_size``.

    Example:
        >>> net = torch.nn.Embedding(10, 4)
        >>> model = DataParallelModel(net, ["cpu"] * 2)
        >>> criterion = DataParallelCriterion(lambda output: output.sum(), reduction="sum")
        >>> cut = ByCost(lambda tokens: (tokens > 0).sum(1), trim=1, limit=8)
        >>> step = TrainStep(model, criterion, torch.optim.SGD(net.parameters(), lr=0.1), cut=cut)
        >>> loss = step(torch.tensor([[1, 2, 3, 4, 5], [1, 0, 0, 0, 0], [2, 3, 0, 0, 0]]))
    """

    def __init__(
        self,
        cost: Callable[[Any], Any],
        *,
        collate: Collate | None = None,
        trim: Trim | None = None,
        combine: Combine | None = None,
        limit: float | None = None,
    ) -> None:
        for name, function in {
            "cost": cost,
            "collate": collate or sum,
            "combine": combine or sum,
        }.items():
            check_type(name, function, Callable, "a function")
        for dim in (
            trim.values() if isinstance(trim, Mapping) else [trim] if trim is not None else []
        ):
            check_number(
                "trim",
                dim,
                "a dimension, or a mapping to dimensions from the names of arguments",
                whole=True,
            )
        if collate is not None and trim is not None:
            raise ValueError(
                "collate= and trim= were given: expected collate= for lists of samples, trim= for padded batches"
            )
        check_cost("limit", limit)
        self.cost = cost
        self.collate = collate
        self.trim = trim
        self.combine = combine
        self.limit = limit

    def __repr__(self) -> str:
        """Returns the settings."""
        settings = [f"{name}={value!r}" for name, value in vars(self).items() if value is not None]
        return f"ByCost({', '.join(settings)})"

    def open(
        self,
        inputs: object,
        targets: object,
        mark: Mark,
        forward: Callable[..., object],
        *,
        unit: str,
        is_strict: bool,
    ) -> "CostBatch":
        """Takes a batch apart: padded tensors, or with ``collate`` a list of samples."""
        limit = unit, is_strict
        if self.collate is not None:
            return _Samples(self, self.collate, limit, inputs, targets, mark)
        costs = _costs_of_rows(self.cost(inputs))
        return _Padded(self, limit, costs, forward, *mark(inputs, targets))


# The unit of a limit of a device in one forward, "rows" or "cost". True if a row over the limit is
# an error; otherwise it runs alone.
LimitKind = tuple[str, bool]


class CostBatch(Batch):
    """A batch that is cut by cost."""

    pads = True

    def __init__(
        self,
        cut: ByCost,
        limit: LimitKind,
        costs: Sequence[float],
        *batch: Any,
    ) -> None:
        super().__init__(*batch)
        self.costs = costs
        self._unit, self._is_strict = limit
        self._combine = cut.combine

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
        cost = max(cost_of_shard([self.costs[row] for row in run], self._combine) for run in runs)
        alone = cost_of_shard([max(self.costs)], self._combine)
        return cost, max(cost / 2, alone) if cost > alone else 0

    def _runs(
        self, devices: int, limit: float | None, agree: Callable[[int], int]
    ) -> list[list[list[int]]]:
        """Returns the rows of each shard of each micro-batch."""
        costs = self.costs
        most_rows = None
        budget = None
        if self._unit == "rows" or limit is None or not costs:
            most_rows = None if limit is None or self._unit == "cost" else int(limit)
            needed = count_micro_batches(len(costs), most_rows, devices)
        else:
            budget = (
                limit if self._is_strict else max(limit, cost_of_shard([max(costs)], self._combine))
            )
            needed = -(-len(cut_to_budget(costs, budget, self._combine)) // devices)
        count = agree(needed)
        runs = cut_by_cost(
            costs,
            devices * count,
            self._combine,
            most_rows=most_rows,
            budget=budget,
            together=devices,
        )
        return [runs[devices * place : devices * (place + 1)] or [[]] for place in range(count)]


class _Samples(CostBatch):
    """A list of samples. A shard is what ``collate`` makes of its samples."""

    def __init__(
        self,
        cut: ByCost,
        collate: Collate,
        limit: LimitKind,
        samples: object,
        targets: object,
        mark: Mark,
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
        costs = [cut.cost(sample) for sample in samples]
        super().__init__(cut, limit, costs, inputs)
        self._collate = collate
        self._mark = mark
        self._samples = samples
        self._example = list(samples[:1])
        self.has_example = bool(self._example)

    def take_example(self, earlier: Sequence[object]) -> Sequence[object]:
        """Returns the first sample. A batch without samples takes the ``earlier`` one."""
        self._example = self._example or [*earlier]
        self.has_example = bool(self._example)
        return self._example

    def shard(self, part: Sequence[int], device: torch.device) -> Shard:
        """Returns what ``collate`` makes of some samples, which must have one row for each."""
        chosen = [self._samples[row] for row in part] or self._example
        of_model, of_criterion = _inputs_and_targets(self._collate(chosen))
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
        if not part:
            return _rows_of(batch, part, device)._replace(is_joined=is_joined)
        return Shard(batch.inputs, batch.targets, part, target_rows, device, is_joined=is_joined)

    def _refuse(self, samples: int, name: str, rows: int | None, advice: str) -> NoReturn:
        raise ValueError(
            f"collate was given {samples} samples and returned {name} with {rows or 'no'} rows, expected one for each{advice}"
        )


class _Padded(CostBatch):
    """Padded tensors. A shard has some of their rows, cut to the longest of them."""

    def __init__(
        self,
        cut: ByCost,
        limit: LimitKind,
        costs: Sequence[float],
        forward: Callable[..., object],
        *batch: Any,
    ) -> None:
        super().__init__(cut, limit, costs, *batch)
        if self.rows is None or len(costs) != self.rows:
            raise ValueError(
                f"cost= returned {len(costs)} costs for {self.rows or 'no'} rows, expected one number for each row"
            )
        if self.target_rows not in (None, self.rows):
            raise ValueError(
                f"the targets have {self.target_rows} rows and the inputs {self.rows}, expected as many for a cut by cost"
            )
        # the dimension to cut of each leaf of inputs and targets
        self._trims: list[int | None] = []
        if cut.trim is not None:
            self._trims, longest = _trims(self, cut.trim, forward)
            _check_lengths(costs, longest)
        self._whole_targets = self.counted_targets

    def shard(self, part: Sequence[int], device: torch.device) -> Shard:
        """Returns copies of some rows, cut to the longest of them."""
        length = max((int(self.costs[row]) for row in part), default=1)
        trims = iter(self._trims)

        def shorten(leaf: object) -> object:
            dim = next(trims, None)
            if dim is None:
                return leaf
            return map_marked(
                lambda tensor: tensor.narrow(dim, 0, min(max(length, 1), tensor.size(dim))), leaf
            )

        inputs, targets = containers.map_leaves(shorten, (self.inputs, self.targets))
        return _rows_of(Batch(inputs, targets, self.dims), part, device)

    def check_weight(self, weigh: Callable[..., Any]) -> None:
        """Raises ``ValueError`` if ``weigh(*targets)`` counts targets that were cut with the
        padding.
        """
        whole = weigh(*self._whole_targets[0]) if self._trims else None
        if not isinstance(whole, Tensor) or not whole.is_cpu:
            return
        counted = sum(float(weigh(*part) or 0) for part in self.counted_targets)
        if counted != float(whole):
            raise ValueError(
                f"the criterion counts {float(whole):g} targets, but {counted:g} of them within the lengths that cost= "
                "returned: expected padding at the end, and the ignore_index of the criterion in targets"
            )


def _rows_of(batch: Batch, part: Sequence[int], device: torch.device) -> Shard:
    """Returns a shard with copies of some rows."""
    rows = list(part)
    inputs = take(batch.inputs, rows, batch.dims[0])
    targets = take(batch.targets, rows, batch.dims[1])
    return Shard(inputs, targets, rows, len(rows), device)


def _costs_of_rows(costs: object) -> list[float]:
    """Returns the costs of the rows of padded tensors as numbers."""
    numbers = costs.tolist() if isinstance(costs, Tensor) else costs
    if not isinstance(numbers, Iterable):
        raise TypeError(
            f"cost= returned {containers.describe(costs)}, expected one number for each row of the inputs"
        )
    return [*numbers]


def _trims(
    batch: Batch, trim: Trim, forward: Callable[..., object]
) -> tuple[list[int | None], int | None]:
    """Returns the dimension to cut of each leaf of inputs and targets, or None, and the padded
    length.
    """
    names = [parameter.name for parameter in parameters_of(forward) or ()]
    positional, keywords = batch.inputs
    names += map(str, range(len(names), len(positional)))
    values = [
        *zip(names, positional, strict=False),
        *keywords.items(),
        ("targets", batch.targets),
    ]
    is_named = isinstance(trim, Mapping)
    passed = [name for name, _ in values]
    of_argument = trim if isinstance(trim, Mapping) else dict.fromkeys(passed, trim)
    if unknown := of_argument.keys() - passed:
        names_of_trim = ", ".join(map(str, unknown))
        raise ValueError(
            f"trim= names {names_of_trim}, expected some of {', '.join(passed)}, which were passed"
        )
    dims: list[int | None] = []
    longest: int | None = None
    for name, value in values:
        dim = of_argument.get(name)
        for _, leaf in containers.leaves(value):
            tensor = without_mark(leaf)
            is_padded = dim is not None and isinstance(tensor, Tensor) and tensor.dim() > dim
            longest = tensor.size(dim) if is_padded and longest is None else longest
            dims.append(dim if is_padded and (is_named or tensor.size(dim) == longest) else None)
    return dims, longest


def _check_lengths(costs: Sequence[float], length: int | None) -> None:
    for row, cost in enumerate(costs):
        if cost != int(cost) or length is None or cost > length:
            raise ValueError(
                f"the cost of row {row} is {cost}, expected a number of entries, at most {length}, to trim to"
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
