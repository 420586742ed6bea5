"""``simulate``: devices ``sim:0``, ``sim:1``, ... for the duration of a ``with`` block, with their
memory and traffic.

The native ledger counts bytes, and detects inputs, activations, and waits of the host: calls for
which a GPU would have to finish its work first. Hooks label the tensors of modules and optimizers.
"""

import ctypes
import functools
import inspect
import itertools
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager
from enum import IntEnum
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.cuda import nccl
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import _functions
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.backend_registration import rename_privateuse1_backend

from ..runtime import torch_private, transport, values
from . import device_module
from .compilation import LISTENER, load_native

MAX_DEVICES = 64  # kDevices of native/ledger.h
NO_LIMIT = 2**50  # 1 PiB, more than any simulation reaches
Memory = int | str | Sequence[int | str | None] | None
_active = threading.Lock()
T = TypeVar("T")
_LEGEND = (
    "moved in, moved out: copies to and from this GPU since the start.\n"
    "waits of the host: calls for which it would wait for this GPU, in each of the last eight steps, listed in cluster.waits. "
    "Those after the last update are in a step more."
)


def _kept(read: Callable[["Cluster"], T]) -> Callable[["Cluster"], T]:
    """Returns a function that has its last result after the end of a cluster."""

    @functools.wraps(read)
    def read_or_kept(cluster: "Cluster") -> T:
        ended = cluster._ended
        return ended[read.__name__] if ended else read(cluster)

    return read_or_kept


class Cluster:
    """Simulated devices of one :func:`simulate` block.

    All numbers can still be read after the block.

    Attributes:
        devices: ``sim:0`` and so on.
        memory: capacity of each device in bytes; ``None`` means no limit.
    """

    def __init__(self, memory: Sequence[int | None], native: ctypes.CDLL) -> None:
        self.devices = [torch.device("sim", index) for index in range(len(memory))]
        self.memory = list(memory)
        self._native = native
        self._labels = MemoryLabels(native)
        self._waits = Waits(self._labels)
        self._ended: dict[str, Any] = {}  # The numbers at the end.
        self._names = dict(enumerate(map(str, self.devices))) | {MAX_DEVICES: "cpu"}

    @property
    @_kept
    def live(self) -> list[int]:
        """Bytes in use now, per device.

        Each allocation is rounded up to 512 bytes, as in torch's CUDA caching allocator.
        """
        return [self._native.simulation_live(device.index) for device in self.devices]

    @property
    @_kept
    def peak(self) -> list[int]:
        """Largest number of bytes in use at one time, per device, since the start or
        :meth:`reset_peak`.
        """
        return [self._native.simulation_peak(device.index) for device in self.devices]

    @property
    @_kept
    def moved(self) -> Counter[tuple[str, str]]:
        """Bytes copied so far, by source and target: ``moved["cpu", "sim:0"]``.

        Subtract two values to measure a section.
        """
        places = self._names.items()
        moved = {
            (source, target): self._native.simulation_moved(i, j)
            for i, source in places
            for j, target in places
        }
        return Counter({ends: count for ends, count in moved.items() if count})

    @property
    @_kept
    def copies(self) -> list[tuple[str, str]]:
        """Source and target of all copies so far, in order."""
        size = self._native.simulation_copies(0, 0, None)
        codes = (ctypes.c_int * size)()
        self._native.simulation_copies(0, size, codes)
        return [
            (self._names[ends // (MAX_DEVICES + 1)], self._names[ends % (MAX_DEVICES + 1)])
            for ends in codes
        ]

    @property
    def waits(self) -> "list[Wait]":
        """Calls for which a GPU would have made the host wait, in their order, the last 10,000 of
        them. See :class:`Wait`.
        """
        return list(self._waits.record)

    def forbidding_waits(self) -> AbstractContextManager[None]:
        """Returns a context manager that raises ``RuntimeError`` at a wait, with its file and line
        and a way to avoid it.
        """
        return self._waits.forbidding()

    @property
    @_kept
    def allocations(self) -> int:
        """Number of allocations so far, on all devices."""
        return int(self._native.simulation_allocations())

    def fail_allocation(self, number: int) -> None:
        """Makes one allocation fail with ``torch.OutOfMemoryError``, whatever the capacity.

        Those after it succeed.

        Args:
            number: of the allocation, counted from now on over all devices. 1 is the next.
        """
        if not isinstance(number, int) or number < 1:
            raise ValueError(
                f"fail_allocation({number!r}), expected 1 for the next allocation, or a larger number"
            )
        self._must_run("allocations")
        self._native.simulation_fail_allocation(number)

    def reset_peak(self) -> None:
        """Restarts the measurement of :attr:`peak` and :meth:`categories`.

        After the block it raises ``RuntimeError``.
        """
        self._must_run("peaks")
        self._native.simulation_reset_peak()

    def categories(self, device: int) -> dict[str, int]:
        """Returns the bytes of each category at the peak of one device.

        They add up to its ``peak``.

        ``"parameters"`` (with buffers), ``"gradients"`` (the ``grad`` of parameters), ``"optimizer
        state"``, ``"inputs"`` (copied from the CPU, or created on the device from no other tensor),
        ``"activations"`` (results of operators in a forward) and ``"temporaries"`` (gradients of
        activations, and other tensors of a backward or an update).

        Args:
            device: index of the device.
        """
        index = range(len(self.devices))[device]
        if self._ended:
            parts: list[dict[str, int]] = self._ended["categories"]
            return parts[index]
        self._labels.label_gradients()
        counts = (ctypes.c_int64 * len(Category))()
        self._native.simulation_categories(index, counts)
        return {category.title: counts[category] for category in Category}

    def __str__(self) -> str:
        """Returns a table with one row per device: bytes now, at the peak, by category, and moved;
        and the waits in each of the last steps.
        """
        return f"{self._table('simple')}\n\n{_LEGEND}"

    def _repr_html_(self) -> str:
        """Returns the table as HTML, for notebooks."""
        return self._table("html")

    def _table(self, style: str) -> str:
        moved = self.moved
        rows = []
        for index, (device, memory) in enumerate(
            zip(map(str, self.devices), self.memory, strict=True)
        ):
            parts = self.categories(index)
            into = sum(count for (_, target), count in moved.items() if target == device)
            out = sum(count for (source, _), count in moved.items() if source == device)
            counts = [self.live[index], self.peak[index], *parts.values(), into, out]
            waits = self._waits.per_step(self.devices[index])
            rows.append(
                [
                    device,
                    "no limit" if memory is None else values.format_bytes(memory),
                    *map(values.format_bytes, counts),
                    ", ".join(map(str, waits)),
                ]
            )
        headers = [
            "device",
            "memory",
            "now",
            "peak",
            *(category.title for category in Category),
            "moved in",
            "moved out",
            "waits of the host",
        ]
        return tabulate(rows, headers, tablefmt=style, stralign="right")

    def _must_run(self, numbers: str) -> None:
        if self._ended:
            raise RuntimeError(
                f"the simulate() block has ended: {numbers} can be read, expected changes inside of it"
            )

    def _end(self) -> None:
        categories = [self.categories(index) for index in range(len(self.devices))]
        names = "live", "peak", "moved", "copies", "allocations"
        self._ended = {name: getattr(self, name) for name in names} | {"categories": categories}


class Simulation(ContextDecorator, AbstractContextManager[Cluster, bool | None]):
    """The block that :func:`simulate` returns. Devices exist inside of it."""

    def __init__(self, block: AbstractContextManager[Cluster, bool | None]) -> None:
        self._block = block

    def __enter__(self) -> Cluster:
        return self._block.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._block.__exit__(*error)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"simulate() has no {name} outside of its block, expected with simulate(...) as cluster: cluster.{name}"
        )


@values.naming_arguments
def simulate(devices: int, memory: Memory = None, *, strict: bool = True) -> Simulation:
    """Simulates accelerators ``sim:0`` to ``sim:N-1`` in this process.

    Kernels run on the CPU, and memory is counted in bytes.

    Simulated devices behave like GPUs in placement, memory and traffic. torch treats them as its
    accelerator: ``DataParallelModel(net)``, ``torch.accelerator`` and ``torch.nn.DataParallel``
    find them. Results are bitwise equal to those of the CPU. Under torchrun, each rank has its own
    cluster. On first use a C++ extension is compiled, in less than a minute.

    Streams are checked: it is an error to use or free memory on a stream that has not waited for
    another stream that uses it. Speed, workspaces inside a kernel (such as cuDNN's), fragmentation
    and the traffic of torch.distributed are not simulated.

    Args:
        devices: number of devices, at most 64.
        memory: capacity of each device in bytes (``24 * 2**30`` or ``"24GiB"``), or a list with one
            capacity per device. ``None`` means no limit. An allocation above it raises
            ``torch.OutOfMemoryError``; earlier allocations stay valid.
        strict: if True, operators on tensors of different devices raise an error, as on GPUs. If
            False, tensors are copied, with a count in :attr:`Cluster.moved` and a warning. One run
            then finds all such operators of a script.

    Returns:
        A context manager that returns a :class:`Cluster`. After the block, tensors on its devices
        can only be freed or copied to the CPU. The device type ``sim`` and the module ``torch.sim``
        remain, so ``torch.accelerator.current_accelerator()`` returns it from then on: on a machine
        with GPUs, simulate in a process of its own.

    Raises:
        RuntimeError: if a cluster is active already, another library uses the out-of-tree device
            type of torch, or the extension cannot be compiled.

    Example:
        >>> with simulate(devices=2, memory="1GiB") as cluster:
        ...     shards = [shard.shape for shard in scatter(torch.zeros(6, 256))]
        >>> shards
        [torch.Size([3, 256]), torch.Size([3, 256])]
        >>> cluster.peak
        [3072, 3072]
        >>> cluster.moved["cpu", "sim:1"]
        3072
    """
    return Simulation(_simulate(devices, memory, strict))


@contextmanager
def _simulate(devices: int, memory: Memory, strict: bool) -> Iterator[Cluster]:
    limits = _limits(devices, memory)
    values.check_type("strict", strict, bool, "True or False")
    if not _active.acquire(blocking=False):
        raise RuntimeError(
            "simulate() inside simulate(): torch supports one type of simulated devices, leave the first block before"
        )
    with ExitStack() as undo:
        undo.callback(_active.release)
        native = load_native()
        _rename_backend()
        cluster = Cluster(limits, native)
        capacities = (ctypes.c_int64 * devices)(
            *(min(limit or NO_LIMIT, NO_LIMIT) for limit in limits)
        )
        native.simulation_start(devices, capacities, strict, torch.initial_seed() % 2**64)
        undo.callback(native.simulation_stop)
        dist.Backend.default_device_backend_map["sim"] = "gloo"
        undo.callback(dist.Backend.default_device_backend_map.pop, "sim")
        dist.Backend.backend_capability["gloo"].append("sim")
        undo.callback(dist.Backend.backend_capability["gloo"].remove, "sim")
        undo.enter_context(cluster._labels.watching())
        undo.enter_context(_comm_for_simulated_devices(cluster._labels))
        undo.callback(native.simulation_listen, LISTENER())  # a null pointer
        native.simulation_listen(cluster._waits.listener)
        undo.callback(cluster._end)
        yield cluster


def _limits(devices: int, memory: Memory) -> list[int | None]:
    """Returns the capacity of each device in bytes."""
    if not isinstance(devices, int) or isinstance(devices, bool) or not 1 <= devices <= MAX_DEVICES:
        raise ValueError(f"devices={devices!r}, expected an integer from 1 to {MAX_DEVICES}")
    sizes = (
        [memory] * devices
        if isinstance(memory, str) or not isinstance(memory, Sequence)
        else list(memory)
    )
    if len(sizes) != devices:
        raise ValueError(
            f"memory has {len(sizes)} entries for {devices} devices, expected one size for all, or one per device"
        )
    return [None if size is None else values.parse_bytes(size) for size in sizes]


def _rename_backend() -> None:
    """Renames the out-of-tree device type of torch to ``sim``."""
    name = torch._C._get_privateuse1_backend_name()
    if name == "privateuseone":
        rename_privateuse1_backend("sim")
        torch._register_device_module("sim", device_module)
    elif name != "sim":
        raise RuntimeError(
            f"another library uses torch's out-of-tree device type, {name!r}: simulate in a process that does not import it"
        )


def _broadcast_coalesced(
    labels: "MemoryLabels",
    tensors: Sequence[Tensor],
    devices: Sequence[int],
    buffer_size: int,
) -> list[list[Tensor]]:
    """Copies tensors to all devices through buffers of ``buffer_size`` bytes.

    Copies from one buffer share its memory.
    """
    copies = transport.copies(
        tensors, [torch.device("sim", device) for device in devices[1:]], buffer_size
    )
    labels.label(itertools.chain(*copies), Category.PARAMETERS)
    return [list(tensors), *copies]


def _scatter(
    tensor: Tensor,
    devices: Sequence[int],
    sizes: Sequence[int] | None,
    dim: int,
    streams: object,
) -> tuple[Tensor, ...]:
    """Splits a tensor over the devices."""
    shards = tensor.split(list(sizes), dim) if sizes else tensor.chunk(len(devices), dim)
    return tuple(shard.to(f"sim:{device}") for shard, device in zip(shards, devices, strict=False))


def _gather(tensors: Sequence[Tensor], dim: int, device: int | None) -> Tensor:
    """Concatenates tensors on a device, or on the CPU for -1."""
    sizes = [tensor.size(dim) for tensor in tensors]
    shape = list(tensors[0].shape)
    shape[dim] = sum(sizes)
    target = "cpu" if device == -1 else "sim" if device is None else f"sim:{device}"
    result = torch.empty(shape, dtype=tensors[0].dtype, device=target)
    for view, tensor in zip(result.split(sizes, dim), tensors, strict=True):
        view.copy_(tensor)
    return result


@contextmanager
def _comm_for_simulated_devices(labels: "MemoryLabels") -> Iterator[None]:
    """Replaces ``torch.cuda.comm``, which ``torch.nn.DataParallel`` uses.

    The same bytes go between the same devices.
    """
    with (
        patch.multiple(
            torch._C,
            create=True,  # a build for CPUs has none of them
            _broadcast_coalesced=functools.partial(_broadcast_coalesced, labels),
            _scatter=_scatter,
            _gather=_gather,
        ),
        patch.object(nccl, "is_available", lambda tensors: False),  # gradients are added by copies
        patch.object(_functions, "_streams", None),  # torch caches one stream per device
    ):
        yield


class Category(IntEnum):
    """Category of an allocation.

    The numbers are those of ``native/ledger.h``, which calls the last one ``Other``.
    """

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER_STATE = 2
    INPUTS = 3
    ACTIVATIONS = 4
    TEMPORARIES = 5

    @property
    def title(self) -> str:
        """Name in tables: ``optimizer state``."""
        return self.name.lower().replace("_", " ")


class MemoryLabels:
    """Labels memory of parameters, gradients and optimizer state in the ledger, by hooks on all
    modules and optimizers.

    A label applies to past peaks as well: a peak in the backward shows gradients, although the
    optimizer labels them later.
    """

    def __init__(self, native: ctypes.CDLL) -> None:
        self.native = native
        self.steps = 0  # finished: a forward has followed the optimizer's update
        self._has_updated = False
        self.modules = weakref.WeakValueDictionary[int, nn.Module]()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Installs the hooks for the duration of the block."""
        with (
            register_module_forward_pre_hook(self._before_forward),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            yield

    def label_gradients(self) -> None:
        """Labels the gradients of all modules that ran, for a peak before the first step of an
        optimizer.
        """
        for module in list(self.modules.values()):
            parameters = module.parameters(recurse=False)
            self.label([each.grad for each in parameters if each.is_leaf], Category.GRADIENTS)

    def label(self, tensors: Iterable[object], category: Category) -> None:
        """Labels the memory of all tensors on simulated devices, of a sharded one its shard.

        Other values are ignored.
        """
        for local in torch_private.local_tensors(tensors):
            if (
                isinstance(local, Tensor)
                and local.device.type == "sim"
                and local.layout == torch.strided
            ):
                self.native.simulation_tag(local.untyped_storage()._cdata, category)

    def _before_forward(self, module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():  # the compiler would make the hook a part of its graphs
            return
        self.native.simulation_in_optimizer(False)  # _after_step does not run if a step fails
        self.steps += self._has_updated
        self._has_updated = False
        is_new = self.modules.get(id(module)) is not module
        self.modules[id(module)] = module
        # The first time with all submodules: some modules use parameters of their children without
        # calling the children.
        self.label(
            module.parameters() if is_new else module._parameters.values(), Category.PARAMETERS
        )
        self.label(module.buffers() if is_new else module._buffers.values(), Category.PARAMETERS)

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            self.label(group["params"], Category.PARAMETERS)
            self.label([parameter.grad for parameter in group["params"]], Category.GRADIENTS)
        self.native.simulation_in_optimizer(True)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        self.native.simulation_in_optimizer(False)
        self._has_updated = True
        self.label(
            torch_private.leaves_of_tree(list(optimizer.state.values())), Category.OPTIMIZER_STATE
        )


MAX_WAITS = 10_000  # Older waits are dropped; these take about 3 MB.
_SKIPPED = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, __file__))
_ADVICE = {
    "item": "keep the number in a tensor on the device, or read it after the step",
    "copy to the host": "copy with non_blocking=True, and read the copy later, after an event",
    "pageable copy to the host": "copy into pinned memory, torch.empty(..., pin_memory=True)",
    "copy from the host": "create the tensor on the device (torch.full), or copy it from pinned memory with non_blocking=True",
    "pageable copy from the host": "pin the memory, with DataLoader(pin_memory=True) or tensor.pin_memory(), and copy whole rows",
    "boolean mask": "use torch.where, or multiply by the mask",
    "synchronize": "let one stream wait for another, with stream.wait_stream(other) or stream.wait_event(event)",
}


class Wait(NamedTuple):
    """A call for which a GPU would have made the host wait.

    Attributes:
        device: the device that the host waits for.
        kind: ``"item"`` (also ``bool(tensor)``), ``"copy to the host"``, ``"copy from the host"``,
            the same with ``"pageable "`` in front, ``"boolean mask"``, ``"synchronize"``, or the
            name of an operator such as ``"nonzero"``.
        file, line: those of the caller, the first outside of torch; ``"backward"`` and 0 for a
            thread without Python code.
        step: number of the step, from 1. A step ends with the first forward after an optimizer's
            update.
    """

    device: torch.device
    kind: str
    file: str
    line: int
    step: int

    @property
    def advice(self) -> str:
        """A way to avoid the wait."""
        return _ADVICE.get(
            self.kind, "use an operator whose result has a known size, such as torch.where"
        )

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{self.kind} on {self.device} in {place}"


class Waits:
    """A record of the last waits of one cluster, in their order."""

    def __init__(self, labels: MemoryLabels) -> None:
        self.record = deque[Wait](maxlen=MAX_WAITS)
        self._labels = labels  # Labels know the number of finished steps.
        self._forbidding_blocks = 0
        self.listener = LISTENER(self._note)

    def per_step(self, device: torch.device) -> list[int]:
        """Returns the number of waits for a device in each of the last eight steps."""
        steps = [wait.step for wait in [*self.record] if wait.device == device]
        last = self._labels.steps + 1
        return [steps.count(step) for step in range(max(1, last - 7), last + 1)]

    @contextmanager
    def forbidding(self) -> Iterator[None]:
        """Raises an error at each wait in this block."""
        self._forbidding_blocks += 1
        try:
            yield
        finally:
            self._forbidding_blocks -= 1

    def _note(self, device: int, kind: bytes, buffer: int, size: int) -> None:
        wait = Wait(
            torch.device("sim", device),
            kind.decode(),
            *_caller(inspect.currentframe()),
            self._labels.steps + 1,
        )
        self.record.append(wait)
        if self._forbidding_blocks:
            message = (
                f"the host would wait for a GPU, which forbidding_waits() does not allow: {wait}. "
                f"To avoid it, {wait.advice}"
            )
            encoded = message.encode()[: size - 1] + b"\0"
            ctypes.memmove(buffer, encoded, len(encoded))


def _caller(frame: FrameType | None) -> tuple[str, int]:
    """Returns file and line of the innermost caller outside of torch and of this package."""
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    if frame is None:
        return (
            "a thread without Python code"
            if torch_private.current_backward_id() is None
            else "backward",
            0,
        )
    return frame.f_code.co_filename, frame.f_lineno
