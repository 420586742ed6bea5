"""Why a split program may differ from the plain one: the known reasons, looked for in a model, a criterion and a batch."""

import ast
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..batch.dims import Dims
from ..batch.nested import is_plain
from ..loss.criterion import DataParallelCriterion
from ..loss.partial_sums import Criterion
from ..loss.sum_detection import read_source
from ..replicas.sync_batchnorm import AllRowsBatchNorm
from ..runtime.modules import BatchNorm, Dropout
from .loss_parts import loss_in_parts

__all__: list[str] = []

_FACTORIES = frozenset(
    ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros")
)


def find_reasons(
    ran: nn.Module,
    output: Any,
    untouched: nn.Module,
    criteria: tuple[Criterion, Criterion],
    wrapped: DataParallelCriterion,
    targets: Any,
    dims: Dims,
    devices: int,
    micro_batches: int,
) -> tuple[str, ...]:
    """The reasons that apply.

    Args:
        ran: a copy of the model after its forwards, the last of which gave this ``output``.
        untouched: the model as it was before.
        criteria: the criterion before and after it was given ``output`` and ``targets``.
        wrapped: a copy of it, as the split program has it.
        targets: what the output was compared with.
        dims: of the rows in the output.
        devices, micro_batches: into how many parts the batch was cut.
    """
    return (
        *_mixing_layers(untouched, devices, micro_batches),
        *_random_layers(untouched),
        *(tuple(_state_of_criterion(*criteria)) or loss_in_parts(output, criteria[0], wrapped, targets, dims)),
        *_written_state(untouched, ran),
        *fixed_devices(untouched),
    )


def _mixing_layers(module: nn.Module, devices: int, micro_batches: int) -> Iterator[str]:
    for name, layer in module.named_modules():
        if not isinstance(layer, BatchNorm) or not (layer.training or layer.running_mean is None):
            continue
        over_all = isinstance(layer, AllRowsBatchNorm)
        if devices > 1 and not over_all:
            how = "uses the statistics of its replica's rows: use convert_sync_batchnorm(module), or a norm that mixes no rows"
        elif micro_batches > 1:
            how = "uses the statistics of each micro-batch, not of the whole batch"
        else:
            continue  # it sees all rows
        yield f"batch norm: {name or type(layer).__name__} {how}"


def _random_layers(module: nn.Module) -> Iterator[str]:
    for name, layer in module.named_modules():
        rate = layer.p if isinstance(layer, Dropout) else getattr(layer, "dropout", 0)
        if layer.training and isinstance(rate, float) and rate > 0:
            yield f"dropout: {name or type(layer).__name__} draws other random numbers for each shard: compare in eval mode"


def _state_of_criterion(before: Criterion, after: Criterion) -> Iterator[str]:
    told = "replicas see their own rows only, and differ afterwards"
    if isinstance(before, nn.Module) and isinstance(after, nn.Module):
        for written in _changes(before, after):
            yield f"state written by the criterion: {written}; {told}"
    elif not inspect.isroutine(before):
        for key in _changed_attributes(before, after):
            yield f"state written by the criterion: {key}; {told}"


def _written_state(before: nn.Module, after: nn.Module) -> Iterator[str]:
    for written in _changes(before, after):
        yield f"state written in forward: {written}; replicas but the first lose it"


def _changes(before: nn.Module, after: nn.Module) -> Iterator[str]:
    """The attributes and buffers that differ."""
    layers = dict(after.named_modules())
    for name, layer in before.named_modules():
        found = layers[name]
        where = f"{name}." if name else ""
        for key in _changed_attributes(layer, found):
            yield f"{where}{key}"
        if not isinstance(layer, BatchNorm):
            for key, buffer in layer.named_buffers(recurse=False):
                if not _same(buffer, found.get_buffer(key)):
                    yield f"buffer {where}{key}"


def _changed_attributes(before: Any, after: Any) -> Iterator[str]:
    for key, value in getattr(after, "__dict__", {}).items():
        simple = is_plain(value) or isinstance(value, (Tensor, list)) or value is None
        if simple and not _same(before.__dict__.get(key), value):
            yield key


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(torch.equal(one.cpu(), other.cpu()))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if type(one) is not type(other):
        return False
    return bool(one == other) if is_plain(one) or one is None else True  # of other objects nothing is known


def fixed_devices(module: nn.Module) -> Iterator[str]:
    """What the sources of the forwards put on a device that is not the input's, once for each class."""
    seen = set()
    for name, layer in module.named_modules():
        kind = type(layer)
        if kind in seen or kind.__module__.startswith("torch."):
            continue
        seen.add(kind)
        tree = read_source(kind.forward)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.Call) and (what := _fixes_device(node)):
                yield f"a fixed device in forward: {what} in {kind.__name__} ({name or 'the model'}): use the device of the input"


def _fixes_device(call: ast.Call) -> str | None:
    """What of a call in forward puts a tensor on a device that is not the input's."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    of_torch = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
    device = next((keyword.value for keyword in call.keywords if keyword.arg == "device"), None)
    first = call.args[0] if call.args else None
    named = name in ("to", "device") and isinstance(first, ast.Constant) and isinstance(first.value, str)
    if name == "cuda" or named or isinstance(device, ast.Constant):
        return ast.unparse(call)
    if of_torch and name in _FACTORIES and device is None:
        return f"{ast.unparse(call)} without device="
    return None
