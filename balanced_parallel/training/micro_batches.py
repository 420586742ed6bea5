"""Cuts an effective batch into the micro-batches of one process."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ..batch.dims import Dims
from ..batch.microbatches import as_arguments, count_micro_batches, cut_batch, detach_outputs
from ..batch.per_replica import PerReplica
from ..batch.row_marks import Arguments
from ..batch.rows import count_rows
from ..batch.splits import split_sizes
from ..loss.batch_losses import BatchLosses
from ..loss.criterion import DataParallelCriterion
from ..loss.weighting import LossSum
from ..runtime.precision import Precision
from .gradient_sync import GradientSync

__all__: list[str] = []


class Batch(NamedTuple):
    """Rows that the caller passes at once.

    Args:
        inputs: of the model.
        targets: of the criterion, behind the outputs.
        is_whole: an effective batch. Its last backward reduces all gradients.
        outputs: receives the detached outputs of its micro-batches; None keeps none.
        losses: of its micro-batches; None lets the criterion choose.
    """

    inputs: Any
    targets: tuple[Any, ...]
    is_whole: bool
    outputs: list[PerReplica] | None
    losses: BatchLosses | None = None


class MicroBatch(NamedTuple):
    """Rows of a batch that run in one forward.

    Args:
        arguments: of the model.
        targets: of the criterion, behind the outputs.
        followers: micro-batches of the same batch that follow.
        order: the rows of the batch, if they are not in its order.
    """

    arguments: Arguments
    targets: tuple[Any, ...]
    followers: int
    order: list[int] | None = None


class Model(Protocol):
    """A model that returns its outputs per replica."""

    devices: list[torch.device]
    dim: int
    module: nn.Module

    @property
    def out_dims(self) -> Dims:
        """The dimension of the rows in the outputs."""

    @property
    def split(self) -> tuple[float, ...] | None:
        """The weight of each device; None for equal parts."""

    def mark(self, arguments: Arguments) -> Arguments:
        """Returns the arguments with the dimensions of their rows."""

    def modules(self) -> Iterator[nn.Module]:
        """Yields all modules."""

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module. Returns a :class:`PerReplica`."""


def cut_micro_batches(
    model: Model,
    criterion: DataParallelCriterion,
    sync: GradientSync,
    batch: Batch,
    micro_batch_size: int | None,
) -> list[MicroBatch]:
    """Returns the micro-batches of a batch.

    A batch without rows has no micro-batches, unless other ranks wait in a layer for every rank. Inputs that have no rows, such
    as settings alone, are one.
    """
    arguments = model.mark(as_arguments(batch.inputs))
    marked, target_dim = criterion.mark(batch.targets, {}, model.out_dims)
    rows = count_rows(arguments, model.dim)
    if rows is None:
        return [MicroBatch(arguments, marked.inputs, 0)]
    count = sync.count_micro_batches(count_micro_batches(rows, micro_batch_size, model.split or len(model.devices)))
    parts = cut_batch(arguments, marked.inputs, split_sizes(rows, count), (model.dim, target_dim))
    return [MicroBatch(*part, followers) for part, followers in zip(parts, reversed(range(len(parts))), strict=True)]


def run_forward(
    model: Model, precision: Precision, micro_batch: MicroBatch, losses: BatchLosses, kept: list[PerReplica] | None
) -> list[LossSum]:
    """Runs the model and the criterion. Returns a loss per replica.

    Args:
        kept: receives the detached outputs.
    """
    with precision.autocast(model.devices):
        outputs = model(*micro_batch.arguments.inputs, **micro_batch.arguments.kwargs)
        if kept is not None:
            kept.append(detach_outputs(outputs, micro_batch.order))
        return losses.compute(outputs, *micro_batch.targets)


def most_rows(model: Model, inputs: Any, micro_batch_size: int | None) -> int:
    """Returns the rows of a device in the largest micro-batch; 0 without rows."""
    rows = count_rows(model.mark(as_arguments(inputs)), model.dim) or 0
    shares = model.split or len(model.devices)
    count = count_micro_batches(rows, micro_batch_size, shares)
    return max(split_sizes(-(-rows // count), shares)) if count else 0
