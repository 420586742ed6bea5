"""Fake copies: modules and batches whose tensors have shapes but no memory."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # torch has no public module of fake tensors

from ...batch.nested import is_row_list, map_leaves
from ...optim.sharded_parameters import ShardedParameter
from ...runtime.modules import shared_id

__all__: list[str] = []


def fake_copy(thing: Any, mode: FakeTensorMode, device: torch.device) -> Any:
    """Returns a deep copy of ``thing`` (a module, a function, a tuple of them) with fake tensors on ``device``.

    Tied tensors stay tied. The original does not change, and no value is copied.
    """

    def fake(tensor: Tensor, memo: dict[int, Any]) -> Any:
        if id(tensor) not in memo:
            memo[id(tensor)] = _fake_like(tensor, mode, device)
        return memo[id(tensor)]

    with _copying_tensors_by(fake):
        try:
            return copy.deepcopy(thing)
        except TypeError:  # an attribute cannot be copied (a registered operator, a lock): share all plain objects
            return copy.deepcopy(thing, _shared(thing))


def _shared(thing: Any) -> dict[int, Any]:
    """Returns a memo for ``deepcopy`` that shares attributes of modules, except modules, tensors and plain containers."""
    copied = (nn.Module, Tensor, list, dict, tuple, set)
    parts = thing if isinstance(thing, tuple) else (thing,)
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    values = [value for module in modules for value in vars(module).values() if not isinstance(value, copied)]
    return {id(value): value for value in values}


@contextmanager
def _copying_tensors_by(function: Any) -> Iterator[None]:
    kinds: tuple[Any, ...] = (Tensor, nn.Parameter, ShardedParameter)
    before = [kind.__deepcopy__ for kind in kinds]
    for kind in kinds:
        kind.__deepcopy__ = function
    try:
        yield
    finally:
        for kind, method in zip(kinds, before, strict=True):
            kind.__deepcopy__ = method


def _fake_like(tensor: Tensor, mode: FakeTensorMode, device: torch.device, shape: torch.Size | None = None) -> Any:
    with mode, torch.no_grad():
        if shape is None and tensor.layout == torch.strided:
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        else:
            made = torch.empty(shape or tensor.shape, dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_() if tensor.requires_grad else made


def fake_batch(batch: Any, rows: int, of: int, mode: FakeTensorMode, device: torch.device, dim: int = 0) -> Any:
    """Returns a fake copy of ``batch`` with ``rows`` rows along ``dim`` in place of ``of``.

    Tensors with a multiple of ``of`` rows get the same multiple of ``rows``.
    """

    def resize(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            shape = list(leaf.shape)
            if shape:
                shape[dim] = shape[dim] * rows // of
            return _fake_like(leaf, mode, device, torch.Size(shape))
        if is_row_list(leaf) and leaf:
            return [leaf[i % len(leaf)] for i in range(len(leaf) * rows // of)]
        return leaf

    return map_leaves(resize, batch)


def names_of(modules: Mapping[str, Any]) -> dict[int, str]:
    """Returns the names of all modules under some roots, by :func:`shared_id`."""
    names: dict[int, str] = {}
    for root, part in modules.items():
        if isinstance(part, nn.Module):
            for name, module in part.named_modules():
                names.setdefault(shared_id(module), ".".join(filter(None, (root, name))) or type(module).__name__)
    return names
