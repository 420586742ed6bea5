"""One step to trace: the arguments of ``memory.estimate`` and ``memory.plan``, checked and in one place."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..batch.microbatches import as_arguments, count_micro_batches
from ..batch.nested import describe, spread
from ..batch.row_marks import Arguments
from ..batch.rows import count_rows
from ..replicas.module_checks import check_module
from ..runtime.precision import Precision
from ..savings.activation_checkpointing import find_blocks
from .device_specs import DeviceKind, find_kind
from .trace.applied_savings import check_savings
from .trace.inplace_names import inplace_names
from .trace.optimizer_choice import OptimizerChoice
from .trace.strategies import LAYOUTS, Layout, find_layout

if TYPE_CHECKING:
    from .trace.existing_step import ExistingOptimizers

__all__: list[str] = []


_CALLS = {
    "criterion": "a module or a function: the arguments are (module, criterion, inputs, targets)",
    "optimizer": "a class, or a function of the parameters: torch.optim.AdamW, or functools.partial(torch.optim.AdamW, lr=...)",
}


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
    optimizer: "OptimizerChoice | ExistingOptimizers"
    precision: str
    micro_batches: int
    batches: int
    layout: type[Layout]
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

    @classmethod
    def of(
        cls,
        module: torch.nn.Module,
        criterion: Callable[..., Any],
        inputs: Any,
        targets: Any,
        *,
        optimizer: Callable[..., torch.optim.Optimizer],
        precision: str,
        layout: str,
        devices: int,
        device_kind: str | None,
        dim: int,
        scalar: int | float | bool | None,
        micro_batch_size: int | None = None,
        accumulate: int = 1,
        balanced_optimizer: bool = False,
        checkpoint: str | Iterable[str] | None = None,
        split: Sequence[float] | None = None,
        savings: Iterable[str] = (),
    ) -> "Request":
        """Makes a request of the arguments of :func:`estimate`.

        Raises:
            ValueError: a setting is out of its range, or the inputs have no rows.
        """
        check_module(module)
        for name, function in {"criterion": criterion, "optimizer": optimizer}.items():
            if not callable(function):
                raise TypeError(f"the {name} is {describe(function)}, expected {_CALLS[name]}")
        kind = find_kind(device_kind)
        Precision(precision)
        chosen = find_layout(layout)
        for name, number in {"devices": devices, "accumulate": accumulate, "micro_batch_size": micro_batch_size or 1}.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}={number!r}, expected a positive number")
        if devices > 1 and not chosen.takes_several_devices:
            others = " or ".join(repr(name) for name, other in LAYOUTS.items() if other.takes_several_devices)
            raise ValueError(f"devices={devices} with layout={layout!r}, expected one device, or layout={others}")
        if balanced_optimizer and not chosen.takes_balanced_optimizer:
            others = " or ".join(repr(name) for name, other in LAYOUTS.items() if other.takes_balanced_optimizer)
            raise ValueError(f"balanced_optimizer=True with layout={layout!r}, expected {others}")
        arguments = as_arguments(inputs)
        rows = count_rows(arguments, dim)
        if not rows:
            raise ValueError(f"the inputs have no rows, expected tensors with rows along dimension {dim}")
        count = count_micro_batches(rows, micro_batch_size, split or chosen.devices_per_process(devices))
        request = cls(
            module=module,
            criterion=criterion,
            inputs=arguments,
            targets=spread(targets),
            rows=rows,
            optimizer=OptimizerChoice(optimizer, foreach=kind.like_cuda),
            precision=precision,
            micro_batches=count * accumulate,
            batches=accumulate,
            layout=chosen,
            devices=devices,
            balanced=balanced_optimizer,
            blocks=_names_to_checkpoint(module, checkpoint),
            split=None if split is None else tuple(split),
            kind=kind,
            dim=dim,
            scalar=scalar,
            savings=check_savings(savings),
        )
        return request.in_place() if "inplace_activations" in request.savings else request

    def in_place(self) -> "Request":
        """Returns the request with every activation in place that may be."""
        return dataclasses.replace(self, inplace=inplace_names(self))

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


def _names_to_checkpoint(module: torch.nn.Module, checkpoint: str | Iterable[str] | None) -> tuple[str, ...]:
    if checkpoint is None:
        return ()
    if checkpoint != "blocks":
        return (checkpoint,) if isinstance(checkpoint, str) else tuple(checkpoint)
    if blocks := find_blocks(module):
        return blocks
    raise ValueError("checkpoint='blocks', but the module has no repeated blocks: expected names of submodules, or None")
