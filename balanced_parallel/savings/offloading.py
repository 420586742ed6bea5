"""Memory of the host in place of that of the devices: for activations, and for the state of an
optimizer.

``offload_activations`` copies saved tensors to pinned memory on a side stream, where they wait for
the backward::

    compute stream | forward 1 | forward 2 | forward 3 | ... | backward 3 | backward 2 | backward 1 |
    side stream                | 1 to host | 2 to host | ... | 1 to device
    on the device    1           1, 2        1, 2, 3           1, 2, 3      1, 2         1

As in ``runtime.streams``, a compute stream waits for a copy before the memory is given back to it,
so peak memory does not depend on timing. In the forward this happens at the copy :data:`AHEAD`
later. In the backward, that many copies start early.

``offload_optimizer`` lets copies on the host take the place of the parameters while the optimizer
steps, by torch's hooks around ``step()``::

    device | gradients                                      parameters
    host   |   gradients --> step() with its state --> parameters

torchao's ``CPUOffloadOptimizer`` copies each gradient in a hook of the backward instead: before
gradients are summed over ranks, divided, unscaled and clipped.
"""

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from typing import NamedTuple
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..runtime import torch_private, values
from ..runtime.devices import current_stream, on_device

AHEAD = 2


class Offloaded(NamedTuple):
    """A saved tensor whose storage is on the host."""

    stored: "Stored"
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class Host:
    """The host, and how its copies see the devices. A trace has another one."""

    device = torch.device("cpu")
    rows = 1  # Bytes are compared with those of so many rows: a trace has any number of them.
    # classes of tensors that can be copied as bytes
    kinds: tuple[type, ...] = (Tensor, nn.Parameter)

    stream_of = staticmethod(current_stream)  # the current stream of a device; None for the host

    def side_stream(self, device: torch.device) -> torch.Stream:
        """Makes a stream for copies."""
        return torch.Stream(device)

    def refer(self, storage: torch.UntypedStorage) -> Hashable:
        """Returns a key for a storage, which does not keep its memory."""
        return torch_private.StorageReference(storage)

    def empty(self, tensor: Tensor) -> Tensor:
        """Allocates pinned memory for a copy of a tensor."""
        return torch.empty_like(tensor, device=self.device, pin_memory=True)

    def bytes_of(self, tensor: Tensor) -> Tensor:
        """Returns the storage of a tensor as bytes: all its views come back with it, in one copy."""
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
            tensor.untyped_storage()
        )

    def restore(self, loaded: Tensor, saved: Offloaded) -> Tensor:
        """Returns a saved tensor of a storage that is on the device again."""
        view = torch.empty(0, dtype=saved.dtype, device=loaded.device)
        return view.set_(loaded.untyped_storage(), saved.offset, saved.size, saved.stride)


_pinned = Host()
# The host of this context. A trace sets another one.
HOST = ContextVar("host", default=_pinned)


class Link:
    """The copies between one device and the host."""

    def __init__(self, device: torch.device, host: Host) -> None:
        self.device = device
        self.host = host
        self.side = host.side_stream(device)
        # The keys are their numbers.
        self.stored = WeakValueDictionary[int, Stored]()
        self._numbers = itertools.count()
        self._leaving = deque[Stored]()

    def store(self, tensor: Tensor, stream: torch.Stream) -> "Stored":
        """Starts to copy the storage of a tensor to the host."""
        self.settle(AHEAD - 1)
        stored = Stored(tensor, stream, self, next(self._numbers))
        self.stored[stored.number] = stored
        self._leaving.append(stored)
        return stored

    def settle(self, left: int = 0) -> None:
        """Gives the memory of the device back, except that of the last ``left`` storages."""
        while len(self._leaving) > left:
            self._leaving.popleft().leave()


class Stored:
    """One storage of a device, with its copy on the host."""

    def __init__(self, tensor: Tensor, stream: torch.Stream, link: Link, number: int) -> None:
        self.link = link
        self.number = number
        self._stream = stream
        self.overwritten = False  # True if it was written to before the copy was complete
        # It keeps the storage, and shares the version counter.
        self._saved: Tensor | None = tensor.detach()
        self._version = torch_private.versions([tensor])
        self._loaded: torch.Event | None = None
        self._on_device: Tensor | None = link.host.bytes_of(tensor)
        self._host = link.host.empty(self._on_device)
        self._copied = self._copy(self._host, self._on_device)

    def leave(self) -> None:
        """Gives the memory of the device back."""
        assert self._saved is not None
        self._stream.wait_event(self._copied)
        self.overwritten = torch_private.versions([self._saved]) != self._version
        self._saved = self._on_device = None

    def load(self, stream: torch.Stream) -> Tensor:
        """Returns the bytes on the device, for use on a stream.

        Copies of the storages saved before it start.
        """
        started = self._start()
        if self._loaded is not None:
            stream.wait_event(self._loaded)
        if stream != self._stream:
            started.record_stream(stream)
        for number in range(self.number - 1, self.number - 1 - AHEAD, -1):
            if (before := self.link.stored.get(number)) is not None:
                before._start()
        return started

    def __del__(self) -> None:
        if self._loaded is not None:
            self._stream.wait_event(self._loaded)  # the copy may not have been used

    def _start(self) -> Tensor:
        if self._on_device is None:
            with on_device(self.link.device, self._stream):
                self._on_device = torch.empty_like(self._host, device=self.link.device)
            self._loaded = self._copy(self._on_device, self._host)
        return self._on_device

    def _copy(self, target: Tensor, source: Tensor) -> torch.Event:
        """Copies after the work that the compute stream has been given so far."""
        side = self.link.side
        side.wait_stream(self._stream)
        with side:
            target.copy_(source, non_blocking=True)
        return side.record_event()


@contextlib.contextmanager
@values.naming_arguments
def offload_activations(*, min_bytes: int | str = "1MiB") -> Iterator[None]:
    """Moves what the forward saves for the backward to pinned memory of the host, in every replica.

    Copies run on a side stream, and the host waits for none. A storage is copied once, however many
    tensors share it. Parameters stay, and so do tensors on the CPU. The backward may run inside or
    after the block. Loss and gradients stay.

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
    with Offload(values.parse_bytes(min_bytes), HOST.get()).surrounding():
        yield


class Offload:
    """The hooks of one block.

    Workers of replicas and threads of autograd call them at the same time.
    """

    def __init__(self, min_bytes: int, host: Host) -> None:
        self.min_bytes = min_bytes * host.rows
        self.host = host
        self._lock = threading.Lock()
        self._links: dict[torch.device, Link] = {}
        self._stored = WeakValueDictionary[tuple[Hashable, int], Stored]()

    def pack(self, tensor: Tensor) -> tuple[Tensor, int] | Offloaded:
        """Hook that autograd calls with each tensor that it saves.

        Returns one that stays with its version.
        """
        stream = self.host.stream_of(tensor.device)
        (version,) = torch_private.versions([tensor])
        if stream is None or self.stays(tensor):
            return tensor.detach(), version  # an output of a node would keep its node alive
        key = self.host.refer(tensor.untyped_storage()), version
        with self._lock:
            if tensor.device not in self._links:
                self._links[tensor.device] = Link(tensor.device, self.host)
            stored = self._stored.get(key)
            if stored is None:
                self._stored[key] = stored = self._links[tensor.device].store(tensor, stream)
        return Offloaded(
            stored, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride()
        )

    def unpack(self, saved: tuple[Tensor, int] | Offloaded) -> Tensor:
        """Hook that autograd calls when it needs a saved tensor."""
        if not isinstance(saved, Offloaded):
            tensor, version = saved
            # torch does not check tensors with hooks.
            if torch_private.versions([tensor]) != [version]:
                raise _modified(tensor.shape)
            return tensor
        if saved.stored.overwritten:
            raise _modified(saved.size)
        stream = self.host.stream_of(saved.stored.link.device)
        assert stream is not None
        with self._lock:
            loaded = saved.stored.load(stream)
        return self.host.restore(loaded, saved)

    @contextlib.contextmanager
    def surrounding(self) -> Iterator[None]:
        """Moves what the block saves. In the end, the memory of all copied storages is given back."""
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            try:
                yield
            finally:
                with self._lock:
                    for link in self._links.values():
                        link.settle()

    def stays(self, tensor: Tensor) -> bool:
        """Returns True for a tensor that is not worth a copy, or cannot be copied as bytes."""
        parameter = isinstance(torch_private.base_of(tensor), nn.Parameter)
        plain = type(tensor) in self.host.kinds and tensor.layout == torch.strided
        if parameter or not plain or tensor.is_conj() or tensor.is_neg():
            return True
        return tensor.untyped_storage().nbytes() < self.min_bytes


def _modified(shape: torch.Size) -> RuntimeError:
    return RuntimeError(
        f"a tensor of shape {tuple(shape)} that the backward needs was modified by an in-place operation after the forward saved "
        "it: replace the operation by one that is not in place"
    )


@values.naming_arguments
def offload_optimizer(optimizer: Optimizer) -> None:
    """Keeps the state of an optimizer on the host, and runs its step there.

    The update is the same, up to rounding.

    Each step copies gradients and parameters to pinned memory of the host, and the parameters back,
    and waits for the copies: 12 bytes of traffic per parameter in float32. With AdamW the host
    holds 16 bytes per parameter: the state, and copies of parameter and gradient. Under torchrun
    each rank has them. ``state_dict()`` stays the same. Parameters on the CPU are updated in place.
    After a ``step()`` that raised an error, clear the gradients with ``zero_grad()`` of the model.

    Args:
        optimizer: an optimizer of whole parameters.

    Raises:
        TypeError: a :class:`BalancedOptimizer`, or sharded parameters. At a step: a closure was
            given.
        ValueError: the optimizer is offloaded already.

    Example:
        >>> with simulate(devices=1) as cluster:
        ...     net = torch.nn.Linear(512, 512).to("sim:0")
        ...     optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        ...     savings.offload_optimizer(optimizer)
        ...     net(torch.ones(2, 512, device="sim:0")).sum().backward()
        ...     optimizer.step()
        ...     [state["exp_avg"].device.type for state in optimizer.state.values()]
        ['cpu', 'cpu']
    """
    if not isinstance(optimizer, Optimizer) or hasattr(optimizer, "shards"):
        raise TypeError(
            f"the optimizer is an object of type {type(optimizer).__name__}, expected an optimizer of whole parameters, such as "
            "torch.optim.AdamW: a BalancedOptimizer spreads its state over the devices"
        )
    if any(
        torch_private.is_sharded(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ):
        raise TypeError(
            "the parameters are shards of FSDP2, expected whole ones: the ranks share the state already"
        )
    if is_offloaded(optimizer):
        raise ValueError(
            "the state of this optimizer is on the host already, expected one call of offload_optimizer"
        )
    HostStep(optimizer, HOST.get())


def is_offloaded(optimizer: Optimizer) -> bool:
    """Returns True after :func:`offload_optimizer`."""
    return optimizer in _offloaded


# A set of this process: torch has no public list of an optimizer's hooks, which a copy of the
# optimizer does not have either.
_offloaded: "WeakSet[Optimizer]" = WeakSet()


class HostStep:
    """The hooks of an optimizer, and the copies of its parameters on the host."""

    def __init__(self, optimizer: Optimizer, host: Host) -> None:
        self.host = host
        self._copies: dict[Tensor, Tensor] = {}
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)
        # torch moves what it loads to the parameters
        optimizer.register_load_state_dict_pre_hook(self._to_host)
        optimizer.register_load_state_dict_post_hook(self._to_devices)
        _offloaded.add(optimizer)

    @torch.no_grad()
    def _begin(
        self,
        optimizer: Optimizer,
        arguments: tuple[object, ...],
        settings: dict[str, object],
    ) -> None:
        if any(value is not None for value in (*arguments[1:], settings.get("closure"))):
            raise TypeError(
                "step() got a closure, whose backward does not reach the copies on the host: expected step()"
            )
        self._to_host(optimizer)
        for parameter, copy in self._copies.items():
            copy.copy_(parameter)  # a checkpoint may have been loaded since the last step
            copy.grad = self._gradient(parameter)

    @torch.no_grad()
    def _end(self, optimizer: Optimizer, *_: object) -> None:
        self._to_devices(optimizer)
        for parameter, copy in self._copies.items():
            if copy.grad is not None:
                parameter.copy_(copy)

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        gradient = parameter.grad
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            return gradient.to(self.host.device)
        return self.host.empty(gradient).copy_(gradient)

    def _to_host(self, optimizer: Optimizer, state_dict: object = None) -> None:
        """Lets copies take the place of the parameters, in the groups and as keys of the state."""
        self._to_devices(optimizer)  # A step may have raised an error.
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        for parameter in parameters:
            if self.host.stream_of(parameter.device) is not None and parameter not in self._copies:
                self._copies[parameter] = nn.Parameter(
                    self.host.empty(parameter.detach()), parameter.requires_grad
                )
        _replace(optimizer, self._copies)
        for copy in self._copies.values():
            if copy in optimizer.state:
                optimizer.state[copy] = torch_private.map_tensors(
                    lambda tensor: tensor.to(self.host.device), optimizer.state[copy]
                )

    def _to_devices(self, optimizer: Optimizer) -> None:
        _replace(optimizer, {copy: parameter for parameter, copy in self._copies.items()})


def _replace(optimizer: Optimizer, others: dict[Tensor, Tensor]) -> None:
    """Replaces parameters of an optimizer, which keeps its settings and its state."""
    for group in optimizer.param_groups:
        group["params"] = [others.get(parameter, parameter) for parameter in group["params"]]
    state = {others.get(key, key): value for key, value in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(state)
