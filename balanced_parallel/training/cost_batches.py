"""Batches whose rows cost differently: the cost of each row, and shards that are padded to their own longest row."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..batch import nested
from ..batch.cost_shards import inputs_and_targets
from ..batch.microbatches import as_arguments
from ..batch.row_marks import Arguments
from ..batch.rows import count_rows
from ..batch.shards import take_rows
from ..loss.criterion import DataParallelCriterion
from ..loss.weighting import Weight
from .micro_batches import Batch, Model

__all__: list[str] = []


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
                f"step was given {nested.describe(samples)}, expected a list of samples, of which collate= makes batches: use "
                "DataLoader(..., collate_fn=list)"
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
    shard, dims = marked(inputs, nested.spread(targets), model, criterion)
    for name, node, dim in zip(("inputs", "targets"), shard, dims, strict=True):
        found = count_rows(node, dim, rows)
        if found is None or found % rows or (name == "inputs" and found != rows):  # targets may be flattened
            raise ValueError(
                f"collate was given {rows} samples and returned {name} with {found or 'no'} rows, expected one row for each "
                f"sample, {rows}"
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
