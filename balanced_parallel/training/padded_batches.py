"""Batches that are padded already. Each shard is cut to the longest of its rows."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..batch import nested
from ..batch.row_marks import Along
from ..batch.rows import count_rows
from ..loss.criterion import DataParallelCriterion
from .cost_batches import CostedRows, Shard, marked, rows_of
from .micro_batches import Batch, Model

__all__: list[str] = []

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
            raise TypeError(f"cost= returned {nested.describe(costs)}, expected one number for each row of the inputs")
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
            shorter = nested.map_leaves(lambda leaf: _shorten(leaf, next(of_leaves), length), whole)
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
    found: list[int | None] = []
    length: int | None = None
    for name, value in values:
        dim = trim.get(name) if isinstance(trim, Mapping) else trim
        for _, leaf in nested.leaves(value):
            tensor = leaf.leaf if type(leaf) is Along else leaf
            has_dim = dim is not None and isinstance(tensor, Tensor) and tensor.dim() > dim
            length = tensor.size(dim) if has_dim and length is None else length
            found.append(dim if has_dim and (isinstance(trim, Mapping) or tensor.size(dim) == length) else None)
    for row, cost in enumerate(costs):
        if cost != int(cost) or length is None or cost > length:
            raise ValueError(
                f"the cost of row {row} is {cost}, expected a number of entries, at most {length}: trim={trim!r} keeps so many"
            )
    return found
