"""Sums over the rows of all replicas and ranks, for statistics of a forward.

Replicas meet in the exchange of their threads, ranks in an all-reduce whose backward sums the
gradients::

    replica 0   statistic 0 --+--> sum --> all-reduce over the ranks --> forward goes on
    replica 1   statistic 1 --+--> sum --> ...

Replicas can only meet if they run at the same time, and ranks if each of them runs every forward.
So the engine has to know before a forward: :func:`sums_rows` reads the code of a module.
"""

import contextlib
import contextvars
import functools
import gc
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from ..runtime.collectives import SumOverRanks, second_group, world_size
from ..runtime.devices import current_stream
from ..runtime.streams import wait_for
from ..runtime.torch_private import current_backward_id, in_checkpoint
from .workers import current_replica

ALL = "all rows"  # A loss with whole=True is computed once, from the rows of all ranks.
NONE = "no rows"  # A rank without rows runs a row in their place.
_rows: contextvars.ContextVar[str] = contextvars.ContextVar("rows", default="")
# Replicas have met in this process. The recomputation of reentrant checkpointing does not know its
# replica.
_replicas_met = False
# The search for calls ends at classes and functions of these packages, and goes on in the objects.
_FOREIGN = {*sys.stdlib_module_names, "torch", __name__.partition(".")[0]}
_OPEN = nn.Module, dict, tuple, functools.partial, types.MethodType, types.CellType, staticmethod


def sum_over_rows(tensor: Tensor) -> Tensor:
    """Returns the sum of ``tensor`` over all replicas and ranks of the running forward.

    Called inside of a forward or of a criterion, for statistics that must be those of all rows: the
    counts of a codebook, the centre of DINO, the load of experts, the moments of a data-dependent
    initialisation. ``tensor`` is such a statistic of the rows at hand, summed over them. On one
    device the result is a copy of it. The gradient of the sum reaches the statistics of all
    replicas and ranks; under ``no_grad`` there is none.

    All replicas and ranks call it equally often, in the same order, with tensors of one shape and
    dtype. A rank without rows runs its forward without rows, and adds zeros. Micro-batches have
    sums of their own, as with :func:`convert_sync_batchnorm`. Outside of a forward of this package,
    it sums over the ranks of the process group, if there is one.

    Args:
        tensor: of any shape, on the device of this replica. The dtype is kept; halves are added in
            float32.

    Raises:
        ValueError: the replicas have tensors of different shapes or dtypes.
        RuntimeError: a replica ended without this call; several replicas called it inside of
            activation checkpointing, whose recomputation is without the others.

    Example:
        >>> def error(output, target):  # of outputs whose mean over all rows is subtracted
        ...     count = sum_over_rows(torch.tensor(len(output)))
        ...     return (output - sum_over_rows(output.sum(0)) / count - target).pow(2).mean()
        >>> outputs = PerReplica([torch.tensor([[1.0], [2.0]]), torch.tensor([[6.0]])], [2, 1])
        >>> DataParallelCriterion(error)(outputs, torch.zeros(3, 1))
        tensor(4.6667)
    """
    if has_torch_function_unary(tensor):
        seen: Tensor = handle_torch_function(sum_over_rows, (tensor,), tensor)
        return seen
    if _rows.get() == NONE:
        raise RuntimeError(
            "sum_over_rows was called by a rank without rows, whose forward was not expected to do so, expected its name in the "
            "code of the module or of a function that this calls, and step.add(...) equally often on all ranks"
        )
    is_replica = current_replica() is not None
    is_alone = not is_replica and world_size() == 1
    is_reentrant = is_alone and _replicas_met and current_backward_id() is not None
    is_recomputed_alone = is_replica if in_checkpoint() else is_reentrant
    if is_recomputed_alone:
        raise RuntimeError(
            "sum_over_rows was called again in the backward of one replica, expected it outside of activation checkpointing"
        )
    return tensor.clone() if is_alone or _rows.get() == ALL else _sum(tensor)


def _sum(tensor: Tensor) -> Tensor:
    global _replicas_met
    parts = [part for _, part in exchange(tensor)]
    _replicas_met = _replicas_met or len(parts) > 1
    kinds = {f"{tuple(part.shape)} ({part.dtype})" for part in parts}
    if len(kinds) > 1:
        raise ValueError(
            f"sum_over_rows was given {' and '.join(sorted(kinds))} by the replicas, expected one shape and dtype: sum over the "
            "rows first, as in sum_over_rows(x.sum(0))"
        )
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    total = functools.reduce(torch.add, [part.float() if is_half else part for part in parts])
    if world_size() > 1:
        total = SumOverRanks.apply(total, second_group("statistics"))
    return total.to(tensor.dtype)


def exchange(tensor: Tensor, size: int = 0) -> list[tuple[int, Tensor]]:
    """Returns ``size`` and ``tensor`` of each replica, in their order.

    Tensors are moved to the device of this replica's.
    """
    replica = current_replica()
    if replica is None:
        return [(size, tensor)]
    parts = replica.exchange((size, tensor, current_stream(tensor.device)))
    for _, part, stream in parts:
        wait_for(part, stream)
    return [(each, part.to(tensor.device)) for each, part, _ in parts]


@contextlib.contextmanager
def forward_of(rows: str) -> Iterator[None]:
    """Tells that code in this block has ``ALL`` or ``NONE`` of the rows."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def sums_rows(part: object) -> bool:
    """Returns True if the code of a module or function, or code that it calls, names
    :func:`sum_over_rows`.
    """
    seen = set[int]()
    ahead = [part]
    while ahead:
        value = ahead.pop()
        if value is sum_over_rows or sum_over_rows.__name__ in names_in(value):
            return True
        is_code = isinstance(value, (type, types.FunctionType))
        kind: Any = value if is_code else type(value)
        root = str(kind.__module__).partition(".")[0]
        # Classes and functions that exec() makes may be of builtins.
        is_open = (
            root not in _FOREIGN or isinstance(value, _OPEN) or (is_code and root == "builtins")
        )
        if is_open and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, types.FunctionType):
                ahead += _outside(value)
            else:
                ahead += gc.get_referents(value)
    return False


def names_in(code: object) -> set[str]:
    """Returns the names of globals and attributes in the code of a function, and in that of its
    inner functions.
    """
    if isinstance(code, types.FunctionType):
        code = code.__code__
    if not isinstance(code, types.CodeType):
        return set()
    return {*code.co_names}.union(*map(names_in, code.co_consts))


def _outside(function: types.FunctionType) -> list[object]:
    """Returns the objects that the code of a function names, and what it wraps."""
    names = names_in(function)
    named = [vars(function), function.__closure__, *map(function.__globals__.get, names)]
    modules = [vars(each) for each in named if isinstance(each, types.ModuleType)]
    return [*named, *(module.get(name) for module in modules for name in names)]
