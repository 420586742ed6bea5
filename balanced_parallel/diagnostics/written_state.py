"""State that a model or a criterion writes: what has changed, and what the split program keeps of it."""

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..batch.nested import is_plain
from ..loss.partial_sums import Criterion
from ..runtime.modules import BatchNorm
from .module_recording import Program, relative_error

__all__: list[str] = []

_EACH_MICRO_BATCH = "each micro-batch writes it, from its own rows"


def state_of_criterion(before: Criterion, after: Criterion, devices: int) -> Iterator[str]:
    """Yields a reason for each attribute and buffer that the criterion has written."""
    effect = "each replica writes its own state, from its own rows" if devices > 1 else _EACH_MICRO_BATCH
    if isinstance(before, nn.Module) and isinstance(after, nn.Module):
        for key, _ in _changes(before, after):
            yield f"state written by the criterion: {key}; {effect}"
    elif not inspect.isroutine(before):
        for key in _changed_attributes(before, after):
            yield f"state written by the criterion: {key}; {effect}"


def state_of_model(before: nn.Module, after: nn.Module, devices: int) -> Iterator[str]:
    """Yields a reason for each attribute and buffer that the model has written in forward."""
    for key, value in _changes(before, after):
        yield f"state written in forward: {key}; {_effect(devices, value)}"


def _effect(devices: int, value: Any) -> str:
    if devices > 1 and isinstance(value, (dict, list)):
        return "all replicas write to the same object, in any order"
    return "all replicas but the first lose it" if devices > 1 else _EACH_MICRO_BATCH


def _changes(before: nn.Module, after: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the key paths and new values of attributes and buffers that differ."""
    layers = dict(after.named_modules())
    for name, layer in before.named_modules():
        changed = layers[name]
        prefix = f"{name}." if name else ""
        for key in _changed_attributes(layer, changed):
            yield f"{prefix}{key}", changed.__dict__[key]
        if not isinstance(layer, BatchNorm):
            for key, buffer in layer.named_buffers(recurse=False):
                if not _same(buffer, changed.get_buffer(key)):
                    yield f"buffer {prefix}{key}", buffer


def _changed_attributes(before: Any, after: Any) -> Iterator[str]:
    for key, value in getattr(after, "__dict__", {}).items():
        is_comparable = is_plain(value) or isinstance(value, (Tensor, list)) or value is None
        is_mapping = isinstance(value, dict) and not key.startswith("_")  # names with an underscore are those of nn.Module
        is_flag = value is True and key not in before.__dict__  # of the first forward: replicas without it set up anew
        if (is_comparable or is_mapping) and not is_flag and not _same(before.__dict__.get(key), value):
            yield key


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.shape == after.shape and bool(torch.equal(before.cpu(), after.cpu()))
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_same, before, after))
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(_same(value, after[key]) for key, value in before.items())
    if type(before) is not type(after):
        return False
    return bool(before == after) if is_plain(before) or before is None else True  # other objects are not compared


def buffer_errors(plain: Program, split: Program, limit: float) -> dict[str, float]:
    """Returns the relative error of each buffer that differs between two programs, except those of batch norms."""
    errors = {}
    for name, layer, other in _pairs(plain, split):
        if isinstance(layer, BatchNorm):
            continue
        found = dict(other.named_buffers(recurse=False))
        for key, expected in layer.named_buffers(recurse=False):
            buffer = found.get(key)
            if buffer is None or buffer.shape != expected.shape:
                errors[f"{name}{key}"] = math.inf
            elif (error := relative_error(buffer, expected)) > limit:
                errors[f"{name}{key}"] = error
    return errors


def number_changes(plain: Program, split: Program, devices: int) -> Iterator[str]:
    """Yields a line for each number in an attribute that differs between two programs."""
    for name, layer, other in _pairs(plain, split):
        for key, value in layer.__dict__.items():
            found = other.__dict__.get(key)
            if type(value) in (int, float) and type(found) in (int, float) and value != found:
                yield f"{name}{key} is {found} after the split steps, {value} after the plain ones: {_effect(devices, value)}"


def _pairs(plain: Program, split: Program) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yields the modules of two programs, with the prefix of their attributes."""
    for kind, one, other in (("", plain.module, split.module), ("criterion.", plain.criterion, split.criterion)):
        if isinstance(one, nn.Module) and isinstance(other, nn.Module):
            others = dict(other.named_modules())
            for name, layer in one.named_modules():
                yield f"{kind}{name}." if name else kind, layer, others[name]
