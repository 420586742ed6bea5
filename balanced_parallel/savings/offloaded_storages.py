"""Storages of activations in pinned memory of the host, copied there and back on a side stream.

::

    compute stream | forward 1 | forward 2 | forward 3 | ... | backward 3 | backward 2 | backward 1 |
    side stream                | 1 to host | 2 to host | ... | 1 to device
    on the device    1           1, 2        1, 2, 3           1, 2, 3      1, 2         1

As in ``runtime.streams``, a compute stream waits for a copy before the memory is given back to it, so peak memory does not depend
on timing. In the forward this happens at the copy :data:`AHEAD` later. In the backward, that many copies start early.
"""

import threading
import weakref
from collections import deque

import torch
from torch import Tensor

from ..runtime.devices import on_device
from ..runtime.tensors import versions

__all__: list[str] = []

AHEAD = 2


class Link:
    """The copies between one device and the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = self.make_side_stream()
        self.lock = threading.RLock()  # replicas on one device run in several threads
        self._leaving: deque[tuple[Stored, Tensor]] = deque()
        self._loaded: list[weakref.ref[Stored]] = []
        self._last: weakref.ref[Stored] | None = None

    def make_side_stream(self) -> torch.Stream:
        """Makes the stream of the copies."""
        return torch.Stream(self.device)

    def bytes_of(self, tensor: Tensor) -> Tensor:
        """Returns a storage as bytes: all its views come back with it, in one copy."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(tensor.untyped_storage())

    def empty_on_host(self, size: int) -> Tensor:
        """Allocates bytes of pinned memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def store(self, tensor: Tensor, stream: torch.Stream) -> "Stored":
        """Starts to copy the storage of a tensor to the host."""
        self.settle(AHEAD - 1)
        stored = Stored(tensor, stream, self, self._last)
        self._last = weakref.ref(stored)
        self._leaving.append((stored, tensor.detach()))  # which keeps the storage, and shares the version counter
        return stored

    def settle(self, left: int = 0) -> None:
        """Gives the memory of the device back, except that of the last ``left`` storages."""
        with self.lock:
            while len(self._leaving) > left:
                stored, tensor = self._leaving.popleft()
                stored.leave(overwritten=versions([tensor]) != [stored.version])
                del tensor

    def note_loaded(self, stored: "Stored") -> None:
        """Records a storage that is on the device again."""
        self._loaded.append(weakref.ref(stored))

    def end_backward(self) -> None:
        """Gives back all memory of the device that a backward has needed, also if the graph stays."""
        with self.lock:
            self.settle()
            while self._loaded:
                if (stored := self._loaded.pop()()) is not None:
                    stored.drop()


class Stored:
    """One storage of a device, with its copy on the host.

    Attributes:
        device: of the storage.
        version: version counter when it was saved.
        overwritten: True if it was written to before the copy was complete.
    """

    def __init__(self, tensor: Tensor, stream: torch.Stream, link: Link, previous: "weakref.ref[Stored] | None") -> None:
        (self.version,) = versions([tensor])
        self.overwritten = False
        self.device = link.device
        self._stream, self._link, self._previous = stream, link, previous
        self._on_device: Tensor | None = link.bytes_of(tensor)
        self._host = link.empty_on_host(tensor.untyped_storage().nbytes())
        self._copied = self._copy(self._host, self._on_device)
        self._loaded: torch.Event | None = None

    def leave(self, *, overwritten: bool) -> None:
        """Gives the memory of the device back."""
        self._stream.wait_event(self._copied)
        self.overwritten = overwritten
        self._on_device = None

    def load(self, stream: torch.Stream) -> Tensor:
        """Returns the bytes on the device, for use on a stream. Copies of the storages saved before it start."""
        found = self._start()
        if self._loaded is not None:
            stream.wait_event(self._loaded)
        if stream != self._stream:
            found.record_stream(stream)
        following = self._before()
        for _ in range(AHEAD):
            if following is not None:
                following._start()
                following = following._before()
        return found

    def drop(self) -> None:
        """Gives the memory of the device back after a backward."""
        if self._loaded is not None:
            self._stream.wait_event(self._loaded)  # the copy may not have been used
            self._on_device = self._loaded = None

    def __del__(self) -> None:
        self.drop()

    def _before(self) -> "Stored | None":
        return None if self._previous is None else self._previous()

    def _start(self) -> Tensor:
        if self._on_device is None:
            with on_device(self._link.device, self._stream):
                self._on_device = torch.empty_like(self._host, device=self._link.device)
            self._loaded = self._copy(self._on_device, self._host)
            self._link.note_loaded(self)
        return self._on_device

    def _copy(self, target: Tensor, source: Tensor) -> torch.Event:
        """Copies after the work that the compute stream has been given so far."""
        side = self._link.side
        side.wait_stream(self._stream)
        with side:
            target.copy_(source, non_blocking=True)
        return side.record_event()
