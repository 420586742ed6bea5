"""``DataParallelCriterion``: losses computed on the devices of the outputs, and the exact mean over
the whole batch.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..batch import containers
from ..batch.containers import Dims, check_dim, is_first
from ..batch.marks import Arguments
from ..batch.outputs import PerReplica
from ..batch.rows import count_rows
from ..replicas.batchnorm import meets_others
from ..replicas.replicas import Replicas
from ..runtime.collectives import enter, explain_unwatched, mark_loss, refuse_unshared, world_size
from ..runtime.devices import DeviceLike, resolve_device, resolve_devices
from ..runtime.module_state import refuse_setting
from ..runtime.values import Precision, PrecisionName, check_type, naming_arguments
from .checks import Checks
from .copies import (
    Calls,
    Criterion,
    CriterionCopies,
    OwnCollectives,
    ShardLoss,
    shards_of_targets,
)
from .kinds import Divisor, Kind, call_weight, kind_of
from .rules import find_torch_loss
from .sums import flat_weights, is_structure


class DataParallelCriterion(nn.Module):
    """Computes a criterion on each replica's output, on its device, and returns the loss of the
    whole batch as one scalar.

    The result equals ``criterion(gather(outputs), *targets)`` on one device for every split. Each
    replica computes the sum of its losses and their weight (:func:`loss_weight`). Both are summed
    over replicas and ranks, and divided once. A criterion that is a sum is not divided. With
    ``reduction="none"`` the result is a :class:`PerReplica` of the replicas' losses. If a criterion
    returns several means (a tuple, a mapping, a dataclass), so does the result, and each of them is
    exact.

    In ``criterion(outputs, *targets, **kwargs)``, targets and keyword arguments are split by rows
    as the model's inputs were. A tuple as a replica's output fills the leading arguments of the
    criterion. Any other output is one argument.

    Args:
        criterion: a module or a function. Parameters and buffers of a module are copied to each
            device, and its parameters get gradients. The tensors of a ``functools.partial`` are
            moved to each device, those of a closure are not.
        device_ids: the devices that outputs may be on; ``None`` allows all.
        output_device: device of the loss; ``None`` is the device of the first output.
        dim: the dimension of the rows in the targets. ``None`` is 0, and an error if the rows of
            the outputs are in another.
        weight: the divisor of the criterion's mean, if :func:`loss_weight` does not know it:
            ``"rows"``, or a function ``(output, *targets) -> scalar`` that also gets the keyword
            arguments that it accepts. It is called with the targets where they are, and on the
            outputs' devices only if that fails. For several means with different divisors it
            returns a divisor for each, in the same structure. Or a mapping or sequence of functions
            ``(*targets) -> scalar``, one for each mean: :class:`TrainStep` counts targets before
            the first micro-batch. A criterion that is a function of sums and means over the rows
            needs none, nor does a loss that the model has computed, if the criterion gets nothing
            but the output: ``lambda output: output.loss``.
        precision: autocast inside every replica, as in :class:`DataParallelModel`.
        reduction: ``"sum"``, ``"mean"`` or ``"none"``, for a criterion that is not a loss of torch.
        minimum: lower bound of the divisor, for a criterion that divides by ``max(count,
            minimum)``. ``weight`` is the count. For several means, one number for each in the
            structure of the weights. A single one bounds the divisors that are whole numbers, as
            counts are.
        whole: gathers all outputs and targets, of all ranks too, and computes the loss once per
            process, on ``output_device``. For losses whose rows depend on each other, such as
            contrastive ones.
        sums_rows: the criterion is a function that calls a :class:`SumOverRows`. Those of a module
            are found.

    Raises:
        TypeError: outputs are not a list with one entry per replica; the rows of a loss depend on
            each other.
        ValueError: targets and outputs have different numbers of rows; a loss is not a scalar, or
            it is split over several shards and is neither a function of sums and means over the
            rows nor described by ``weight`` or ``reduction``.
        BaseException: the first failure of a replica. A note on it names the replica and its
            device.

    Example:
        >>> criterion = DataParallelCriterion(torch.nn.CrossEntropyLoss())
        >>> outputs = PerReplica([torch.zeros(3, 10), torch.zeros(2, 10)], [3, 2])
        >>> criterion(outputs, torch.tensor([1, 2, 3, -100, -100]))
        tensor(2.3026)
    """

    @naming_arguments
    def __init__(
        self,
        criterion: Criterion,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int | None = None,
        *,
        weight: Divisor | None = None,
        precision: PrecisionName | Precision | None = None,
        reduction: str | None = None,
        minimum: Any = 0.0,
        whole: bool = False,
        sums_rows: bool = False,
    ) -> None:
        if isinstance(criterion, (DataParallelCriterion, nn.DataParallel)):
            raise TypeError(
                f"the criterion is a {type(criterion).__name__} already, expected a plain one: pass its .module"
            )
        kind = kind_of(criterion, weight, reduction, whole, minimum)
        super().__init__()
        self.arguments = {
            "device_ids": device_ids,
            "output_device": output_device,
            "dim": dim,
            "weight": weight,
            "precision": precision,
            "reduction": reduction,
            "minimum": minimum,
            "whole": whole,
            "sums_rows": sums_rows,
        }
        check_dim(dim)
        check_type("sums_rows", sums_rows, bool, "True or False")
        self.kind = kind
        self._reduction = getattr(criterion, "reduction", None)
        self.weight = weight
        self.minimum = minimum
        self.whole = whole
        self.dim = dim
        self.devices = None if device_ids is None else resolve_devices(device_ids)
        self.output_device = None if output_device is None else resolve_device(output_device)
        self.precision = Precision("fp32" if precision is None else precision)
        self.replicas = Replicas()
        is_averaged = kind.reduction == "mean" and not is_structure(weight)
        collectives = OwnCollectives(
            is_possible=find_torch_loss(criterion) is None,
            is_mean=is_averaged,
            sums_rows=sums_rows or meets_others(criterion),
        )
        halves = None if collectives.sums_rows else Checks()
        settings = self.devices, self.output_device, dim or 0, self.precision
        self.copies = CriterionCopies(criterion, *settings, self.replicas, collectives, halves)
        self.module = criterion

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute, but for the settings that the kind of the loss is made of, and those of
        the criterion.
        """
        refuse_setting(self, name)
        if name in ("module", "weight", "minimum", "whole") and hasattr(self, name):
            raise AttributeError(
                f"{name} was assigned to a DataParallelCriterion, expected a new one: DataParallelCriterion(..., {name}=...)"
            )
        super().__setattr__(name, value)

    if TYPE_CHECKING:  # nn.Module has Any; a criterion that returns several losses returns these

        def __call__(self, outputs: object, *targets: object, **kwargs: object) -> torch.Tensor: ...

    def extra_repr(self) -> str:
        """Returns the settings that differ from the defaults, for ``repr(criterion)``."""
        settings = {name: value for name, value in self.arguments.items() if value}
        if not isinstance(self.module, nn.Module):
            settings = {"criterion": getattr(self.module, "__qualname__", self.module), **settings}
        return ", ".join(f"{name}={value}" for name, value in settings.items())

    @property
    def reduction(self) -> str:
        """The reduction of the criterion: ``"mean"``, ``"batchmean"``, ``"sum"`` or ``"none"``."""
        return self.kind.reduction

    def learn(self, row: ShardLoss) -> None:
        """Learns from a row whether one pass is enough for the loss."""
        self.kind = self.kind.learned_from(row)

    def forget(self) -> None:
        """Forgets what batches have shown of the loss."""
        self.kind = kind_of(
            self.module, self.weight, self.arguments["reduction"], self.whole, self.minimum
        )

    def follow_reduction(self) -> Kind:
        """Returns the kind of the loss: another one if ``module.reduction`` was set."""
        reduction = getattr(self.module, "reduction", None)
        if reduction != self._reduction:
            self._reduction = reduction
            self.forget()
        return self.kind

    def forward(self, outputs: Sequence[Any], *targets: Any, **kwargs: Any) -> Any:
        """Returns the loss of the batch. ``targets`` and ``kwargs`` have all rows of the batch."""
        kind, kwargs = self.follow_reduction().called_with(kwargs)
        if world_size() > 1:
            targets, kwargs = containers.map_tensors(enter, (targets, kwargs))
        if isinstance(outputs, PerReplica) and not targets and not kwargs:
            kind.begin_by_hand(outputs)
        calls = self.cut(outputs, targets, kwargs)
        if world_size() > 1 and torch.is_grad_enabled():
            refuse_unshared(self.parameters())
            leaves = (leaf for _, leaf in containers.leaves(list(calls.outputs)))
            if reason := explain_unwatched(leaves):
                raise ValueError(reason)
        loss = kind.value(calls)
        if world_size() > 1 and kind.reduction != "none":
            loss = containers.map_tensors(mark_loss, loss)
        self.kind = self.kind.learned(self.copies)
        return loss

    def weights_of(self, outputs: PerReplica, *targets: object) -> list[float]:
        """Returns the divisor of the mean of each output; the sum of them, if there are several."""
        weights = self.cut(outputs, targets, {}).run(functools.partial(call_weight, self.weight))
        return [sum(flat_weights(weight)) for weight in weights]

    def dim_of_targets(self, targets: Arguments, out_dims: Dims) -> int:
        """Returns the dimension of the rows in unmarked arguments after the outputs.

        Raises ``ValueError`` if it is not known, and outputs have their rows in another than 0.
        """
        if out_dims != 0 and self.dim is None and not is_first(out_dims):
            unmarked = containers.leaves(targets)
            if any(isinstance(leaf, torch.Tensor) and leaf.dim() for _, leaf in unmarked):
                raise ValueError(
                    f"the rows of the outputs are in dimension {out_dims!r}, expected dim= for those of the targets, or "
                    "Along(target, 1) at the call"
                )
        return self.dim or 0

    def cut(self, outputs: Any, targets: tuple[Any, ...], kwargs: dict[str, Any]) -> Calls:
        """Cuts the arguments behind the outputs as the outputs' shards.

        Returns the call of each shard.
        """
        entries = PerReplica.of(outputs, self.dim or 0)
        if entries.order is not None:
            raise ValueError(
                "the criterion was given outputs in another order than the batch, as after a cut by cost, expected the order of "
                "the targets: call criterion([outputs.gather()], targets)"
            )
        batch = Arguments(targets, kwargs)
        dim = self.dim_of_targets(batch, entries.dim)
        expected = None if None in entries.sizes else sum(filter(None, entries.sizes))
        rows = count_rows(batch, dim, expected, "targets")
        entries.check_rows(outputs, rows)
        return Calls(
            self.copies, entries, shards_of_targets(entries, batch, rows, dim, self.devices)
        )
