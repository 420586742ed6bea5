"""The replica that computed a tensor, and the rows that it had.

Lists that are made of outputs by hand (``[output.logits for output in outputs]``, ``zip(*outputs)``) lose what a
``PerReplica`` knows. Outputs are noted here, so that it can be found again, also through what was computed from them.
"""

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..runtime.tensors import base_of
from . import nested
from .dims import Dims, leaf_dims

__all__: list[str] = []

NODES = 200  # of the graph, looked at for one tensor


class Origin(NamedTuple):
    """One replica's part of one forward: its number, the rows of all replicas, and the dimension of the rows in the tensor."""

    replica: int
    sizes: tuple[int | None, ...]
    dim: int | None


_known: dict[int, tuple["weakref.ref[torch.Tensor]", Origin]] = {}  # by id: tensors compare by value
_thread = threading.local()


def note(outputs: Sequence[Any], sizes: tuple[int | None, ...], dims: Dims) -> None:
    """Notes where each tensor of ``outputs``, one entry per replica, comes from."""
    _thread.dims = dims
    seen: set[int] = set()
    for index, output in enumerate(outputs):
        if type(output) is torch.Tensor and isinstance(dims, int):  # as most often
            _note(output, Origin(index, sizes, dims), seen)
            continue
        for (_, leaf), dim in zip(nested.leaves(output), leaf_dims(output, dims, 0, "output"), strict=True):
            if isinstance(leaf, torch.Tensor):
                _note(leaf, Origin(index, sizes, dim), seen)


def _note(tensor: torch.Tensor, origin: Origin, seen: set[int]) -> None:
    key = id(tensor)
    if key in seen:  # one tensor of several replicas: whole in each
        _known.pop(key, None)
        return
    seen.add(key)
    _known[key] = weakref.ref(tensor, lambda _: _known.pop(key, None)), origin
    if tensor.grad_fn is not None:
        tensor.grad_fn.metadata[__name__] = origin  # type: ignore[index]  # torch declares the property as a method


def find(tensor: torch.Tensor) -> Origin | None:
    """The origin of a tensor that a replica returned, of a view of one, or of what was computed from those of one replica."""
    origin = _returned(tensor) or _returned(base_of(tensor))
    if origin is not None:
        return origin
    nodes, seen, found = deque([tensor.grad_fn]), set[Any](), set[Origin]()
    while nodes and len(seen) < NODES:
        node = nodes.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if __name__ in node.metadata:  # type: ignore[operator]
            found.add(node.metadata[__name__])  # type: ignore[index]
        else:
            nodes.extend(following for following, _ in node.next_functions)
    return found.pop() if len(found) == 1 else None


def _returned(tensor: torch.Tensor) -> Origin | None:
    """The origin of a tensor that is an output itself."""
    reference, origin = _known.get(id(tensor), (None, None))
    return origin if reference is not None and reference() is tensor else None


def origins(entries: Sequence[Any]) -> list[Origin] | None:
    """The origin of each entry's first tensor; None where one is not known."""
    tensors = [nested.first_tensor(entry) for entry in entries]
    found = [None if tensor is None else find(tensor) for tensor in tensors]
    known = [origin for origin in found if origin is not None]
    return known if len(known) == len(found) else None


def sizes_of(entries: Sequence[Any]) -> list[int | None] | None:
    """The rows of each entry of a list that was made of outputs by hand; None where that is not known.

    Raises:
        ValueError: the entries are not one of each replica, in their order.
    """
    known = origins(entries)
    if known is None:
        return None
    indices = [origin.replica for origin in known]
    if len(set(indices)) == 1 and len(indices) > 1:
        raise ValueError(
            f"the list holds {len(indices)} outputs of one replica, number {indices[0]}, expected one of each replica: for a "
            "model that returns a list, pick from every replica's, as in outputs.map(lambda output: output[0])"
        )
    if indices != list(range(len(known[0].sizes))) or len({origin.sizes for origin in known}) > 1:
        raise ValueError(
            f"the list holds outputs of replicas {', '.join(map(str, indices))} of {len(known[0].sizes)}, expected one of each "
            "in their order: use outputs.map(function), which keeps it"
        )
    return [origin.sizes[origin.replica] for origin in known]


def dims_of(entries: Sequence[Any]) -> Dims:
    """The dimension of the rows in the outputs of the replicas.

    Raises:
        ValueError: a list that was made by hand after a forward whose rows are in another dimension than 0.
    """
    if isinstance(entries, nested.Leaf):
        dims: Dims = entries.dim  # type: ignore[attr-defined]
        return dims
    tensors = [nested.first_tensor(entry) for entry in entries]
    returned = [None if tensor is None else _returned(tensor) for tensor in tensors]
    known = returned if None not in returned else origins(entries)
    # a graph shows where tensors come from; where there can be none, the last forward is all that is known
    has_graph = torch.is_grad_enabled() and all(tensor is None or tensor.is_floating_point() for tensor in tensors)
    last = 0 if has_graph else getattr(_thread, "dims", 0)
    found = {origin.dim for origin in known if origin is not None} if known else {last if isinstance(last, int) else None}
    (only,) = found if len(found) == 1 else (None,)
    if only == 0 or (known is returned and only is not None):
        return only
    raise ValueError(
        "the list was made of outputs whose rows are not all in dimension 0, and does not say where they are now: use "
        "outputs.map(function), which keeps that, or say dim="
    )


def refuse_list(value: Any, place: str) -> None:
    """Raises ``ValueError`` for a plain list or tuple of the outputs of several replicas, which looks like one input."""
    if type(value) not in (list, tuple) or len(value) < 2:
        return
    tensors = [nested.first_tensor(entry) for entry in value]
    found = [None if tensor is None else _returned(tensor) for tensor in tensors]
    indices = [origin.replica for origin in found if origin is not None]
    if len(set(indices)) == len(value):
        raise ValueError(
            f"{place} is a {type(value).__name__} of the outputs of replicas {', '.join(map(str, indices))}, expected a "
            "PerReplica, which says so: pass the outputs as the model returned them, or outputs.map(function) in place of a "
            "comprehension"
        )
