"""Runs a criterion on the shards of a batch, each on the device of its output."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..batch import nested
from ..batch.dims import Dims, check_dim, check_dims, is_first
from ..batch.row_marks import Arguments, mark
from ..batch.rows import count_rows, cut, move_leaves
from ..replicas.replicas import Replicas
from ..runtime.devices import DeviceLike, resolve_device, resolve_devices
from ..runtime.precision import Precision
from .criterion_copies import copy_criterion, devices_of
from .custom_weights import count_leading
from .output_rows import as_per_replica, in_order, sizes_like
from .partial_sums import Criterion, MeanAndWeight, Shard, Shards

__all__: list[str] = []


class ShardRunner(nn.Module):
    """A criterion with copies on the devices of the outputs, and the rows of its targets.

    The base of :class:`DataParallelCriterion`, and the part of it that losses whose rows depend on each other need.

    Args:
        criterion, device_ids, output_device, dim, precision, in_dims, whole: as for :class:`DataParallelCriterion`.
    """

    def __init__(
        self,
        criterion: Criterion,
        device_ids: Sequence[DeviceLike] | None,
        output_device: DeviceLike | None,
        dim: int | None,
        *,
        precision: str | Precision | None,
        in_dims: Dims,
        whole: bool,
    ) -> None:
        super().__init__()
        check_dim(dim)
        check_dims(in_dims, "in_dims")
        self.module = criterion
        self.whole = whole
        self.is_checked = False  # parts of a coupled loss are checked in the first batch
        self.devices = None if device_ids is None else resolve_devices(device_ids)
        self.output_device = None if output_device is None else resolve_device(output_device)
        self.dim = dim
        self.in_dims = in_dims
        self.precision = Precision("fp32" if precision is None else precision)
        self.replicas = Replicas()

    @property
    def _output_dim(self) -> Dims:
        """The dimension of the rows in outputs that are not a ``PerReplica``."""
        if isinstance(self.in_dims, Mapping):
            of_outputs: Dims = self.in_dims.get(0, self.dim)
            return of_outputs
        if isinstance(self.in_dims, Sequence):
            return self.in_dims[0] if self.in_dims else self.dim
        return self.dim if self.in_dims is None else self.in_dims

    def mark(
        self, targets: tuple[Any, ...], kwargs: dict[str, Any], dims: Dims, leading: int | None = None
    ) -> tuple[Arguments, int]:
        """Marks the arguments after the outputs with ``in_dims``. Also returns the dimension of the rows in unmarked arguments.

        Args:
            targets, kwargs: all rows of the batch.
            dims: dimension of the rows of the outputs.
            leading: number of the criterion's arguments that an output fills. ``None`` is the number of its required arguments
                less the number of targets.

        Raises:
            ValueError: the rows of the outputs are not in dimension 0, and the dimension of those of the targets is not given.
        """
        if self.in_dims is None and self.dim is None and not is_first(dims) and _has_rows((targets, kwargs)):
            raise ValueError(
                f"the rows of the outputs are in dimension {dims!r}; say where those of the targets are: "
                "DataParallelCriterion(..., dim=) or in_dims="
            )
        function = self.module.forward if isinstance(self.module, nn.Module) else self.module
        leading = leading or count_leading(function, len(targets))
        return mark(Arguments(targets, kwargs), self.in_dims, function, first=1, unnamed=leading - 1), self.dim or 0

    def run_shards(
        self, term: Callable[[Shard], Any], outputs: Sequence[Any], targets: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Returns ``term(shard)`` for each replica, computed on the device of its output."""
        shards = self.shards(outputs, targets, kwargs)
        devices = shards.devices

        def run(criterion: Criterion, size: int, output: Any, arguments: Arguments, weights: Any, device: torch.device) -> Any:
            targets, kwargs = move_leaves(arguments.inputs, device), move_leaves(arguments.kwargs, device)
            return term(Shard(criterion, size, output, targets, kwargs, weights))

        with self.precision.autocast(devices), copy_criterion(self.module, self.replicas, devices) as criteria:
            each = list(zip(shards.sizes, shards.outputs, shards.batches, strict=True))
            weights = self._weights_in_place(term, each, devices)
            replicas = zip(criteria, shards.sizes, shards.outputs, shards.batches, weights, devices, strict=True)
            work = [functools.partial(run, *replica) for replica in replicas]
            return self.replicas.workers(work, devices, together=False)

    def shards(self, outputs: Sequence[Any], targets: tuple[Any, ...], kwargs: dict[str, Any]) -> Shards:
        """Returns the arguments of each replica."""
        entries = as_per_replica(outputs, self._output_dim)
        devices = devices_of(entries, self.devices)
        batch, dim = self.mark(targets, kwargs, entries.dim, len(nested.spread(entries[0])))
        expected = None if None in entries.sizes else sum(size or 0 for size in entries.sizes)
        rows = count_rows(batch, dim, expected, "targets")
        sizes = sizes_like(entries, rows)
        if entries.order is not None and rows is not None:
            batch = in_order(batch, entries.order, rows, dim)
        batches = [batch] * len(entries) if rows is None else cut(batch, sizes, dim)
        return Shards(entries, sizes, batches, devices, dim)

    def _weights_in_place(
        self, term: Callable[[Shard], Any], shards: list[tuple[int, Any, Arguments]], devices: Sequence[torch.device]
    ) -> list[Any]:
        """Returns the weights of all shards, from targets that are not moved, or None for those that the replicas compute.

        Targets on the host are counted there, and the host waits once for targets on a device.
        """
        if isinstance(term, MeanAndWeight) and any(device.type != "cpu" for device in devices):
            unmoved = [(size, output, *move_leaves(tuple(batch), None)) for size, output, batch in shards]
            try:
                return term.read([Shard(self.module, *shard) for shard in unmoved])
            except Exception:  # noqa: BLE001 - it needs outputs and targets on one device; or it fails there too, for the user to see
                pass
        return [None] * len(shards)


def _has_rows(node: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 for _, leaf in nested.leaves(node))
