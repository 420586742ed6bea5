"""Splits of a batch: the number of rows of each device, equal, given by weights, or measured."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from fractions import Fraction
from typing import TypeVar

import torch

from ..runtime.devices import free_bytes

__all__: list[str] = []

T = TypeVar("T")


def split_sizes(rows: int, shares: int | Sequence[float]) -> list[int]:
    """Returns the number of rows of each part.

    Args:
        rows: total number of rows.
        shares: number of equal parts, or the weight of each part. With weights, each part gets its proportion rounded down. The
            remaining rows go to the parts with the largest remainders, to the first ones among equals.

    Example:
        >>> split_sizes(9, 4)
        [3, 2, 2, 2]
        >>> split_sizes(9, [2, 1])
        [6, 3]
    """
    if isinstance(shares, int):
        return [rows // shares + (index < rows % shares) for index in range(shares)]
    weights = [Fraction(share) for share in shares]  # exact: with rounded quotients the sizes could exceed the total
    exact = [rows * weight / sum(weights) for weight in weights]
    sizes = [math.floor(part) for part in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda index: sizes[index] - exact[index])
    for index in by_remainder[: rows - sum(sizes)]:
        sizes[index] += 1
    return sizes


def proportional_sizes(rows: int, shares: Sequence[int]) -> list[int]:
    """Splits the rows of the targets in proportion to ``shares``, the rows of the inputs.

    Targets have as many rows as the inputs, or a multiple of them if they were flattened.

    Raises:
        ValueError: if a size would not be an integer.
    """
    total = sum(shares)
    if rows == total:
        return list(shares)
    if total == 0 or any(rows * share % total for share in shares):
        raise ValueError(
            f"the targets have {rows} rows, but the inputs have {total} (split into {', '.join(map(str, shares))}): expected the "
            "same number, or a multiple"
        )
    return [rows * share // total for share in shares]


def assign_rows(
    rows: int | None, devices: Sequence[torch.device], weights: Sequence[float] | None
) -> tuple[list[torch.device], list[int] | None]:
    """Returns the devices that get rows, and the number of rows of each.

    Without rows, the first device alone is used. If no input has rows (``rows`` is None), the sizes are None.
    """
    if rows is None:
        return [devices[0]], None
    sizes = split_sizes(rows, len(devices) if weights is None else weights)
    used = [index for index, size in enumerate(sizes) if size > 0] or [0]
    return [devices[index] for index in used], [sizes[index] for index in used]


def check_split(split: Sequence[float] | str | None, devices: int) -> tuple[float, ...] | None:
    """Returns the weights of the devices.

    Raises:
        ValueError: unless ``split`` is None or has one finite weight per device, none negative, not all zero.
    """
    if split is None:
        return None
    try:
        weights = () if isinstance(split, (str, Mapping, Set)) else tuple(float(weight) for weight in split)
    except (TypeError, ValueError):  # not a sequence, or not one of numbers
        weights = ()
    if len(weights) != devices or not all(0 <= weight < float("inf") for weight in weights) or not sum(weights) > 0:
        raise ValueError(
            f"split={split!r}, expected None or one weight per device ({devices} here), none negative and not all zero"
        )
    return weights


class Shares:
    """Weights of the devices, which may change between forwards.

    Args:
        split: ``None`` for equal parts, one weight per device, ``"memory"`` for the free bytes of each device, or ``"speed"`` for
            its measured rows per second. A forward measures if its number is a power of two: often at first, then rarely, so the
            cost vanishes in a long training.
        devices: one device per replica. Replicas on one device share its memory equally.

    Raises:
        ValueError: if ``split`` has another value.
    """

    def __init__(self, split: Sequence[float] | str | None, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self.measure = split if isinstance(split, str) and split in ("memory", "speed") else None
        self.weights = None if self.measure else check_split(split, len(devices))
        self.forwards = 0
        self._is_kept = False
        self._next: tuple[float, ...] | None = None  # measured while the weights are kept

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps the weights in the block. Those that forwards measure meanwhile count afterwards."""
        self._is_kept = True
        try:
            yield
        finally:
            self._is_kept = False
            self.weights, self._next = self._next or self.weights, None

    def as_given(self, sizes: Sequence[int | None]) -> tuple[list[torch.device], list[int] | None]:
        """Returns the devices and numbers of rows of a batch that is cut already.

        Raises:
            ValueError: the devices have weights, or there are more shards than devices.
        """
        if self.measure or self.weights:
            split = self.measure or self.weights
            raise ValueError(f"split={split!r} of the model and rows that are cut by cost were given, expected one of them")
        if len(sizes) > len(self.devices):
            raise ValueError(f"rows in {len(sizes)} shards for {len(self.devices)} devices, expected one for each at most")
        return self.devices[: len(sizes)], [size or 0 for size in sizes]

    def begin(self) -> None:
        """Counts a forward, and measures free memory in the forwards that measure."""
        self.forwards += 1
        if self.measure == "memory" and self._measures_now():
            free = [free_bytes(device) / self.devices.count(device) for device in self.devices]
            self._take(_normalised(free))

    def timed(
        self, work: list[Callable[[], T]], devices: Sequence[torch.device], rows: Sequence[int] | None
    ) -> list[Callable[[], T]]:
        """Wraps the work of each replica in a timer, in the forwards that measure. A timer waits until its device is idle."""
        if self.measure != "speed" or not self._measures_now() or rows is None or list(devices) != self.devices:
            return work
        seconds: dict[int, float] = {}

        def timed_work(index: int) -> T:
            started = time.perf_counter()
            result = work[index]()
            if devices[index].type != "cpu":
                torch.accelerator.synchronize(devices[index])
            seconds[index] = time.perf_counter() - started
            if len(seconds) == len(work):
                self._update_weights([rows[i] / max(seconds[i], 1e-9) for i in range(len(work))])
            return result

        return [lambda index=index: timed_work(index) for index in range(len(work))]  # type: ignore[misc]

    def _update_weights(self, rates: list[float]) -> None:
        measured = _normalised(rates)
        weights = self._next or self.weights
        # The mean with the previous weights limits the effect of a single slow forward.
        self._take(measured if weights is None else tuple((old + new) / 2 for old, new in zip(weights, measured, strict=True)))

    def _take(self, weights: tuple[float, ...]) -> None:
        if self._is_kept:
            self._next = weights
        else:
            self.weights = weights

    def _measures_now(self) -> bool:
        return self.forwards & (self.forwards - 1) == 0 and self.forwards > (1 if self.measure == "speed" else 0)

    def __repr__(self) -> str:
        weights = "equal" if self.weights is None else ", ".join(f"{weight / sum(self.weights):.1%}" for weight in self.weights)
        return weights if self.measure is None else f"{weights} by {self.measure}"


def _normalised(values: Sequence[float]) -> tuple[float, ...]:
    """Scales values to a sum of one. Each device keeps at least a hundredth of an equal share, so that it is measured again."""
    least = sum(values) / len(values) / 100 or 1.0
    raised = [max(value, least) for value in values]
    return tuple(value / sum(raised) for value in raised)
