"""Sums over the rows of all replicas and ranks, for statistics of a forward.

Replicas meet in the exchange of their threads, ranks in an all-reduce whose backward sums the
gradients::

    replica 0   statistic 0 --+--> sum --> all-reduce over the ranks --> forward goes on
    replica 1   statistic 1 --+--> sum --> ...

Replicas can only meet if they run at the same time, and ranks if each of them runs every forward.
So the engine has to know before a forward: it finds :class:`SumOverRows` among the modules.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator

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
UNEXPECTED = "unexpected"  # A criterion of ranks that was not found to sum over rows.
_rows: contextvars.ContextVar[str] = contextvars.ContextVar("rows", default="")


class SumOverRows(nn.Module):
    """Adds a tensor up over all replicas and ranks of the running forward.

    It is an attribute of a module or of a criterion, for statistics that must be those of all rows:
    the counts of a codebook, the centre of DINO, the load of experts, the moments of a
    data-dependent initialisation. A criterion that is a function calls one of its own, and is
    wrapped with ``sums_rows=True``.

    The tensor is such a statistic of the rows at hand, summed over them, of any shape, on the
    device of the replica. On one device the result is a copy of it. The dtype is kept; halves are
    added in float32. The gradient of the sum reaches the statistics of all replicas and ranks;
    under ``no_grad`` there is none.

    All replicas and ranks call it equally often, in the same order, with tensors of one shape and
    dtype. A rank without rows runs its forward without rows, and adds zeros. Micro-batches have
    sums of their own, as with :func:`convert_sync_batchnorm`. Outside of a forward of this package,
    it sums over the ranks of the process group, if there is one.

    Raises:
        ValueError: at a call, the replicas have tensors of different shapes or dtypes.
        RuntimeError: at a call, a replica ended without this call; several replicas called it
            inside of activation checkpointing, whose recomputation is without the others.

    Example:
        >>> add = SumOverRows()
        >>> def error(output, target):  # of outputs whose mean over all rows is subtracted
        ...     mean = add(output.sum(0)) / add(torch.tensor(len(output)))
        ...     return (output - mean - target).pow(2).mean()
        >>> outputs = PerReplica([torch.tensor([[1.0], [2.0]]), torch.tensor([[6.0]])], [2, 1])
        >>> DataParallelCriterion(error, sums_rows=True)(outputs, torch.zeros(3, 1))
        tensor(4.6667)
    """

    def forward(self, tensor: Tensor) -> Tensor:
        """Returns the sum of ``tensor`` over all replicas and ranks."""
        if _rows.get() == NONE:
            raise RuntimeError(
                "SumOverRows was called by a rank without rows, whose forward was not expected to do so, expected one that is an "
                "attribute of the module, and step.add(...) equally often on all ranks"
            )
        if _rows.get() == UNEXPECTED:
            raise RuntimeError(
                "SumOverRows was called by a criterion that was not expected to do so, expected one that is an attribute of the "
                "criterion, or DataParallelCriterion(function, sums_rows=True)"
            )
        refuse_recomputation(self)
        return sum_over_rows(tensor)


def refuse_recomputation(layer: nn.Module) -> None:
    """Raises ``RuntimeError`` if a replica calls a layer that waits for the others in activation
    checkpointing, which calls it again without them.
    """
    is_replica = current_replica() is not None
    was_replica = layer.__dict__.get("_was_replica", False)
    layer.__dict__["_was_replica"] = is_replica
    # The recomputation of reentrant checkpointing does not know its replica.
    is_again = was_replica and not is_replica and current_backward_id() is not None
    if is_again or (is_replica and in_checkpoint()):
        raise RuntimeError(
            f"a {type(layer).__name__} of several replicas would be called again in the backward of one, expected it outside of "
            "activation checkpointing"
        )


def sum_over_rows(tensor: Tensor) -> Tensor:
    """Returns the sum of ``tensor`` over all replicas and ranks of the running forward."""
    if has_torch_function_unary(tensor):
        seen: Tensor = handle_torch_function(sum_over_rows, (tensor,), tensor)
        return seen
    is_alone = current_replica() is None and world_size() == 1
    return tensor.clone() if is_alone or _rows.get() == ALL else _sum(tensor)


def _sum(tensor: Tensor) -> Tensor:
    parts = [part for _, part in exchange(tensor)]
    kinds = {f"{tuple(part.shape)} ({part.dtype})" for part in parts}
    if len(kinds) > 1:
        raise ValueError(
            f"SumOverRows was given {' and '.join(sorted(kinds))} by the replicas, expected one shape and dtype: sum over the "
            "rows first, as in x.sum(0)"
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
    """Tells that code in this block has ``ALL`` or ``NONE`` of the rows, or ``UNEXPECTED`` ones."""
    token = _rows.set(_rows.get() or rows)  # An outer block stays.
    try:
        yield
    finally:
        _rows.reset(token)


def sums_rows(part: object) -> bool:
    """Returns True if a module has a :class:`SumOverRows`."""
    modules = part.modules() if isinstance(part, nn.Module) else ()
    return any(isinstance(module, SumOverRows) for module in modules)
