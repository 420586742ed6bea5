"""Random numbers of the replicas and ranks, which ``torch.manual_seed`` gives the same seed: they
would draw equal masks.
"""

import contextlib
import contextvars
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .devices import Devices, is_accelerator, on_device

_cpu_generator = threading.RLock()
# The forward that runs in this thread, if its random numbers follow the rows.
forward_by_row: contextvars.ContextVar[Any | None] = contextvars.ContextVar(
    "forward_by_row", default=None
)


def offset_seeds(devices: Devices, first: int = 0) -> None:
    """Gives the accelerators of replicas or ranks different seeds: ``s``, ``s + 1``, ``s + 2`` and
    so on.

    A generator is changed only if its seed is that of ``torch.manual_seed``, or that of a device
    before it, so states that were set by hand or from a checkpoint stay. ``first`` is the number of
    the first device. Number 0 keeps its seed.
    """
    seeds = {torch.initial_seed()}
    for number, device in _accelerators(devices):
        module = torch.get_device_module(device)
        with on_device(device, None):
            seed = module.initial_seed()
            if number + first and seed in seeds:
                seed = (seed + number + first) % 2**64
                module.manual_seed(seed)
            seeds.add(seed)


class RankNumbers:
    """The random numbers of one rank from the CPU's generator, which all ranks have alike: samplers
    draw from it.

    An update takes one number from the generator, as the seed of all that this rank draws in it.
    The generator goes on from there afterwards. So it stays alike, however many forwards the update
    has on each rank. A forward outside of an update is one of its own.
    """

    def __init__(self) -> None:
        self._state: Tensor | None = None  # The state between two blocks of rows of one update.
        self.is_drawing = False

    @contextlib.contextmanager
    def drawing(self, rank: int, *, is_last: bool = True) -> Iterator[None]:
        """Sets the generator to the numbers of this rank for the duration of the block.

        ``is_last`` ends the update, and so does an error, which all ranks have.
        """
        if self.is_drawing:
            yield
            return
        if self._state is None:
            seed = int(torch.empty((), dtype=torch.int64).random_())
            of_all_ranks = torch.get_rng_state()
            torch.default_generator.manual_seed(seed + rank)
        else:
            of_all_ranks = torch.get_rng_state()
            torch.set_rng_state(self._state)
        self.is_drawing = True
        self._state = None
        try:
            yield
            self._state = None if is_last else torch.get_rng_state()
        finally:
            self.is_drawing = False
            torch.set_rng_state(of_all_ranks)


def generator_states(devices: Devices) -> dict[str, Tensor]:
    """Returns the states of the generators of the CPU and of ``devices``, by their place in the
    list.
    """
    states = {
        f"device{i}": torch.get_device_module(device).get_rng_state(device)
        for i, device in _accelerators(devices)
    }
    return {"cpu": torch.get_rng_state(), **states}


def set_generators(states: Mapping[str, Tensor], devices: Devices) -> None:
    """Sets the generators of the CPU and of ``devices`` to the states that :func:`generator_states`
    has returned.
    """
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    for number, device in _accelerators(devices):
        torch.get_device_module(device).set_rng_state(states[f"device{number}"], device)


def _accelerators(devices: Devices) -> list[tuple[int, torch.device]]:
    return [
        (number, device)
        for number, device in enumerate(dict.fromkeys(devices))
        if is_accelerator(device)
    ]


class RandomState:
    """The present states of random number generators, from which a forward that runs again draws
    the same numbers.

    Recomputations of several devices run at once, in one thread per device. So the CPU's generator
    is set only if the forward has drawn from it, and by one thread at a time. torch's checkpointing
    would leave it in the middle of a forward.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._states = generator_states(devices)

    def end(self) -> None:
        """Ends the forward.

        The state of the CPU's generator is dropped if it has not changed, for a forward on
        accelerators.
        """
        if (
            len(self._states) > 1
            and "cpu" in self._states
            and torch.equal(self._states["cpu"], torch.get_rng_state())
        ):
            del self._states["cpu"]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Sets the generators to the states of the forward for the duration of the block."""
        with _cpu_generator if "cpu" in self._states else contextlib.nullcontext():
            now = generator_states(self._devices)
            before = {name: now[name] for name in self._states}
            self.restore()
            try:
                yield
            finally:
                set_generators(before, self._devices)

    def restore(self) -> None:
        """Sets the generators to the states of the forward. They go on from there."""
        set_generators(self._states, self._devices)
