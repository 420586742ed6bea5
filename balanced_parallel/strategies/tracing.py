"""The names of the engine that the tracer of ``memory/`` needs, and what they promise to it.

A trace runs an update on fake tensors, which have shapes and no values, and counts allocations. The
engine promises it:

- A :class:`TracedModel`, a :class:`TracedCriterion`, :class:`BalancedOptimizer` and :func:`shard`
  read no value of a tensor. They work on any devices, with the operators of a real update.
- Everything runs in the calling thread: replicas one after the other, in the order of the devices.
- In one update, a block of ``window(model, criterion, in_step=True)`` surrounds the forwards, the
  losses, the backwards and the steps of the optimizers. Copies of parameters are made in the first
  forward, and live on. Under ``deferred=True`` gradients stay with the replicas, and the backward
  of a forward after that block sums them. Sums beside a backward run in
  ``SideStreams.entered``.
- Two passes of a loss of all rows: ``kind.loss(...)``, ``collect`` for each micro-batch without a
  graph, ``differentiate`` once, ``hand_back`` for each micro-batch. One pass: ``collect``,
  ``differentiate`` and ``hand_back_parts``.

The other names are the rules of the engine that a trace follows where it imitates a rank:
:func:`assign_owners` (the rank with the most state), :func:`is_elementwise` (optimizers that need
whole parameters), :func:`refuse_closures` (one loss per update), :func:`plain_loss` (the loss of a
plain program), :func:`check_module` (what can be trained).
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from ..batch.containers import leaves, map_leaves
from ..batch.marks import Along, Arguments, map_marked
from ..batch.plan import split_sizes
from ..batch.rows import Batch, Shard, as_arguments, count_rows, move_leaves, spread, take
from ..loss.coupled import CoupledLoss, WholeLoss
from ..loss.criterion import DataParallelCriterion
from ..loss.entries import plain_loss
from ..optim.balanced import assign_owners, is_elementwise, refuse_closures
from ..replicas.buckets import make_buckets
from ..replicas.model import DataParallelModel
from ..replicas.module_tree import check_module
from ..replicas.owners import BucketOwners
from ..replicas.replicas import Replicas, window
from ..replicas.workers import run_in_turn
from ..runtime.streams import SideStreams
from ..runtime.values import PrecisionName
from .fsdp import shard

__all__ = [
    "Shard",
    "SideStreams",
    "assign_owners",
    "check_module",
    "is_elementwise",
    "move_leaves",
    "plain_loss",
    "refuse_closures",
    "shard",
    "window",
]

T = TypeVar("T")


class TracedBatch(Batch):
    """The rows of an update, of which a trace asks for other numbers."""

    @classmethod
    def of(cls, inputs: object, targets: object, *dims: int) -> Self:
        """Takes inputs and targets as a step does, with the dimensions of their rows."""
        return cls(as_arguments(inputs), Arguments(spread(targets), {}), (dims[0], dims[-1]))

    def map(self, function: Callable[[object], object]) -> Self:
        """Returns a batch with ``function`` applied to each leaf. Marks stay."""
        return type(self)(*map_marked(function, (self.inputs, self.targets)), self.dims)

    def resized(self, rows: int, repeats: Callable[[Tensor, float], bool]) -> Self:
        """Returns a batch of ``rows`` rows, with its tensors on the meta device.

        Lists repeat their rows, and so do tensors for which ``repeats(tensor, times)`` is true.
        """

        def resize(leaf: object, dim: int) -> object:
            if type(leaf) is Along:
                return Along(resize(leaf.leaf, leaf.dim), leaf.dim)
            if not (present := count_rows(leaf, dim)):
                return leaf
            count = present * rows // (self.rows or 1)
            if not isinstance(leaf, Tensor) or repeats(leaf, count / present):
                return take(leaf, [place % present for place in range(count)], dim)
            shape = [*leaf.shape]
            shape[dim] = count
            return torch.empty(
                shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad
            )

        inputs = map_leaves(partial(resize, dim=self.dims[0]), self.inputs)
        targets = map_leaves(partial(resize, dim=self.dims[1]), self.targets)
        return type(self)(inputs, targets, self.dims)


def _run_here(
    work: Sequence[Callable[[], T]],
    devices: Sequence[torch.device],
    *,
    together: bool = True,
) -> list[T]:
    """Runs replicas one after the other: a fake mode belongs to one thread.

    In an exchange, each receives its own values.
    """
    return run_in_turn(work, devices, lambda index, value: [value] * len(work))


class TracedModel(DataParallelModel):
    """A :class:`DataParallelModel` that takes devices as they are, and leaves the module there.

    Its ``settings`` are those of replicas.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: list[torch.device],
        split: Sequence[float] | None,
        dim: int,
        precision: PrecisionName,
        **settings: Any,
    ) -> None:
        nn.Module.__init__(self)
        self._set_up(devices, split, Replicas(workers=_run_here, **settings), dim, precision)
        self.module = module


class TracedCriterion(DataParallelCriterion):
    """A criterion with the settings of another one, for outputs on any devices.

    A divisor that only a run tells takes as much memory as the number of rows. No values are
    compared. Other settings are those of replicas.
    """

    def __init__(
        self, like: DataParallelCriterion, dim: int, precision: PrecisionName, **of_replicas: Any
    ) -> None:
        settings = {**like.arguments, "device_ids": None, "output_device": None, "dim": dim}
        if not like.kind.knows_divisor:
            settings["weight"] = "rows"
        if like.precision.name == "fp32":
            settings["precision"] = precision
        super().__init__(like.module, **settings)
        self.replicas = Replicas(workers=_run_here, **of_replicas)
        self.copies = dataclasses.replace(self.copies, replicas=self.replicas, halves=None)


def fill(loss: CoupledLoss, rows: int) -> None:
    """Collects outputs and targets of further rows, on the devices of the last ones, without a
    forward.
    """
    if not isinstance(loss, WholeLoss):
        return  # Statistics of all rows take no more memory than those of some.
    last: dict[torch.device, tuple[Arguments, int]] = {}
    for piece in loss.pieces:
        along = next(leaf for _, leaf in leaves(piece) if isinstance(leaf, Along))
        size = along.leaf.size(along.dim)
        last[along.leaf.device] = piece, size
        rows -= size

    def resize(leaf: object, share: float) -> object:
        if not (isinstance(leaf, Along) and isinstance(leaf.leaf, Tensor)):
            return leaf
        shape = [*leaf.leaf.shape]
        shape[leaf.dim] = round(shape[leaf.dim] * share)
        return Along(leaf.leaf.new_empty(shape), leaf.dim)

    counts = split_sizes(max(rows, 0), len(last))
    for (piece, size), count in zip(last.values(), counts, strict=True):
        loss.pieces.append(map_leaves(partial(resize, share=count / max(size, 1)), piece))


def pieces_of(
    parameters: Sequence[nn.Parameter],
    devices: Sequence[torch.device],
    bucket_bytes: int | None = None,
) -> Iterator[tuple[tuple[Hashable, ...], Tensor]]:
    """Yields a parameter for each of its pieces, with the facts that tell pieces apart."""
    for bucket in make_buckets(parameters, bucket_bytes):
        values: Any = [dict.fromkeys(devices, parameter) for parameter in bucket.parameters]
        for piece in BucketOwners(bucket.parameters, values).pieces:
            yield (piece.index == 0, piece.owner, piece.values.numel()), piece.parameter()
