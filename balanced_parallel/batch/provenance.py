"""Origin of tensors: the replica that computed a tensor, and its number of rows.

A list that a user makes of outputs (``[output.logits for output in outputs]``, ``zip(*outputs)``) loses the sizes of the
``PerReplica``. So outputs are recorded here. The autograd graph leads back to them from the tensors computed from them.
"""

import functools
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..runtime.tensors import base_of, is_differentiable
from . import nested
from .dims import Dims, leaf_dims

__all__: list[str] = []

MAX_NODES = 200  # nodes of the autograd graph that are visited for one tensor


class Origin(NamedTuple):
    """Origin of a tensor in one forward.

    Attributes:
        replica: index of the replica.
        sizes: number of rows of each replica.
        dim: dimension of the rows in the tensor.
    """

    replica: int
    sizes: tuple[int | None, ...]
    dim: int | None


_known: dict[int, tuple["weakref.ref[torch.Tensor]", Origin]] = {}  # by id: tensors compare by value
_thread = threading.local()


def record(outputs: Sequence[Any], sizes: tuple[int | None, ...], dims: Dims) -> None:
    """Records the origin of each tensor in ``outputs``, which has one entry per replica."""
    _thread.dims = dims
    seen: set[int] = set()
    for index, output in enumerate(outputs):
        if type(output) is torch.Tensor and isinstance(dims, int):  # shortcut for the most frequent output
            _record(output, Origin(index, sizes, dims), seen)
            continue
        for (_, leaf), dim in zip(nested.leaves(output), leaf_dims(output, dims, 0, "output"), strict=True):
            if isinstance(leaf, torch.Tensor):
                _record(leaf, Origin(index, sizes, dim), seen)


def _record(tensor: torch.Tensor, origin: Origin, seen: set[int]) -> None:
    key = id(tensor)
    if key in seen:  # the same tensor in several replicas has no rows of its own
        _known.pop(key, None)
        return
    seen.add(key)
    # pop(key, reference), without Python code: Python drops what is raised in a callback, a KeyboardInterrupt too
    _known[key] = weakref.ref(tensor, functools.partial(_known.pop, key)), origin
    if tensor.grad_fn is not None:
        tensor.grad_fn.metadata[__name__] = origin  # type: ignore[index]  # torch declares the property as a method


def find(tensor: torch.Tensor) -> Origin | None:
    """Returns the origin of an output, of a view of one, or of a tensor computed from the outputs of one replica."""
    origin = _recorded(tensor) or _recorded(base_of(tensor))
    if origin is not None:
        return origin
    nodes, seen, found = deque([tensor.grad_fn]), set[Any](), set[Origin]()
    while nodes and len(seen) < MAX_NODES:
        node = nodes.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if __name__ in node.metadata:  # type: ignore[operator]
            found.add(node.metadata[__name__])  # type: ignore[index]
        else:
            nodes.extend(next_node for next_node, _ in node.next_functions)
    return found.pop() if len(found) == 1 else None


def _recorded(tensor: torch.Tensor) -> Origin | None:
    """Returns the origin of a tensor that is itself an output, otherwise None."""
    reference, origin = _known.get(id(tensor), (None, None))
    return origin if reference is not None and reference() is tensor else None


def origins(entries: Sequence[Any]) -> list[Origin] | None:
    """Returns the origin of the first tensor of each entry, or None if one of them is unknown."""
    tensors = [nested.first_tensor(entry) for entry in entries]
    found = [None if tensor is None else find(tensor) for tensor in tensors]
    known = [origin for origin in found if origin is not None]
    return known if len(known) == len(found) else None


def sizes_of(entries: Sequence[Any]) -> list[int | None] | None:
    """Returns the number of rows of each entry of a list that a user made of outputs, or None if the origin is unknown.

    Raises:
        ValueError: if the list does not have one entry per replica, in the order of the replicas.
    """
    known = origins(entries)
    if known is None:
        return None
    indices = [origin.replica for origin in known]
    if len(set(indices)) == 1 and len(indices) > 1:
        raise ValueError(
            f"the list contains {len(indices)} outputs of one replica, number {indices[0]}, expected one of each replica: for a "
            "model that returns a list, select from the output of each replica, as in outputs.map(lambda output: output[0])"
        )
    if indices != list(range(len(known[0].sizes))) or len({origin.sizes for origin in known}) > 1:
        raise ValueError(
            f"the list contains outputs of replicas {', '.join(map(str, indices))} of {len(known[0].sizes)}, expected one of "
            "each, in order: use outputs.map(function), which keeps the order"
        )
    return [origin.sizes[origin.replica] for origin in known]


def rows_of(entries: Sequence[Any]) -> list[int | None] | None:
    """Returns the number of rows of the replica that each entry comes from, or None if the origin of one is unknown."""
    known = origins(entries)
    return None if known is None else [origin.sizes[origin.replica] for origin in known]


def dims_of(entries: Sequence[Any]) -> Dims:
    """Returns the dimension of the rows in the outputs of the replicas.

    Raises:
        ValueError: if a user made the list after a forward whose rows are not in dimension 0.
    """
    if isinstance(entries, nested.Leaf):
        dims: Dims = entries.dim  # type: ignore[attr-defined]
        return dims
    tensors = [nested.first_tensor(entry) for entry in entries]
    recorded = [None if tensor is None else _recorded(tensor) for tensor in tensors]
    known = recorded if None not in recorded else origins(entries)
    # The graph gives the origin of a tensor. A tensor that cannot have a graph is assumed to come from the last forward.
    has_graph = torch.is_grad_enabled() and all(tensor is None or is_differentiable(tensor) for tensor in tensors)
    last = 0 if has_graph else getattr(_thread, "dims", 0)
    found = {origin.dim for origin in known if origin is not None} if known else {last if isinstance(last, int) else None}
    (only,) = found if len(found) == 1 else (None,)
    if only == 0 or (known is recorded and only is not None):
        return only
    raise ValueError(
        "the list was made of outputs whose rows are not all in dimension 0, so the dimension of its rows is unknown: use "
        "outputs.map(function), which keeps it, or give dim="
    )


def refuse_list(value: Any, place: str) -> None:
    """Raises ``ValueError`` if ``value`` is a plain list or tuple of the outputs of several replicas.

    A model would take it for one input.
    """
    if type(value) not in (list, tuple) or len(value) < 2:
        return
    tensors = [nested.first_tensor(entry) for entry in value]
    found = [None if tensor is None else _recorded(tensor) for tensor in tensors]
    indices = [origin.replica for origin in found if origin is not None]
    if len(set(indices)) == len(value):
        raise ValueError(
            f"{place} is a {type(value).__name__} of the outputs of replicas {', '.join(map(str, indices))}, expected a "
            "PerReplica: pass the outputs as the model returned them, or outputs.map(function) instead of a comprehension"
        )
