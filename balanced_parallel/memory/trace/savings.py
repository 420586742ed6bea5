"""Functions of ``balanced_parallel.savings`` in a trace: they change the fake copies, never the objects of the caller.

``offload_activations`` runs on fake devices too: the same copies, without streams.
"""

import contextlib
import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.torch_private import base_of, storage_id
from ...runtime.values import parse_bytes
from ...savings.checkpointing import checkpoint_activations
from ...savings.linear_cross_entropy import chunks
from ...savings.lm_heads import replace_lm_head
from ...savings.offloading import MIN_BYTES, Link, Offload, Offloaded
from .allocations import Count

TRACED_SAVINGS = ("replace_lm_head", "checkpoint_activations", "offload_activations")  # in the order in which they are applied


def check_savings(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names in the order in which they are applied."""
    requested = [names] if isinstance(names, str) else list(names)
    for name in requested:
        if name not in TRACED_SAVINGS:
            raise ValueError(
                f"savings has {name!r}, expected functions of balanced_parallel.savings: {', '.join(TRACED_SAVINGS)}"
            )
    return tuple(name for name in TRACED_SAVINGS if name in requested)


def change_module(module: nn.Module, names: Iterable[str]) -> None:
    """Applies the savings that change a module."""
    if "replace_lm_head" in names:
        replace_lm_head(module)
    if "checkpoint_activations" in names:
        checkpoint_activations(module)


@contextlib.contextmanager
def around_update(names: Iterable[str], host: torch.device, count: Count) -> Iterator[None]:
    """Applies the savings that surround an update. ``host`` is the fake device of the host."""
    token = chunks.set(count.first_chunk)
    try:
        with _offloaded(host) if "offload_activations" in names else contextlib.nullcontext():
            yield
    finally:
        chunks.reset(token)


@contextlib.contextmanager
def _offloaded(host: torch.device) -> Iterator[None]:
    offload = TracedOffload(host)
    with torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack):
        yield
    offload.settle()


class TracedOffload(Offload):
    """The hooks of one block. Its devices have one stream each, on which everything is in order."""

    def __init__(self, host: torch.device) -> None:
        super().__init__(parse_bytes(MIN_BYTES))
        self.host = host

    def stream_of(self, device: torch.device) -> Any:
        """Returns a stream that has nothing to wait for."""
        return _STREAM

    def refer(self, storage: torch.UntypedStorage) -> Hashable:
        """Returns a key that lets the Python object of a storage end, whose end a trace counts as a release."""
        return _Reference(storage)

    def make_link(self, device: torch.device) -> Link:
        """Makes the copies between a fake device and the fake host."""
        return _TracedLink(device, _STREAM, self.host)

    def restore(self, loaded: Tensor, saved: Offloaded) -> Tensor:
        """Returns a view: the fake mode keeps every storage that ``set_`` was given."""
        return loaded.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)

    def stays(self, tensor: Tensor) -> bool:
        """Returns True for parameters, small tensors, and tensors of the host."""
        is_small = tensor.untyped_storage().nbytes() < self.min_bytes
        return is_small or tensor.device == self.host or isinstance(base_of(tensor), nn.Parameter)


class _Reference:
    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._number = storage_id(storage)
        self._storage = weakref.ref(storage)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reference) and (storage := self._storage()) is not None and storage is other._storage()

    def __hash__(self) -> int:
        return self._number


class _TracedLink(Link):
    def __init__(self, device: torch.device, side: Any, host: torch.device) -> None:
        super().__init__(device, side)
        self._host = host

    def bytes_of(self, tensor: Tensor) -> Tensor:
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor.detach().as_strided((count,), (1,), 0).view(torch.uint8)

    def empty_on_host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._host)


class _Stream(contextlib.nullcontext[None]):
    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> "_Stream":
        return self


_STREAM = _Stream()
