"""Losses that are functions of sums over rows: Dice, Pearson's correlation. Only statistics are moved and summed."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batch import nested
from ..batch.per_replica import PerReplica
from ..runtime.collectives import gather_objects, sum_over_ranks, world_size
from ..runtime.devices import move
from ..runtime.tensors import is_differentiable
from .coupled import CoupledLoss
from .partial_sums import Shard, call_spread
from .weighting import replace_value, weighted_sum, widen

__all__: list[str] = []


class Statistics(NamedTuple):
    """The statistics of one replica's rows.

    Args:
        tensors: in the order of the leaves of ``structure``; None without rows.
        structure: the containers around them.
        nothing: a zero on the device of the output, connected to it.
    """

    tensors: list[Tensor] | None
    structure: Any
    nothing: Tensor


class LossOfSums(CoupledLoss):
    """The loss of the statistics of an update, of an :class:`AdditiveLoss`. A shard without rows adds nothing."""

    def __init__(self, criterion: Any, home: torch.device) -> None:
        super().__init__(criterion, home)
        self._total: list[Tensor] = []
        self._structure: Any = None
        self._derivatives_on: dict[torch.device, list[Tensor | None]] = {}

    def value(self, outputs: Sequence[Any], targets: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Returns the loss of a batch. Statistics of all ranks are summed."""
        parts = self._parts(outputs, targets, kwargs)
        self._add(parts)
        total, ranks = self._over_ranks(parts[0].nothing)
        if not ranks:
            raise ValueError("the batch has no rows, expected one at least: there are no statistics")
        return self._finish(total)

    def differentiate(self, scaler: torch.amp.GradScaler | None) -> None:
        """Computes the loss of the total of all ranks, and its derivative at the total."""
        has_rows = bool(self._total)
        total, ranks = self._over_ranks(None)
        if not has_rows:
            return
        at = [tensor.requires_grad_() for tensor in total if is_differentiable(tensor)]
        with torch.enable_grad():
            loss = self._finish(total)
        found = iter(self._derivatives(loss, at, ranks, scaler))
        derivatives = [next(found) if is_differentiable(tensor) else None for tensor in total]
        self._derivatives_on = {total[0].device: derivatives}

    def _parts(self, outputs: Any, targets: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Statistics]:
        parts: list[Statistics] = self.criterion.run_shards(_statistics_of, outputs, targets, kwargs)
        if not self.criterion.is_checked:
            with torch.no_grad():
                self._check(parts[0], outputs, targets, kwargs)
        return parts

    def _collect(self, parts: list[Statistics]) -> None:
        with torch.no_grad():
            self._add(parts)

    def _add(self, parts: list[Statistics]) -> None:
        for part in parts:
            if part.tensors is None:
                continue
            shapes, others = ([tuple(one.shape) for one in tensors] for tensors in (self._total or part.tensors, part.tensors))
            if shapes != others:
                raise ValueError(f"the statistics have shapes {shapes} and {others}, expected equal shapes for all rows")
            if not self._total:
                self._structure, self._total = part.structure, [widen(tensor) for tensor in part.tensors]
                continue
            pairs = zip(self._total, part.tensors, strict=True)
            self._total = [total + move(widen(tensor), total.device) for total, tensor in pairs]

    def _take(self, part: Statistics) -> list[tuple[Tensor, Tensor | None]]:
        if part.tensors is None:
            return [(part.nothing, None)]
        known, device = self._derivatives_on, part.nothing.device
        if device not in known:
            known[device] = [None if one is None else move(one, device) for one in next(iter(known.values()))]
        return list(zip(part.tensors, known[device], strict=True))

    def _over_ranks(self, nothing: Tensor | None) -> tuple[list[Tensor], list[int]]:
        """Returns the total of all ranks, and the ranks that have rows. Every rank calls this.

        Args:
            nothing: a zero that is connected to the outputs, for a total with a graph.
        """
        local = self._total
        layouts = gather_objects((self._structure, [(one.shape, one.dtype) for one in local]) if local else None)
        known = {number: layout for number, layout in enumerate(layouts) if layout is not None}
        different = {str([tuple(shape) for shape, _ in shapes]) for _, shapes in known.values()}
        if len(different) > 1:
            raise ValueError(f"the statistics of the ranks have shapes {' and '.join(sorted(different))}, expected equal shapes")
        if world_size() == 1 or not known:
            return local, [*known]
        self._structure, shapes = next(iter(known.values()))
        device = nothing.device if nothing is not None else self.home
        local = local or [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        whole = [sum_over_ranks(one) for one in local]
        if nothing is None:
            return whole, [*known]
        # Every rank computes the whole loss, and DistributedDataParallel averages their gradients.
        ours = [one * world_size() + nothing if is_differentiable(one) else one for one in local]
        return [replace_value(one, total) for one, total in zip(ours, whole, strict=True)], [*known]

    def _finish(self, total: list[Tensor]) -> Tensor:
        tensors, device = iter(total), total[0].device
        criterion: Any = self.criterion.module
        finish = functools.partial(criterion.finish, nested.map_leaves(lambda _: next(tensors), self._structure))
        with self.criterion.precision.autocast([device]):
            (loss,) = self.criterion.replicas.workers([finish], [device], together=False)
        return move(weighted_sum(loss, 1), self.criterion.output_device or device)

    def _check(self, part: Statistics, outputs: Any, targets: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises ``ValueError`` if the statistics of the first shard are not the sum of those of its halves."""
        shards = self.criterion.shards(outputs, targets, kwargs)
        first, rows = shards.outputs[:1], shards.outputs.sizes[0]
        if part.tensors is None or rows is None or rows < 2:
            return
        self.criterion.is_checked = True
        pieces = first.narrow(0, rows // 2), first.narrow(rows // 2, rows - rows // 2)
        halves = PerReplica([piece[0] for piece in pieces], [piece.sizes[0] for piece in pieces], first.dim)
        parts = self.criterion.run_shards(_statistics_of, halves, *shards.batches[0])
        if None in (one.tensors for one in parts):
            return
        for place, (whole, one, other) in enumerate(zip(part.tensors, *(part.tensors for part in parts), strict=True)):
            if whole.shape == one.shape == other.shape and _adds_up(*(widen(tensor) for tensor in (whole, one, other))):
                continue
            raise ValueError(
                f"statistics do not add up: number {place} of {rows} rows is {_shown(whole)}, but of their halves {_shown(one)} "
                f"and {_shown(other)}; expected sums over the rows, so return .sum() in place of .mean()"
            )


class _Place(nested.Leaf):
    """Stands for a tensor in a structure."""


def _statistics_of(shard: Shard) -> Statistics:
    nothing = shard.nothing()
    if not shard.rows:
        return Statistics(None, None, nothing)
    criterion: Any = shard.criterion
    found = call_spread(criterion.statistics, shard.output, shard.targets, shard.kwargs)
    tensors = [_as_tensor(leaf, nothing.device) for _, leaf in nested.leaves(found)]
    return Statistics(tensors, nested.map_leaves(lambda _: _Place(), found), nothing)


def _as_tensor(leaf: Any, device: torch.device) -> Tensor:
    if isinstance(leaf, (int, float)):
        return torch.full((), leaf, dtype=torch.int64 if isinstance(leaf, int) else torch.float64, device=device)
    if not isinstance(leaf, Tensor):
        raise TypeError(f"the statistics contain {nested.describe(leaf)}, expected tensors and numbers that add up over the rows")
    return leaf


def _adds_up(whole: Tensor, one: Tensor, other: Tensor) -> bool:
    difference, size = (whole - one - other).abs().max(), torch.stack([whole, one, other]).abs().max()
    return not bool(difference > 5e-2 * size)  # a mean is off by its own size; nan is the caller's


def _shown(tensor: Tensor) -> str:
    return f"{float(tensor):.6g}" if tensor.numel() == 1 else f"a tensor of shape {tuple(tensor.shape)}"
