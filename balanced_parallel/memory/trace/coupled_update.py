"""Updates with a loss whose rows depend on each other, as :class:`TrainStep` runs them: in two passes, or in one."""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...batch.nested import leaves, map_leaves
from ...batch.per_replica import PerReplica
from ...batch.row_marks import Along, Arguments
from ...batch.rows import count_rows
from ...batch.splits import split_sizes
from ...loss.additive import AdditiveLoss
from ...loss.coupled import CoupledLoss
from ...loss.coupling import couple
from ...loss.criterion import DataParallelCriterion
from ...loss.weighting import LossSum, add_up
from ...loss.whole_loss import WholeLoss
from ...replicas.replicas import Replicas
from ...runtime.collectives import world_size
from ...runtime.precision import Precision
from ..errors import UnknownMemory
from .fake_devices import HOME
from .traced_replicas import TracedCriterion, make_replicas

if TYPE_CHECKING:
    from .traced_request import Request

__all__: list[str] = []

MicroBatch = tuple[Arguments, tuple[Any, ...]]


def plain_criterion(criterion: Any) -> Any:
    """Returns the criterion in a :class:`DataParallelCriterion`, or the criterion itself, also if its rows are coupled."""
    return criterion.module if isinstance(criterion, DataParallelCriterion) and not criterion.is_coupled else criterion


def is_coupled(criterion: Any) -> bool:
    """Returns True for a criterion with ``whole=True``, and for an :class:`AdditiveLoss`."""
    return criterion.is_coupled if isinstance(criterion, DataParallelCriterion) else isinstance(criterion, AdditiveLoss)


def make_criterion(criterion: Any, replicas: Replicas, *, dim: int, precision: str) -> DataParallelCriterion:
    """Returns a criterion on fake devices. ``whole=`` is that of a :class:`DataParallelCriterion` that the caller has given."""
    whole = is_coupled(criterion) and isinstance(criterion, DataParallelCriterion)
    inner = criterion.module if whole else criterion
    return TracedCriterion(inner, replicas, dim=dim, precision=precision, whole=whole and criterion.whole)


class CoupledUpdates(abc.ABC):
    """The part of a layout that runs the forwards of an update in the order that its loss needs."""

    request: "Request"
    module: nn.Module
    criterion: Any

    @abc.abstractmethod
    def loss(self, arguments: Arguments, targets: tuple[Any, ...]) -> Tensor:
        """Runs the forward of one micro-batch."""

    def losses(self, micro_batches: Sequence[MicroBatch]) -> list[Callable[[], Tensor]]:
        """Begins an update. Returns a function for the loss of each micro-batch."""
        if not is_coupled(self.criterion):
            return [functools.partial(self.loss, *micro_batch) for micro_batch in micro_batches]
        request = self.request
        if world_size() > 1:
            raise UnknownMemory("the memory of a loss whose rows depend on each other is not known with shards: use layout='ddp'")
        with Precision(request.precision).autocast([HOME]):
            criterion, single = self.coupled_criterion(), request.micro_batches == 1
            return coupled_losses(criterion, self.outputs, micro_batches, request.rows_of_update, single)

    def coupled_criterion(self) -> DataParallelCriterion:
        """Returns the criterion on fake devices."""
        replicas = make_replicas(have_streams=False)
        return make_criterion(self.criterion, replicas, dim=self.request.dim, precision=self.request.precision)

    def outputs(self, arguments: Arguments) -> PerReplica:
        """Runs the forward of one micro-batch. Returns an output per replica."""
        with Precision(self.request.precision).autocast([HOME]):
            output = self.module(*arguments.inputs, **arguments.kwargs)
        return PerReplica([output], [count_rows(arguments, self.request.dim)], self.request.dim)


def coupled_losses(
    criterion: DataParallelCriterion,
    forward: Callable[[Arguments], Any],
    micro_batches: Sequence[MicroBatch],
    rows: int,
    single: bool,
) -> list[Callable[[], Tensor]]:
    """Runs the first pass, and returns a function for each micro-batch that computes its loss in the second pass.

    Args:
        criterion: on fake devices.
        forward: returns the outputs of the replicas.
        micro_batches: those that are traced.
        rows: of the whole update. Outputs of further rows are allocated without a forward.
        single: there is one micro-batch in an update, so one pass.
    """
    criterion.is_checked = True  # fake tensors have no values
    loss = couple(criterion, HOME)
    if single:
        return [functools.partial(_at_once, loss, forward, rows, *micro_batch) for micro_batch in micro_batches]
    with torch.no_grad():
        for arguments, targets in micro_batches:
            loss.collect(forward(arguments), *targets)
        _fill(loss, rows)
    loss.differentiate(None)
    return [functools.partial(_hand_back, loss, forward, *micro_batch) for micro_batch in micro_batches]


def _at_once(
    loss: CoupledLoss, forward: Callable[[Arguments], Any], rows: int, arguments: Arguments, targets: tuple[Any, ...]
) -> Tensor:
    parts = loss.collect_parts(forward(arguments), *targets)
    _fill(loss, rows)
    loss.differentiate(None)
    return _sum(loss.hand_back_parts(parts))


def _hand_back(loss: CoupledLoss, forward: Callable[[Arguments], Any], arguments: Arguments, targets: tuple[Any, ...]) -> Tensor:
    return _sum(loss.hand_back(forward(arguments), *targets))


def _sum(losses: list[LossSum]) -> Tensor:
    return add_up([one.total for one in losses], HOME)


def _fill(loss: CoupledLoss, rows: int) -> None:
    """Collects outputs and targets of further rows, on the devices of the last ones."""
    if not isinstance(loss, WholeLoss):
        return
    missing = max(rows - sum(map(_rows, loss.pieces)), 0)
    last = list({_device(piece): piece for piece in loss.pieces}.values())
    for piece, count in zip(last, split_sizes(missing, len(last)), strict=True):
        loss.pieces.append(map_leaves(functools.partial(_more, count, loss.dim, _rows(piece)), piece))


def _rows(piece: Arguments) -> int:
    first = next(leaf for _, leaf in leaves(piece) if isinstance(leaf, Along))
    return int(first.leaf.size(first.dim))


def _device(piece: Arguments) -> torch.device:
    first = next(leaf for _, leaf in leaves(piece) if isinstance(leaf, Along))
    place: torch.device = first.leaf.device
    return place


def _more(count: int, dim: int, rows: int, leaf: Any) -> Any:
    """Returns a leaf like another one of ``rows`` rows, with ``count`` rows."""
    if isinstance(leaf, Along) and isinstance(leaf.leaf, Tensor):
        return Along(_more(count, leaf.dim, rows, leaf.leaf), leaf.dim)
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return leaf
    shape = list(leaf.shape)
    shape[dim] = shape[dim] * count // max(rows, 1)
    return leaf.new_empty(shape)
