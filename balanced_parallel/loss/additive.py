"""Losses that are functions of statistics, which add up over the rows: Dice, a correlation."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import containers
from ..runtime.collectives import SumOverRanks, world_size
from ..runtime.devices import move
from ..runtime.torch_private import is_differentiable
from ..runtime.values import naming_arguments
from .comparison import ComparisonOfSums, ShardStatistics, Sums
from .copies import Calls, CriterionCopies, ShardLoss, call_spread
from .coupled import CoupledLoss
from .sums import add_up, weighted_sum, widen


def statistics_of(shard: ShardLoss) -> ShardStatistics:
    """Returns the statistics of a replica. It runs in the thread of the replica."""
    nothing = shard.nothing()
    if not shard.rows:
        return ShardStatistics({}, None, nothing)
    criterion: Any = shard.criterion
    result = call_spread(criterion.statistics, shard.output, shard.targets, shard.kwargs)
    tensors = {place: _as_tensor(leaf, nothing.device) for place, leaf in containers.leaves(result)}
    return ShardStatistics(
        tensors, containers.map_leaves(lambda _: containers.Leaf(), result), nothing
    )


class LossOfSums(CoupledLoss):
    """The loss of the statistics of an update, of an :class:`AdditiveLoss`.

    A shard without rows adds nothing.
    """

    def __init__(
        self, copies: CriterionCopies, home: torch.device, *, is_split: bool = True
    ) -> None:
        super().__init__(copies, home, is_split=is_split)
        self.comparison = self._comparison()
        self._total: Sums = {}
        self._structure: Any = None
        self._slopes: dict[Any, Tensor | None] = {}

    def _comparison(self) -> ComparisonOfSums:
        return ComparisonOfSums(self.copies, self.home, statistics_of)

    def value(self, calls: Calls) -> Any:
        """Returns the loss of a batch. Every rank has the statistics of all ranks."""
        parts = self._parts(calls)
        self._add(parts, calls)
        return self.finish(parts[0].nothing)

    def finish(self, nothing: Tensor) -> Any:
        """Returns the loss of all statistics. An evaluation has those of several batches."""
        if not self._sum_over_ranks(nothing):
            raise ValueError(
                "the batch has no rows, expected one at least: there are no statistics"
            )
        self.comparison.compare(nothing.device)
        return self._finish()

    def differentiate(self, scaler: torch.amp.GradScaler | None) -> None:
        """Computes the loss of all statistics, and its derivative at each of them."""
        has_rows = bool(self._total)
        ranks = self._sum_over_ranks(torch.zeros((), device=self.home))
        self.is_shared = True
        self.comparison.compare(self.home)
        if has_rows:
            totals = self._total.items()
            learning = {place: total for place, total in totals if self._learns(place)}
            slopes = self._derivatives(self._finish, [*learning.values()], ranks, scaler)
            self._slopes = dict(zip(learning, slopes, strict=True))

    def _learns(self, place: Any) -> bool:
        """Returns True for a statistic of a loss, not of a value to log alone."""
        return True

    def _statistics(self, shard: ShardLoss) -> ShardStatistics:
        return statistics_of(shard)

    def _parts(self, calls: Calls) -> list[ShardStatistics]:
        return calls.run(self._statistics)

    def collect(self, calls: Calls) -> list[Any]:
        """Adds the statistics of a micro-batch in the first pass."""
        parts = self._parts(calls)
        detached = [
            part._replace(tensors=containers.map_tensors(Tensor.detach, part.tensors))
            for part in parts
        ]
        self._add(detached, calls)
        return parts

    def _add(self, parts: list[ShardStatistics], calls: Calls) -> None:
        if self.is_split:
            self.comparison.take([part.tensors for part in parts], calls)
        for part in parts:
            if part.tensors:
                self.comparison.check_names([self._total or part.tensors, part.tensors])
                if self._structure is None:  # The first replica has the parameters themselves.
                    self._structure = part.structure
            for place, tensor in part.tensors.items():
                total = self._total.get(place)
                self._total[place] = (
                    widen(tensor) if total is None else total + move(widen(tensor), total.device)
                )

    def _take(self, part: ShardStatistics) -> list[tuple[Tensor, Tensor | None]]:
        slopes = [(tensor, self._slopes.get(place)) for place, tensor in part.tensors.items()] or [
            (part.nothing, None)
        ]
        return [
            (tensor, slope if slope is None else move(slope, part.nothing.device))
            for tensor, slope in slopes
        ]

    def _sum_over_ranks(self, nothing: Tensor) -> list[int]:
        """Sums the statistics of all ranks, with the graph of ``nothing``.

        Returns the ranks with rows.

        Every rank calls this.
        """
        local = self._total
        layout = (
            self._structure,
            {place: tensor.detach().to("meta") for place, tensor in local.items()},
        )
        layouts = enumerate(self.comparison.gather(layout if local else None))
        by_rank = {number: layout for number, layout in layouts if layout is not None}
        self.comparison.check_names([tensors for _, tensors in by_rank.values()])
        if world_size() == 1 or not by_rank:
            return [*by_rank]
        self._structure, tensors = next(iter(by_rank.values()))
        local = local or {
            place: torch.zeros_like(tensor, device=nothing.device)
            for place, tensor in tensors.items()
        }
        for place, tensor in local.items():
            # Every rank computes the whole loss, and the backward sums its gradients over the
            # ranks, which DistributedDataParallel averages.
            learns = is_differentiable(tensor) and self._learns(place)
            ours = tensor + nothing if learns else tensor
            self._total[place] = SumOverRanks.apply(ours, None)
        return [*by_rank]

    def _finish(self) -> Any:
        """Returns the loss of the statistics of all rows."""
        tensors = iter(self._total.values())
        device = next(iter(self._total.values())).device
        statistics = containers.map_leaves(lambda _: next(tensors), self._structure)
        loss = self.copies.run_once(operator.methodcaller("finish", statistics), device)
        return move(weighted_sum(loss, 1), self.copies.output_device or device)


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


def _as_tensor(leaf: Any, device: torch.device) -> Tensor:
    if isinstance(leaf, (int, float)):
        return add_up([leaf], device)
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"the statistics contain {containers.describe(leaf)}, expected tensors and numbers that add up over rows"
        )
    return leaf
