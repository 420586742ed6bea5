"""``offload_activations``: saved tensors wait for the backward in the memory of the host."""

import threading
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..runtime import autograd
from ..runtime.byte_sizes import parse_bytes
from ..runtime.devices import current_stream
from ..runtime.tensors import StorageReference, base_of, versions
from .offloaded_storages import Link, Stored

__all__: list[str] = []

MIN_BYTES = "1MiB"


@contextmanager
def offload_activations(*, min_bytes: int | str = MIN_BYTES) -> Iterator[None]:
    """Moves what the forward saves for the backward to pinned memory of the host, in every replica.

    Copies run on a side stream, and the host waits for none. A storage is copied once, however many tensors share it.
    Parameters stay, and so do tensors on the CPU. The backward copies tensors back shortly before it needs them. It may run
    inside or after the block. Loss and gradients stay the same.

    Unlike ``torch.autograd.graph.save_on_cpu``, the block does not copy parameters, nor copy on the compute stream.

    Args:
        min_bytes: smaller storages stay on the device.

    Raises:
        RuntimeError: in the backward, if a saved tensor was modified by an in-place operation.

    Example:
        >>> net = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
        >>> with simulate(devices=1) as cluster:
        ...     model = DataParallelModel(net.to("sim:0"))
        ...     with savings.offload_activations(min_bytes="64KiB"):
        ...         loss = model(torch.ones(4096, 256)).gather().mean()
        ...     loss.backward()
        >>> cluster.moved["sim:0", "cpu"]  # the input and the output of tanh, 4 MiB each
        8388608
    """
    offload = Offload(parse_bytes(min_bytes))
    with torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack):
        try:
            yield
        finally:
            offload.settle()


class _Kept(NamedTuple):
    """A saved tensor that stays. Not the tensor itself: an output of a node would keep its node alive."""

    tensor: Tensor
    version: int


class Offloaded(NamedTuple):
    """A saved tensor whose storage is on the host."""

    stored: Stored
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class Offload:
    """The hooks of one block. Workers of replicas and threads of autograd call them at the same time."""

    def __init__(self, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self._lock = threading.Lock()
        self._links: dict[torch.device, Link] = {}
        self._stored: weakref.WeakValueDictionary[tuple[Hashable, int], Stored] = weakref.WeakValueDictionary()
        self._backwards: set[int] = set()

    def pack(self, tensor: Tensor) -> _Kept | Offloaded:
        """Hook that autograd calls with each tensor that it saves."""
        stream = self.stream_of(tensor.device)
        (version,) = versions([tensor])
        if stream is None or self.stays(tensor):
            return _Kept(tensor.detach(), version)
        link = self._link(tensor.device)
        with link.lock:
            key = self.refer(tensor.untyped_storage()), version
            stored = self._stored.get(key)
            if stored is None:
                self._stored[key] = stored = link.store(tensor, stream)
        return Offloaded(stored, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def unpack(self, saved: _Kept | Offloaded) -> Tensor:
        """Hook that autograd calls when it needs a saved tensor."""
        if isinstance(saved, _Kept):
            if versions([saved.tensor]) != [saved.version]:  # torch does not check tensors with hooks
                raise _modified(saved.tensor.shape)
            return saved.tensor
        link = self._link(saved.stored.device)
        with link.lock:
            if saved.stored.overwritten:
                raise _modified(saved.size)
            stream = self.stream_of(link.device)
            assert stream is not None
            loaded = saved.stored.load(stream)
        self._end_with_backward()
        return self.restore(loaded, saved)

    def settle(self) -> None:
        """Ends the block: the memory of all copied storages is given back."""
        for link in self._links.values():
            link.settle()

    def restore(self, loaded: Tensor, saved: Offloaded) -> Tensor:
        """Returns a saved tensor of a storage that is on the device again."""
        made = torch.empty(0, dtype=saved.dtype, device=loaded.device)
        return made.set_(loaded.untyped_storage(), saved.offset, saved.size, saved.stride)

    def stream_of(self, device: torch.device) -> torch.Stream | None:
        """Returns the current stream of a device; None for the CPU."""
        return current_stream(device)

    def refer(self, storage: torch.UntypedStorage) -> Hashable:
        """Returns a key for a storage, which does not keep its memory."""
        return StorageReference(storage)

    def make_link(self, device: torch.device) -> Link:
        """Makes the copies between a device and the host."""
        return Link(device)

    def stays(self, tensor: Tensor) -> bool:
        """Returns True for a tensor that is not worth a copy, or cannot be copied as bytes."""
        parameter = isinstance(base_of(tensor), nn.Parameter)
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if parameter or not plain or tensor.is_conj() or tensor.is_neg():
            return True
        return tensor.untyped_storage().nbytes() < self.min_bytes

    def _link(self, device: torch.device) -> Link:
        with self._lock:
            if device not in self._links:
                self._links[device] = self.make_link(device)
            return self._links[device]

    def _end_with_backward(self) -> None:
        backward = autograd.current_backward_id()
        with self._lock:
            if backward is None or backward in self._backwards:
                return
            self._backwards.add(backward)

        def end() -> None:
            self._backwards.discard(backward)
            for link in self._links.values():
                link.end_backward()

        autograd.run_after_backward(end)


def _modified(shape: torch.Size) -> RuntimeError:
    return RuntimeError(
        f"a tensor of shape {tuple(shape)} that the backward needs was modified by an in-place operation after the forward saved "
        "it: replace the operation by one that is not in place"
    )
