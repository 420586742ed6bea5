"""One step to trace, as data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...batch.row_marks import Arguments
from ..device_specs import DeviceKind
from .existing_step import ExistingOptimizers
from .optimizer_choice import OptimizerChoice
from .strategies import Layout

__all__: list[str] = []


@dataclass(frozen=True)
class Request:
    """One update to trace.

    Attributes:
        inputs, targets: a batch of ``rows`` rows along dimension ``dim``: the arguments of the module, and those of the
            criterion after the output.
        micro_batches: how many make the update.
        batches: how many batches make the update. Each is cut into an equal part of the micro-batches.
        balanced: the optimizer is a :class:`BalancedOptimizer`.
        blocks: names of the modules to checkpoint.
        savings: functions of ``balanced_parallel.savings`` to apply to the traced copies.
        inplace: names of the activations that are in place.
        split: the weight of each device; None for equal shares.
        scalar: the result of every read of a tensor's value in the module.
        update_rows: rows of an update over all devices of a process; None for those of ``batches``.
    """

    module: torch.nn.Module
    criterion: Callable[..., Any]
    inputs: Arguments
    targets: tuple[Any, ...]
    rows: int
    optimizer: OptimizerChoice | ExistingOptimizers
    precision: str
    micro_batches: int
    batches: int
    layout: "type[Layout]"
    devices: int
    balanced: bool
    blocks: tuple[str, ...]
    split: tuple[float, ...] | None
    kind: DeviceKind
    dim: int
    scalar: int | float | bool | None
    savings: tuple[str, ...] = ()
    inplace: tuple[str, ...] = ()
    update_rows: int | None = None

    @property
    def rows_per_micro_batch(self) -> int:
        """Rows of the largest micro-batch over all devices of a process."""
        return -(-self.rows * self.batches // self.micro_batches)

    @property
    def rows_of_update(self) -> int:
        """Rows of an update over all devices and ranks, whose outputs a loss with ``whole=True`` needs."""
        ranks = self.devices if self.layout.is_distributed else 1
        return (self.update_rows or self.rows * self.batches) * ranks

    @property
    def row_step(self) -> int:
        """Numbers of rows are rounded up to a multiple of this, so that all devices have as many."""
        return 1 if self.split is not None else self.layout.devices_per_process(self.devices)
