"""One step to trace: the arguments of ``memory.estimate`` and ``memory.plan``, checked and in one place."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..batch.containers import describe, spread
from ..batch.plan import count_micro_batches
from ..batch.rows import as_arguments, count_rows
from ..replicas.module_tree import check_module
from ..runtime.values import Precision
from ..savings.checkpointing import find_blocks
from .devices import find_kind
from .trace.layouts import LAYOUTS, Request, find_layout
from .trace.optimizers import OptimizerChoice
from .trace.savings import check_savings

__all__: list[str] = []


_CALLS = {
    "criterion": "a module or a function: the arguments are (module, criterion, inputs, targets)",
    "optimizer": "a class, or a function of the parameters: torch.optim.AdamW, or functools.partial(torch.optim.AdamW, lr=...)",
}


def make_request(
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
) -> Request:
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
    return Request(
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


def _names_to_checkpoint(module: torch.nn.Module, checkpoint: str | Iterable[str] | None) -> tuple[str, ...]:
    if checkpoint is None:
        return ()
    if checkpoint != "blocks":
        return (checkpoint,) if isinstance(checkpoint, str) else tuple(checkpoint)
    if blocks := find_blocks(module):
        return blocks
    raise ValueError("checkpoint='blocks', but the module has no repeated blocks: expected names of submodules, or None")
