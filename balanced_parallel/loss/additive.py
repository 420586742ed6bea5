"""Losses that are functions of statistics, which add up over the rows: Dice, a correlation."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..batch import containers
from ..runtime.values import naming_arguments
from .copies import ShardLoss, call_spread
from .formula import Formula, Statistic, Value, shape_of


class AdditiveLoss(nn.Module):
    """A loss that is a function of statistics, which add up over the rows.

    ``loss(output, *targets)`` is ``finish(statistics(output, *targets))``, as in a plain program.
    In a :class:`DataParallelCriterion` each replica computes the statistics of its own rows. Only
    these are moved and summed, over replicas, ranks and micro-batches. ``finish`` is called once
    per process with the total, and its derivative is handed back. Subclasses may override the
    methods ``statistics`` and ``finish`` instead.

    Args:
        statistics: a function or a module, ``(output, *targets) -> statistics``. These are a
            tensor, or tensors and numbers in a tuple, a mapping or a dataclass: sums over the rows,
            never means.
        finish: a function or a module that computes the loss of a total in the same structure, a
            scalar.

    Raises:
        ValueError: the statistics of a shard are not the sum of those of its halves. Some batches
            are checked.

    Example:
        >>> def statistics(output, target):
        ...     return (output * target).sum(), output.square().sum(), target.square().sum()
        >>> def finish(total):
        ...     product, outputs, targets = total
        ...     return 1 - product / (outputs * targets).sqrt()
        >>> criterion = DataParallelCriterion(AdditiveLoss(statistics, finish))
        >>> outputs = PerReplica([torch.tensor([3.0]), torch.tensor([4.0])], [1, 1])
        >>> criterion(outputs, torch.tensor([4.0, 3.0]))  # one minus the cosine of (3, 4) and (4, 3)
        tensor(0.0400)
    """

    @naming_arguments
    def __init__(
        self,
        statistics: Callable[..., Any] | None = None,
        finish: Callable[[object], Tensor] | None = None,
    ) -> None:
        super().__init__()
        for name, function in (("statistics", statistics), ("finish", finish)):
            if not callable(function) and getattr(type(self), name) is getattr(AdditiveLoss, name):
                raise TypeError(
                    f"{name}={function!r}, expected a function, or a subclass with a method {name}"
                )
        self._statistics = statistics
        self._finish = finish

    def statistics(self, *arguments: Any, **kwargs: Any) -> Any:
        """Returns the statistics of some rows."""
        assert self._statistics is not None
        return self._statistics(*arguments, **kwargs)

    def finish(self, total: Any) -> Tensor:
        """Returns the loss of the sum of all statistics."""
        assert self._finish is not None
        return self._finish(total)

    def forward(self, *arguments: object, **kwargs: Any) -> Tensor:
        """Returns the loss of a whole batch."""
        return self.finish(self.statistics(*arguments, **kwargs))


class FormulaOfStatistics(Formula):
    """The function of the statistics of an :class:`AdditiveLoss`, which are the result."""

    def compute(self, sums: Sequence[Tensor], criterion: Any = None) -> Any:
        """Returns the loss of the sums of all statistics."""
        return criterion.finish(super().compute(sums, criterion))


def note_statistics(shard: ShardLoss) -> tuple[FormulaOfStatistics, list[Statistic]]:
    """Returns the function of the statistics of a shard, and these."""
    criterion: Any = shard.criterion
    result = call_spread(criterion.statistics, shard.output, shard.targets, shard.kwargs)
    statistics: list[Statistic] = []

    def note(leaf: Any) -> Value:
        if not isinstance(leaf, (int, float, Tensor)):
            raise TypeError(
                f"the statistics contain {containers.describe(leaf)}, expected tensors and numbers that add up over rows"
            )
        number = len(statistics)
        shape = shape_of(leaf) if isinstance(leaf, Tensor) else ""
        statistics.append(Statistic(f"number {number}{shape}", leaf, number))
        return Value(number)

    structure = containers.map_leaves(note, result)
    entries = dict(containers.leaves(structure))
    inputs = [each._replace(value=None) for each in statistics]
    return FormulaOfStatistics(structure, entries, [], inputs), statistics
