"""Devices of this machine, with their streams and their memory.

No other file asks torch for the accelerator.
"""

import contextlib
import os
import reprlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

DeviceLike = int | str | torch.device
Devices = Sequence[torch.device]
NO_BLOCK = contextlib.nullcontext()  # The path of an update makes none of its own.
HOSTS = ("cpu", "meta")  # types of devices without streams, a generator and memory of their own
WITHOUT_FLOAT64 = ("mps",)  # types of devices that refuse tensors in float64


def is_accelerator(device: torch.device) -> bool:
    """Returns True for a device with streams, a generator and memory of its own: neither the CPU
    nor ``meta``.
    """
    return device.type not in HOSTS


def widest_float(device: torch.device) -> torch.dtype:
    """Returns float64, or float32 on a device without it."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def visible_devices() -> list[torch.device]:
    """Returns all accelerators that this process can see, or the CPU if there is none."""
    if torch.accelerator.is_available():
        return accelerators()
    if torch.cuda.is_available():
        raise RuntimeError(
            "this process has simulated devices, which hide its GPUs from torch: use them in a new process"
        )
    return [torch.device("cpu")]


def accelerators() -> list[torch.device]:
    """Returns all accelerators that this process can see."""
    accelerator = torch.accelerator.current_accelerator()
    return (
        []
        if accelerator is None
        else [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]
    )


def resolve_devices(device_ids: Sequence[DeviceLike] | None) -> list[torch.device]:
    """Converts ``device_ids`` to devices with an index.

    They may repeat. ``None`` means :func:`visible_devices`.
    """
    if device_ids is None:
        return visible_devices()
    if isinstance(device_ids, str) or not isinstance(device_ids, Sequence):
        raise TypeError(
            f"device_ids={' '.join(reprlib.repr(device_ids).split())}, expected a list, such as [0, 1] or ['cpu', 'cpu']; leave "
            "it out to use each accelerator"
        )
    devices = [resolve_device(device) for device in device_ids]
    if not devices:
        raise ValueError(
            "device_ids is empty, expected at least one device; leave it out to use every visible accelerator"
        )
    return devices


def resolve_device(device: DeviceLike) -> torch.device:
    """Converts one device to a ``torch.device`` with an index (the CPU has none).

    Raises as :func:`resolve_devices` does.
    """
    present = accelerators()
    available = (
        f"this machine has {len(present)} {present[0].type} devices"
        if present
        else "this machine has no accelerator"
    )
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        raise TypeError(
            f"{device!r} is not a device, expected an integer, a string such as 'cuda:1' or 'cpu', or a torch.device"
        )
    if isinstance(device, int):
        if not 0 <= device < len(present):
            raise ValueError(
                f"there is no device {device}: {available}; device_ids may repeat the CPU, as in ['cpu', 'cpu']"
            )
        return present[device]
    try:
        named = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"{device!r} is not a device, expected an integer, or a name such as 'cuda:1' or 'cpu'"
        ) from error
    if named.type == "cpu":
        return torch.device("cpu")
    if torch.device(named.type, named.index or 0) not in present:
        raise ValueError(f"there is no device {str(device)!r}: {available}")
    return present[torch.accelerator.current_device_index() if named.index is None else named.index]


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns ``tensor`` on ``device``, without a copy if it is there already."""
    # only to an accelerator: the host could read the result of an asynchronous copy to the CPU too
    # early
    return (
        tensor
        if tensor.device == device
        else tensor.to(device, non_blocking=device.type not in HOSTS)
    )


def current_stream(device: torch.device) -> torch.Stream | None:
    """Returns the current stream of the calling thread on ``device``, or None for a device without
    streams.
    """
    return None if device.type in HOSTS else torch.accelerator.current_stream(device)


def on_device(
    device: torch.device, stream: torch.Stream | None
) -> contextlib.AbstractContextManager[None]:
    """Makes ``device`` and ``stream`` current in this thread.

    Kernels and ``torch.empty(device='cuda')`` then use them.
    """
    if device.type in HOSTS:  # here and below without another call: this runs in every forward
        return NO_BLOCK
    return _on_accelerator(device, stream)


@contextlib.contextmanager
def _on_accelerator(device: torch.device, stream: torch.Stream | None) -> Iterator[None]:
    with torch.accelerator.device_index(device.index), stream or NO_BLOCK:
        yield


def free_bytes(device: torch.device) -> int:
    """Returns the number of bytes that can still be allocated: free memory, and unused memory of
    torch's caching allocator.
    """
    if not is_accelerator(device):
        tells_free = "SC_AVPHYS_PAGES" in os.sysconf_names  # macOS does not
        pages = os.sysconf("SC_AVPHYS_PAGES") if tells_free else os.sysconf("SC_PHYS_PAGES") // 2
        return pages * os.sysconf("SC_PAGE_SIZE")
    free, _ = torch.accelerator.get_memory_info(device)
    return (
        free
        + torch.accelerator.memory_reserved(device)
        - torch.accelerator.memory_allocated(device)
    )


def start_copy(tensor: Tensor) -> Callable[[], Tensor]:
    """Starts to copy a tensor to the host.

    Returns a function that waits for the copy alone, and returns it.
    """
    stream = current_stream(tensor.device)
    # torch pins the memory of such a copy
    copy = tensor.detach().to("cpu", non_blocking=stream is not None)
    event = None if stream is None else stream.record_event()

    def wait() -> Tensor:
        if event is not None and not event.query():
            event.synchronize()
        return copy

    return wait


def pin(tensor: Tensor) -> Tensor:
    """Returns a copy in pinned memory, from which a copy to an accelerator does not make the host
    wait.
    """
    return (
        tensor.pin_memory()
        if tensor.is_cpu and not tensor.requires_grad and torch.accelerator.is_available()
        else tensor
    )
