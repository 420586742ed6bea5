"""Savings on fake tensors: doubles of those that wait for streams of a device, read a device's
kind, or loop over chunks.

All others are applied as they are. The engine has no word of these doubles, which replace names of
its modules in a trace.
"""

import contextlib
import functools
import math
import weakref
from collections.abc import Hashable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # torch has no public module of fake tensors

from ...savings import linear_cross_entropy
from ...savings.offloading import HOST, Host


@contextlib.contextmanager
def traced_host(device: torch.device, rows: int = 1) -> Iterator[None]:
    """Offloads to a fake device in this block, what is large enough in a micro-batch of one row of
    ``rows``.
    """
    token = HOST.set(TracedHost(device, rows))
    try:
        yield
    finally:
        HOST.reset(token)


class _Stream(contextlib.nullcontext[None]):
    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self) -> "_Stream":
        return self


_STREAM = _Stream()


class TracedHost(Host):
    """A fake device in the place of the host.

    Fake devices have one stream each, and everything on it is in order.
    """

    kinds = (*Host.kinds, FakeTensor)

    def __init__(self, device: torch.device, rows: int) -> None:
        self.device = device
        self.rows = rows

    def stream_of(self, device: torch.device) -> Any:
        """Returns the stream of a device; None for the host."""
        return None if device == self.device else _STREAM

    def side_stream(self, device: torch.device) -> Any:
        """Returns the stream of all copies."""
        return _STREAM

    def refer(self, storage: torch.UntypedStorage) -> Hashable:
        """Returns a reference that lets the Python object of a storage end, whose end a trace
        counts as a release.
        """
        return weakref.ref(storage)

    def empty(self, tensor: Tensor) -> Tensor:
        """Allocates memory for a copy of a tensor."""
        return torch.empty_like(tensor, device=self.device)

    def bytes_of(self, tensor: Tensor) -> Tensor:
        """Returns the storage of a tensor as bytes."""
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor.detach().as_strided((count,), (1,), 0).view(torch.uint8)

    def restore(self, loaded: Tensor, saved: Any) -> Tensor:
        """Returns a saved tensor as a view: the fake mode keeps every storage that ``set_`` was
        given.
        """
        view: Tensor = loaded.view(saved.dtype)
        return view.as_strided(saved.size, saved.stride, saved.offset)


@contextlib.contextmanager
def one_chunk(share: float) -> Iterator[None]:
    """Makes the loss without logits run one chunk, as large as those of the largest batch, whatever
    the number of rows.

    The operators of every number of rows are the same. ``share`` is the traced batch as a part of
    the largest one; 0 if that is not known. The names of the module are replaced for the whole
    process, since a replica's criterion has no word of the trace.
    """
    run = linear_cross_entropy._run

    def run_one(*arguments: Any) -> object:
        wanted: tuple[bool, ...] = arguments[-1]
        chunks = functools.partial(_one_chunk, share, 1 + wanted[0] + wanted[1])
        empty = SimpleNamespace(
            linear=lambda rows, weight, bias=None: rows.new_empty(len(rows), len(weight))
        )
        with patch.multiple(linear_cross_entropy, _chunks=chunks, F=empty, _write=lambda *_: None):
            return run(*arguments)

    with patch.object(linear_cross_entropy, "_run", run_one):
        yield


def _one_chunk(
    share: float,
    products: int,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
) -> linear_cross_entropy.Chunks:
    """Yields one chunk.

    A product with a single result has the operations of all rows: ``products`` with the weight.
    """
    size = linear_cross_entropy.rows_per_chunk(weight.size(1))
    operations = len(hidden) * weight.numel() * products
    size = min(size, math.ceil(len(hidden) / share)) if share else size
    torch.mm(
        hidden.new_empty(1, 1).expand(1, operations), hidden.new_empty(1, 1).expand(operations, 1)
    )
    yield slice(0, size), hidden[:1].expand(size, -1), target[:1].expand(size)
