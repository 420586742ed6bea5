"""``AdditiveLoss``: a loss that is a function of sums over the rows, such as Dice, Pearson's correlation or Barlow Twins."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__: list[str] = []


class AdditiveLoss(nn.Module):
    """A loss that is a function of statistics, which add up over the rows.

    ``loss(output, *targets)`` is ``finish(statistics(output, *targets))``, as in a plain program. In a
    :class:`DataParallelCriterion` each replica computes the statistics of its own rows. Only statistics are moved and summed,
    over replicas, ranks and micro-batches. ``finish`` is called once per process with the total, and its derivative is handed
    back. So the loss is exact, and no device stores the outputs of others.

    Subclasses may override the methods ``statistics`` and ``finish`` instead.

    Args:
        statistics: a function or a module, ``(output, *targets) -> statistics``. These are a tensor, or tensors and numbers in a
            tuple, a mapping or a dataclass: sums over the rows, never means.
        finish: a function or a module that computes the loss of a total in the same structure, a scalar.

    Raises:
        TypeError: ``statistics`` or ``finish`` is not a function, and no method of a subclass either.
        ValueError: the statistics of a shard are not the sum of those of its halves. The first batch is checked.

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

    def __init__(self, statistics: Callable[..., Any] | None = None, finish: Callable[[Any], Tensor] | None = None) -> None:
        super().__init__()
        for name, function in (("statistics", statistics), ("finish", finish)):
            if not callable(function) and getattr(type(self), name) is getattr(AdditiveLoss, name):
                raise TypeError(f"{name}={function!r}, expected a function, or a subclass with a method {name}")
        self._statistics, self._finish = statistics, finish

    def statistics(self, *arguments: Any, **kwargs: Any) -> Any:
        """Returns the statistics of some rows."""
        assert self._statistics is not None
        return self._statistics(*arguments, **kwargs)

    def finish(self, total: Any) -> Tensor:
        """Returns the loss of the sum of all statistics."""
        assert self._finish is not None
        return self._finish(total)

    def forward(self, *arguments: Any, **kwargs: Any) -> Tensor:
        """Returns the loss of a whole batch."""
        return self.finish(self.statistics(*arguments, **kwargs))
