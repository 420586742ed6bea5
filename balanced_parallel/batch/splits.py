"""Which device gets how many rows: equal parts, given weights, or what the devices have shown of themselves."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ..runtime.devices import free_bytes
from .scattering import check_split

__all__: list[str] = []

T = TypeVar("T")


class Shares:
    """The weight of each device, which may change from forward to forward.

    Args:
        split: ``None`` for equal parts, one weight per device, ``"memory"`` for the free bytes of each, ``"speed"`` for the
            rows per second that each has shown. The last two are measured in the forwards whose number is a power of two:
            often at first, then rarely, so that a training pays nothing for it.
        devices: a device that is named several times shares what it has.

    Raises:
        ValueError: ``split`` is none of these.
    """

    def __init__(self, split: Sequence[float] | str | None, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self.by = split if split in ("memory", "speed") else None
        self.weights: tuple[float, ...] | None = None
        if self.by is None and split is not None:
            check_split(split, len(devices))  # refuses any other text
            self.weights = tuple(float(weight) for weight in split)
        self.forwards = 0

    def begin(self) -> None:
        """Counts a forward, and looks at the devices' memory where it is time."""
        self.forwards += 1
        if self.by == "memory" and self._is_time():
            free = [free_bytes(device) / self.devices.count(device) for device in self.devices]
            self.weights = _normalised(free)

    def timed(
        self, work: list[Callable[[], T]], devices: Sequence[torch.device], rows: Sequence[int] | None
    ) -> list[Callable[[], T]]:
        """The replicas' work, with a clock around it where it is time, which waits for what the device still has to do."""
        if self.by != "speed" or not self._is_time() or rows is None or list(devices) != self.devices:
            return work
        seconds: dict[int, float] = {}

        def clock(index: int) -> T:
            started = time.perf_counter()
            result = work[index]()
            if devices[index].type != "cpu":
                torch.accelerator.synchronize(devices[index])
            seconds[index] = time.perf_counter() - started
            if len(seconds) == len(work):
                self._learn([rows[i] / max(seconds[i], 1e-9) for i in range(len(work))])
            return result

        return [lambda index=index: clock(index) for index in range(len(work))]  # type: ignore[misc]

    def _learn(self, rates: list[float]) -> None:
        found = _normalised(rates)
        known = self.weights
        # half of what was known: a single slow forward (the first, a busy moment) does not decide
        self.weights = found if known is None else tuple((old + new) / 2 for old, new in zip(known, found, strict=True))

    def _is_time(self) -> bool:
        return self.forwards & (self.forwards - 1) == 0 and self.forwards > (1 if self.by == "speed" else 0)

    def __repr__(self) -> str:
        shown = "equal" if self.weights is None else ", ".join(f"{weight / sum(self.weights):.1%}" for weight in self.weights)
        return shown if self.by is None else f"{shown} by {self.by}"


def _normalised(values: Sequence[float]) -> tuple[float, ...]:
    """Parts of one. A device that shows nothing keeps a hundredth of an equal part, to be asked again."""
    least = sum(values) / len(values) / 100 or 1.0
    raised = [max(value, least) for value in values]
    return tuple(value / sum(raised) for value in raised)
