"""The module ``torch.sim``, with the functions that torch expects from the module of any device
type.
"""

import contextlib
import functools
from types import SimpleNamespace

import torch

from ..runtime.devices import DeviceLike
from .compilation import load_native

# torch.utils.checkpoint saves the random state of a device if its module has this flag
_initialized = True

# The names are those of torch.cuda.
current_device = torch.accelerator.current_device_index
set_device = torch.accelerator.set_device_index
current_stream = torch.accelerator.current_stream
# kernels have finished already; later uses of their memory count as ordered
synchronize = torch.accelerator.synchronize
mem_get_info = torch.accelerator.get_memory_info
memory_allocated = torch.accelerator.memory_allocated
max_memory_allocated = torch.accelerator.max_memory_allocated
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats


def _index(device: DeviceLike | None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def is_available() -> bool:
    """Returns True inside a :func:`simulate` block."""
    return device_count() > 0


is_initialized = is_available


def device_count() -> int:
    """Returns the number of simulated devices."""
    # torch.accelerator would call this function
    return int(load_native().simulation_device_count())


def device(device: DeviceLike | None) -> contextlib.AbstractContextManager[object]:
    """Sets the current device for the duration of the block."""
    return torch.accelerator.device_index(_index(device))


class Stream(torch.Stream):
    """A stream of a simulated device. Priorities are ignored."""

    def __new__(cls, device: DeviceLike | None = None, priority: int = 0) -> "Stream":
        """Makes a stream of the current device, or of another one."""
        return super().__new__(cls, device=torch.device("sim", _index(device)), priority=priority)


Event = torch.Event


def stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Makes a stream current for the duration of the block; None changes nothing."""
    return contextlib.nullcontext() if stream is None else stream


def get_device_properties(device: DeviceLike | None = None) -> SimpleNamespace:
    """Returns the name, the total memory and the number of multiprocessors of a device."""
    total = torch.accelerator.get_memory_info(_index(device))[1]
    return SimpleNamespace(
        name="simulated accelerator", total_memory=total, multi_processor_count=1
    )


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Returns the dtypes that autocast supports."""
    return [torch.float16, torch.bfloat16, torch.float32]


def empty_cache() -> None:
    """Does nothing: simulated devices have no cache."""


def get_rng_state(device: DeviceLike | None = None) -> torch.Tensor:
    """Returns the random state of a device."""
    return torch.ops.balanced_parallel_simulation.random_state(_index(device))  # type: ignore[no-any-return]


def set_rng_state(state: torch.Tensor, device: DeviceLike | None = None) -> None:
    """Sets the random state of a device."""
    torch.ops.balanced_parallel_simulation.set_random_state(_index(device), state)


def _generator(index: int) -> SimpleNamespace:
    """Returns the random number generator of a device, with the methods of a ``torch.Generator``."""

    def clone() -> torch.Generator:
        return torch.Generator().set_state(get_rng_state(index))

    return SimpleNamespace(
        get_state=functools.partial(get_rng_state, index),
        set_state=functools.partial(set_rng_state, device=index),
        clone_state=clone,
        initial_seed=lambda: clone().initial_seed(),
        manual_seed=lambda seed: load_native().simulation_seed(index, seed % 2**64),
    )


default_generators = [_generator(index) for index in range(64)]  # the most that simulate() makes


def initial_seed() -> int:
    """Returns the seed of the random number generator of the current device."""
    return int(default_generators[current_device()].initial_seed())


def manual_seed(seed: int) -> None:
    """Seeds the random number generator of the current device."""
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seeds the random number generators of all devices."""
    for generator in default_generators[: device_count()]:
        generator.manual_seed(seed)


def _is_in_bad_fork() -> bool:
    return False


_lazy_init = empty_cache  # devices are initialized with the cluster
