"""What torch finds as ``torch.sim``: the functions that it asks of every kind of device."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import torch

from .compilation import load_native

__all__: list[str] = []

_initialized = True  # torch.utils.checkpoint keeps a device's random state where its module says so
DeviceLike = int | str | torch.device | None


def _index(device: DeviceLike) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def is_available() -> bool:
    return device_count() > 0


is_initialized = is_available


def device_count() -> int:
    return int(load_native().simulation_device_count())  # torch.accelerator would ask back here


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: DeviceLike) -> None:
    torch.accelerator.set_device_index(_index(device))


@contextlib.contextmanager
def device(device: DeviceLike) -> Iterator[None]:
    with torch.accelerator.device_index(_index(device)):
        yield


def get_device_properties(device: DeviceLike = None) -> SimpleNamespace:
    total = torch.accelerator.get_memory_info(_index(device))[1]
    return SimpleNamespace(name="simulated accelerator", total_memory=total, multi_processor_count=1)


def get_device_name(device: DeviceLike = None) -> str:
    return str(get_device_properties(device).name)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def synchronize(device: DeviceLike = None) -> None:
    """Every kernel has finished when its call returns; from here on all streams may count on it."""
    torch.accelerator.synchronize(_index(device))


def empty_cache() -> None:
    """Nothing is kept."""


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


def memory_allocated(device: DeviceLike = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: DeviceLike = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    state: torch.Tensor = torch.ops.balanced_parallel_simulation.random_state(_index(device))
    return state


def set_rng_state(state: torch.Tensor, device: DeviceLike = None) -> None:
    torch.ops.balanced_parallel_simulation.set_random_state(_index(device), state)


def manual_seed(seed: int) -> None:
    load_native().simulation_seed(current_device(), seed % 2**64)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        load_native().simulation_seed(index, seed % 2**64)


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    """Devices exist as soon as the cluster does."""
