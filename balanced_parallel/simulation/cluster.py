"""``simulate``: devices ``sim:0``, ``sim:1``, ... for the length of a ``with`` block, and what was seen on them."""

import ctypes
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.utils.backend_registration import rename_privateuse1_backend

from ..runtime.byte_sizes import format_bytes, parse_bytes
from . import device_module
from .categories import Category, Labels
from .compilation import load_native
from .torch_data_parallel import comm_for_simulated_devices

__all__: list[str] = []

MOST_DEVICES = 64  # kDevices of native/ledger.h
NO_LIMIT = 2**50  # 1 PiB: more than any simulation reaches
Memory = int | str | Sequence[int | str | None] | None
_entering = threading.Lock()
_active = False


class Cluster:
    """The simulated devices of one :func:`simulate` block. After the block its numbers stay as they were at its end.

    Attributes:
        devices: ``sim:0`` and so on.
        memory: bytes that each device has; ``None`` without a limit.
    """

    def __init__(self, memory: Sequence[int | None], native: ctypes.CDLL, labels: Labels) -> None:
        self.devices = [torch.device("sim", index) for index in range(len(memory))]
        self.memory = list(memory)
        self._native = native
        self._labels = labels
        self._ended: tuple[list[int], list[int], Counter[tuple[str, str]], list[dict[str, int]]] | None = None

    @property
    def live(self) -> list[int]:
        """Bytes in use now, per device. Each allocation is rounded up to 512 bytes, as CUDA's caching allocator does."""
        return self._ended[0] if self._ended else [self._native.simulation_live(device.index) for device in self.devices]

    @property
    def peak(self) -> list[int]:
        """The most bytes that were in use at one time, per device, since the beginning or :meth:`reset_peak`."""
        return self._ended[1] if self._ended else [self._native.simulation_peak(device.index) for device in self.devices]

    @property
    def moved(self) -> Counter[tuple[str, str]]:
        """Bytes copied so far, by source and target: ``moved["cpu", "sim:0"]``. Subtract two of them to measure a part."""
        if self._ended:
            return self._ended[2]
        places = [*enumerate(map(str, self.devices)), (MOST_DEVICES, "cpu")]
        moved = {(here, there): self._native.simulation_moved(i, j) for i, here in places for j, there in places}
        return Counter({ends: count for ends, count in moved.items() if count})

    def reset_peak(self) -> None:
        """From here on, :attr:`peak` and :meth:`categories` tell of what happens next."""
        if self._ended:
            raise RuntimeError("the cluster was left: its peaks can be read, and not reset")
        self._native.simulation_reset_peak()

    def categories(self, device: int) -> dict[str, int]:
        """What the bytes at the peak of one device were for; they add up to its ``peak``.

        ``"parameters"`` (with buffers), ``"gradients"`` (the ``grad`` of parameters), ``"optimizer state"``, ``"inputs"`` (copied
        from the CPU, or made on the device from no other tensor), ``"activations"`` (results of operators in a forward) and
        ``"other"`` (gradients of activations, and what a backward or an update holds for a moment).

        Raises:
            IndexError: there is no such device.
        """
        index = range(len(self.devices))[device]
        if self._ended:
            return self._ended[3][index]
        self._labels.label_gradients()
        counts = (ctypes.c_int64 * len(Category))()
        self._native.simulation_categories(index, counts)
        return {category.title: counts[category] for category in Category}

    def __str__(self) -> str:
        """A table: a row per device, with its bytes now and at the peak, what these were for, and what came and went."""
        moved = self.moved
        rows = []
        for index, (device, memory) in enumerate(zip(map(str, self.devices), self.memory, strict=True)):
            parts = self.categories(index)
            into = sum(count for (_, target), count in moved.items() if target == device)
            out = sum(count for (source, _), count in moved.items() if source == device)
            shown = [self.live[index], self.peak[index], *parts.values(), into, out]
            rows.append([device, "no limit" if memory is None else format_bytes(memory), *map(format_bytes, shown)])
        headers = ["device", "memory", "now", "peak", *(category.title for category in Category), "moved in", "moved out"]
        return tabulate(rows, headers, tablefmt="simple", stralign="right")

    def _end(self) -> None:
        self._ended = self.live, self.peak, self.moved, [self.categories(index) for index in range(len(self.devices))]


@contextmanager
def simulate(devices: int, memory: Memory = None, *, strict: bool = True) -> Iterator[Cluster]:
    """Gives this process accelerators ``sim:0`` to ``sim:N-1``: real numbers, computed by the CPU, and every byte counted.

    They behave as GPUs do in placement, memory and traffic, so that a program for several GPUs can be run, tested and measured
    without one. torch takes them for its accelerator: ``DataParallelModel(net)``, ``torch.accelerator`` and
    ``torch.nn.DataParallel`` find them. What they do not show is speed: kernels run one after the other on the CPU. Streams are
    checked instead: memory that is used, or given back, on a stream that has not waited for another one that works with it is an
    error, for a GPU may come too early there. Numbers are those of the CPU's kernels, to the bit. Workspaces inside a kernel
    (cuDNN's, say) and fragmentation are not counted. Under torchrun each rank has a cluster of its own; torch.distributed reaches
    the others through gloo, and what it sends is not in :attr:`Cluster.moved`.

    On first use a C++ extension is compiled, in about fifteen seconds, and kept in ``~/.cache/balanced_parallel``.

    Args:
        devices: how many, at most 64.
        memory: bytes of each device (``24 * 2**30`` or ``"24GiB"``), or a list with one entry per device; ``None`` is no limit.
            Above it an allocation raises ``torch.OutOfMemoryError``, and what was allocated before stays valid.
        strict: a tensor on another device than the rest is an error, as on a GPU. ``False`` copies it, counts the copy and
            warns: to find every such place of a script in one run.

    Returns:
        A context manager that gives a :class:`Cluster`. Tensors on its devices cannot be used after the block, only freed or
        copied to the CPU.

    At the end of the block the devices, the patched functions of ``nn.DataParallel`` and all hooks are gone, and torch's random
    state is as it was. What torch has no way to undo: the name ``sim`` of its one kind of device from outside
    (``privateuse1``), so that ``torch.accelerator.current_accelerator()`` names it ever after, on a machine with GPUs too (asked
    with ``check_available=True``, it says None); the module ``torch.sim``, which it needs for that answer; the operators
    registered for such devices; and one idle autograd thread for each. On a machine with GPUs, simulate in its own process.

    Raises:
        ValueError: ``devices`` or ``memory`` is not as above.
        RuntimeError: a cluster is active already, another library has taken torch's place for such devices, or the extension
            cannot be compiled.
    """
    global _active
    limits = _limits(devices, memory)
    with _entering:
        if _active:
            raise RuntimeError(
                "simulate() inside simulate(): torch has room for one kind of simulated device, leave the first block"
            )
        _active = True
    try:
        with ExitStack() as undo:
            native = load_native()
            _give_name()
            labels = Labels(native)
            capacities = (ctypes.c_int64 * devices)(*(NO_LIMIT if limit is None else limit for limit in limits))
            native.simulation_start(devices, capacities, strict, torch.initial_seed() % 2**64)
            undo.callback(native.simulation_stop)
            dist.Backend.default_device_backend_map["sim"] = "gloo"
            undo.callback(dist.Backend.default_device_backend_map.pop, "sim")
            undo.enter_context(labels.watching())
            undo.enter_context(comm_for_simulated_devices(labels))
            cluster = Cluster(limits, native, labels)
            undo.callback(cluster._end)
            yield cluster
    finally:
        _active = False


def _limits(devices: int, memory: Memory) -> list[int | None]:
    if not isinstance(devices, int) or isinstance(devices, bool) or not 1 <= devices <= MOST_DEVICES:
        raise ValueError(f"devices={devices!r}, expected a whole number from 1 to {MOST_DEVICES}")
    each = [memory] * devices if memory is None or isinstance(memory, (int, str)) else list(memory)
    if len(each) != devices:
        raise ValueError(f"memory has {len(each)} entries for {devices} devices, expected one size for all, or one per device")
    return [None if size is None else parse_bytes(size) for size in each]


def _give_name() -> None:
    name = torch._C._get_privateuse1_backend_name()
    if name == "privateuseone":
        rename_privateuse1_backend("sim")
        torch._register_device_module("sim", device_module)
    elif name != "sim":
        raise RuntimeError(
            f"another library has given torch's one kind of device from outside the name {name!r}: simulate() needs a process "
            "in which it is not imported"
        )
