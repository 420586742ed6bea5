"""Copies of a criterion on the devices of the outputs."""

import contextlib
import functools
from collections.abc import Sequence

import torch
from torch import nn

from ..batch import nested
from ..batch.per_replica import PerReplica
from ..batch.rows import move_leaves
from ..replicas.replicas import Replicas
from ..runtime.host_copies import pin
from ..runtime.modules import buffers_of, children_of, parameters_of
from .partial_sums import Criterion

__all__: list[str] = []


def devices_of(outputs: PerReplica, allowed: Sequence[torch.device] | None) -> list[torch.device]:
    """Returns the device of each output.

    Args:
        outputs: one output per replica. An output without tensors gets the device of its number in ``allowed``, or the CPU.
        allowed: devices that outputs may be on; ``None`` allows all.

    Raises:
        ValueError: an output is on another device.
    """
    tensors = [nested.first_tensor(output) for output in outputs]
    fallback = allowed or [torch.device("cpu")]
    devices = [fallback[i % len(fallback)] if tensor is None else tensor.device for i, tensor in enumerate(tensors)]
    wrong = [str(device) for device in devices if allowed is not None and device not in allowed]
    if wrong:
        raise ValueError(f"an output is on {wrong[0]}, expected one of device_ids={[str(device) for device in allowed or ()]}")
    return devices


def copy_criterion(
    criterion: Criterion, replicas: Replicas, devices: Sequence[torch.device]
) -> contextlib.AbstractContextManager[Sequence[Criterion]]:
    """Yields a copy of the criterion for each device. A module on another device is moved to that of the first output."""
    if isinstance(criterion, nn.Module):
        if len(devices) == 1 and _has_no_state(criterion):
            return contextlib.nullcontext([criterion])
        if any(tensor.device != devices[0] for tensor in (*criterion.parameters(), *criterion.buffers())):
            criterion.to(devices[0])  # only if needed: Module.to() reads grad, which would reduce deferred gradients
        return replicas.of(criterion, devices, devices[0])
    if isinstance(criterion, functools.partial):
        given = criterion.args, criterion.keywords
        if any(device.type != "cpu" for device in devices):
            given = nested.map_leaves(lambda leaf: pin(leaf) if isinstance(leaf, torch.Tensor) else leaf, given)
        moved = [move_leaves(given, device) for device in devices]
        copies = [functools.partial(criterion.func, *arguments, **settings) for arguments, settings in moved]
        return contextlib.nullcontext(copies)
    return contextlib.nullcontext([criterion] * len(devices))


def _has_no_state(module: nn.Module) -> bool:
    tensors = (*parameters_of(module).values(), *buffers_of(module).values())
    return not children_of(module) and all(tensor is None for tensor in tensors)
