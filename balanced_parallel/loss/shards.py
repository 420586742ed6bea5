"""Parts of a criterion: a copy on the device of each output, and the settings of its divisor."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..batch import containers
from ..batch.outputs import PerReplica
from ..batch.rows import move_leaves, parameters_of
from ..replicas.replicas import Replicas
from ..runtime.devices import pin
from ..runtime.torch_private import is_compiled, is_compiled_function
from ..runtime.values import check_number
from .rules import find_torch_loss, reduction_of
from .sums import MINIMUM, Criterion, ShardLoss, call_spread, map_weights


def devices_of(outputs: PerReplica, allowed: Sequence[torch.device] | None) -> list[torch.device]:
    """Returns the device of each output. One without tensors gets that of its number in ``allowed``, or the CPU."""
    devices: list[torch.device] = []
    for number, output in enumerate(outputs):
        tensor = output if type(output) is torch.Tensor else containers.first_tensor(output)
        fallback = allowed or [torch.device("cpu")]
        devices.append(fallback[number % len(fallback)] if tensor is None else tensor.device)
        if allowed is not None and devices[-1] not in allowed:
            raise ValueError(f"an output is on {devices[-1]}, expected one of device_ids={[str(device) for device in allowed]}")
    return devices


def copy_criterion(
    criterion: Criterion, replicas: Replicas, devices: Sequence[torch.device]
) -> contextlib.AbstractContextManager[Sequence[Criterion]]:
    """Yields a copy of the criterion for each device. A module on another device is moved to that of the first output."""
    if isinstance(criterion, nn.Module):
        for tensor in (*criterion.parameters(), *criterion.buffers()):
            if tensor.device != devices[0]:
                criterion.to(devices[0])
        return replicas.of(criterion, devices, devices[0])
    if isinstance(criterion, functools.partial):
        bound = criterion.args, criterion.keywords
        if any(device.type != "cpu" for device in devices):
            bound = containers.map_leaves(lambda leaf: pin(leaf) if isinstance(leaf, torch.Tensor) else leaf, bound)
        moved = [move_leaves(bound, device) for device in devices]
        copies = [functools.partial(criterion.func, *arguments, **settings) for arguments, settings in moved]
        return contextlib.nullcontext(copies)
    return contextlib.nullcontext([criterion] * len(devices))


Divisor = Callable[..., Any] | str | Mapping[Any, Callable[..., Any]] | Sequence[Callable[..., Any]]
SEVERAL = "; several losses are one module that returns a mapping of them, with a weight= that has a function for each divisor"


def check_settings(criterion: Any, weight: Any, reduction: str | None, minimum: float, *, whole: bool) -> None:
    """Raises ``TypeError`` or ``ValueError`` for settings that are invalid, or contradict the reduction of a loss of torch."""
    if isinstance(criterion, type) or not callable(criterion):
        more = SEVERAL if isinstance(criterion, (list, tuple, dict)) else ""
        described = f"the class {criterion.__name__}" if isinstance(criterion, type) else containers.describe(criterion)
        raise TypeError(f"the criterion is {described}, expected a module or a function{more}")
    is_described = weight is not None or reduction in ("sum", "none") or whole
    if not is_described and (is_compiled if isinstance(criterion, nn.Module) else is_compiled_function)(criterion):
        raise TypeError(
            f"the criterion is compiled ({containers.describe(criterion)}), and the terms and the divisor of a compiled loss "
            "are unknown: pass it without torch.compile (the model may be compiled), or give weight=, a function (output, "
            "*targets) -> scalar that returns the divisor of its mean, or reduction='sum'"
        )
    functions: Any = weight.values() if isinstance(weight, Mapping) else weight if isinstance(weight, (list, tuple)) else [weight]
    if weight is not None and weight != "rows" and not (functions and all(map(callable, functions))):
        raise ValueError(
            f"weight={weight!r}, expected a function (output, *targets) -> scalar, or 'rows', or for several means a mapping or "
            "a list with a function (*targets) -> scalar for each"
        )
    check_number("minimum", minimum, MINIMUM, at_least=0)
    if reduction not in (None, "sum", "mean", "none"):
        raise ValueError(f"reduction={reduction!r}, expected 'sum', 'mean' or 'none'")
    if reduction is not None and find_torch_loss(criterion) is not None and reduction_of(criterion) != reduction:
        raise ValueError(
            f"reduction={reduction!r} was given for a loss of torch with reduction={reduction_of(criterion)!r}: set it in the "
            "constructor of the loss"
        )


def weights_of_targets(weight: Any, targets: tuple[Any, ...]) -> Any:
    """Calls each function of a mapping or sequence with the targets."""
    return map_weights(lambda count: count(*targets), weight)


def call_weight(weight: Any, shard: ShardLoss) -> Any:
    """Calls a weight function with the arguments of the criterion, without the keyword arguments that it does not accept."""
    if not callable(weight):
        return weights_of_targets(weight, shard.targets)
    kwargs, parameters = shard.kwargs, parameters_of(weight) if shard.kwargs else None
    if parameters is not None and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = {parameter.name for parameter in parameters}
        kwargs = {name: value for name, value in kwargs.items() if name in names}
    return call_spread(weight, shard.output, shard.targets, kwargs)
