"""What devices there are. The one file that asks which accelerator this machine has.

A device may be named several times and may be the CPU: ``["cpu"] * 3`` runs three replicas on a laptop, through the same
code as three GPUs.
"""

import contextlib
import os
import resource
import sys
from collections.abc import Iterator, Sequence

import torch

__all__: list[str] = []

_WITHOUT_STREAMS = ("cpu", "meta")
DeviceLike = int | str | torch.device


def visible_devices() -> list[torch.device]:
    """Every accelerator that this process can see, else the CPU.

    Raises:
        RuntimeError: torch takes devices that were simulated earlier for its accelerator, and there are GPUs.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        if torch.cuda.is_available():
            raise RuntimeError(
                "this process has simulated devices, which torch goes on to take for its accelerator, so its GPUs are out of "
                "reach: use them in a new process"
            )
        return [torch.device("cpu")]
    return [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]


def resolve_devices(device_ids: Sequence[DeviceLike] | None) -> list[torch.device]:
    """The devices that ``device_ids`` names: integers, strings and ``torch.device``s of any type, repeats allowed.

    Args:
        device_ids: ``None`` for :func:`visible_devices`.

    Raises:
        TypeError: one device was given instead of a list, or an entry is no device.
        ValueError: the list is empty, or names a device that this machine does not have.
    """
    if device_ids is None:
        return visible_devices()
    if isinstance(device_ids, (int, str, torch.device)):
        raise TypeError(f"device_ids={device_ids!r} is one device, expected a list of devices: write device_ids=[{device_ids!r}]")
    devices = [resolve_device(device) for device in device_ids]
    if not devices:
        raise ValueError("device_ids is empty, expected at least one device; leave it out to use every visible accelerator")
    return devices


def resolve_device(device: DeviceLike) -> torch.device:
    """One device with its index (the CPU has none). Raises as :func:`resolve_devices` does."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if accelerator is None else torch.accelerator.device_count()
    has = (
        f"this machine has {count} {accelerator.type} devices" if accelerator else "this machine has no accelerator, only the CPU"
    )
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        raise TypeError(f"{device!r} is no device, expected an integer, a string such as 'cuda:1' or 'cpu', or a torch.device")
    if isinstance(device, int):
        if accelerator is None or not 0 <= device < count:
            raise ValueError(
                f"there is no device {device}: {has}; device_ids may name the CPU several times, as in ['cpu', 'cpu']"
            )
        return torch.device(accelerator.type, device)
    try:
        named = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{device!r} is no device, expected a name such as 'cuda:1' or 'cpu'") from error
    if named.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or named.type != accelerator.type or (named.index or 0) >= count:
        raise ValueError(f"there is no device {str(device)!r}: {has}")
    index = torch.accelerator.current_device_index() if named.index is None else named.index
    return torch.device(named.type, index)


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device``. Only copies to an accelerator may overlap: the host could read one to the CPU too early."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream of the calling thread on ``device``, for a worker thread to go on with; the CPU has none."""
    return None if device.type in _WITHOUT_STREAMS else torch.accelerator.current_stream(device)


def on_device(device: torch.device, stream: torch.Stream | None) -> contextlib.AbstractContextManager[None]:
    """Makes ``device`` (and ``stream`` on it) current in this thread: kernels and ``torch.empty(device='cuda')`` land there."""
    if device.type in _WITHOUT_STREAMS:
        return contextlib.nullcontext()
    return _on_accelerator(device, stream)


@contextlib.contextmanager
def _on_accelerator(device: torch.device, stream: torch.Stream | None) -> Iterator[None]:
    with torch.accelerator.device_index(device.index), stream or contextlib.nullcontext():
        yield


def keep_random_state() -> contextlib.AbstractContextManager[None]:
    """Puts the random state of the CPU and of every accelerator back at the end of the block."""
    accelerators = [device for device in visible_devices() if device.index is not None]
    kind = accelerators[0].type if accelerators else "cpu"
    return torch.random.fork_rng([device.index for device in accelerators], device_type=kind)


def free_bytes(device: torch.device) -> int:
    """Bytes that tensors can still be given: what the device has free, and what torch's allocator keeps without using it."""
    if device.type == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free, _ = torch.accelerator.get_memory_info(device)
    return free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    """Bytes in use at most so far: of the allocator on an accelerator, of the whole process on the CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): kilobytes on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
