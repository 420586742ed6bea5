"""Known reasons for a difference between the split and the plain program, found in a model, a criterion and a batch."""

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
    """Returns the reasons that apply.

    Args:
        ran: a copy of the model after its forwards.
        output: output of the last of these forwards.
        untouched: the model before its forwards.
        criteria: the criterion before and after its call with ``output`` and ``targets``.
        wrapped: a copy of the criterion of the split program.
        targets: targets of the batch.
        dims: dimensions of the rows in the output.
        devices, micro_batches: numbers of devices and of micro-batches.
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
        is_synchronized = isinstance(layer, AllRowsBatchNorm)
        if devices > 1 and not is_synchronized:
            reason = (
                "uses the statistics of the rows of each replica: use convert_sync_batchnorm(module), or a norm that does not "
                "mix rows"
            )
        elif micro_batches > 1:
            reason = "uses the statistics of each micro-batch, not of the whole batch"
        else:
            continue
        yield f"batch norm: {name or type(layer).__name__} {reason}"


def _random_layers(module: nn.Module) -> Iterator[str]:
    for name, layer in module.named_modules():
        rate = layer.p if isinstance(layer, Dropout) else getattr(layer, "dropout", 0)
        if layer.training and isinstance(rate, float) and rate > 0:
            yield f"dropout: {name or type(layer).__name__} draws different random numbers for each shard: compare in eval mode"


def _state_of_criterion(before: Criterion, after: Criterion) -> Iterator[str]:
    effect = "each replica writes its own state, from its own rows"
    if isinstance(before, nn.Module) and isinstance(after, nn.Module):
        for key in _changes(before, after):
            yield f"state written by the criterion: {key}; {effect}"
    elif not inspect.isroutine(before):
        for key in _changed_attributes(before, after):
            yield f"state written by the criterion: {key}; {effect}"


def _written_state(before: nn.Module, after: nn.Module) -> Iterator[str]:
    for key in _changes(before, after):
        yield f"state written in forward: {key}; all replicas but the first lose it"


def _changes(before: nn.Module, after: nn.Module) -> Iterator[str]:
    """Yields the key paths of attributes and buffers that differ."""
    layers = dict(after.named_modules())
    for name, layer in before.named_modules():
        changed = layers[name]
        prefix = f"{name}." if name else ""
        for key in _changed_attributes(layer, changed):
            yield f"{prefix}{key}"
        if not isinstance(layer, BatchNorm):
            for key, buffer in layer.named_buffers(recurse=False):
                if not _same(buffer, changed.get_buffer(key)):
                    yield f"buffer {prefix}{key}"


def _changed_attributes(before: Any, after: Any) -> Iterator[str]:
    for key, value in getattr(after, "__dict__", {}).items():
        is_comparable = is_plain(value) or isinstance(value, (Tensor, list)) or value is None
        if is_comparable and not _same(before.__dict__.get(key), value):
            yield key


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.shape == after.shape and bool(torch.equal(before.cpu(), after.cpu()))
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_same, before, after))
    if type(before) is not type(after):
        return False
    return bool(before == after) if is_plain(before) or before is None else True  # other objects are not compared


def fixed_devices(module: nn.Module) -> Iterator[str]:
    """Yields calls in the source of ``forward`` that put a tensor on a fixed device, once per class."""
    seen = set()
    for name, layer in module.named_modules():
        kind = type(layer)
        if kind in seen or kind.__module__.startswith("torch."):
            continue
        seen.add(kind)
        tree = read_source(kind.forward)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.Call) and (code := _fixed_device(node)):
                yield f"a fixed device in forward: {code} in {kind.__name__} ({name or 'the model'}): use the device of the input"


def _fixed_device(call: ast.Call) -> str | None:
    """Returns the code of a call that puts a tensor on a fixed device, or None."""
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
