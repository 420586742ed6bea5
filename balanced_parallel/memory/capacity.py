"""The capacity of a device and the number of devices that a batch needs, if nothing fits."""

import dataclasses
from collections.abc import Sequence

from .candidates import SCALARS, Measured, measure

__all__: list[str] = []

TRACED_DEVICES = 16  # more take long to trace


def what_would_fit(measured: Sequence[Measured], capacity: int) -> tuple[int, int | None]:
    """Returns the capacity at which one row per device fits, and the number of devices at which it fits ``capacity``.

    With :class:`BalancedOptimizer`, the memory of one of ``n`` devices is ``fixed + sharded / n``. Two traces give both terms.
    The result, up to 16 devices, is traced too, with its neighbours. The number is None if no number of devices suffices.
    """

    def lowest(each: Measured) -> int:
        return max(each.reserved(i, 1, 2) or 0 for i in range(each.request.devices)) + SCALARS

    least = min(measured, key=lowest)
    balanced = dataclasses.replace(least.option, balanced=True)
    rows = least.request.update_rows or 1

    counted = {each.request.devices: each for each in measured if each.option == balanced}

    def trace(*counts: int) -> None:
        asked = [n for n in counts if n not in counted]
        new = {n: Measured(dataclasses.replace(least.request, devices=n), balanced, (capacity,) * n, rows) for n in asked}
        measure(list(new.values()), 2)
        counted.update(new)

    def lowest_of(count: int) -> int:
        trace(count)
        return lowest(counted[count])

    trace(2, 4)
    sharded = (lowest_of(2) - lowest_of(4)) * 4  # 1 / n falls from 1 / 2 to 1 / 4
    free = capacity - (lowest_of(4) - sharded // 4)
    if free <= 0 or sharded <= 0:
        return lowest(least), None
    count = max(least.request.devices + 1, -(-sharded // free))
    if least.request.devices + 1 < count <= TRACED_DEVICES:
        trace(count - 1, count)
    while count < TRACED_DEVICES and lowest_of(count) > capacity:
        count += 1
    while least.request.devices + 1 < count <= TRACED_DEVICES and lowest_of(count - 1) <= capacity:
        count -= 1
    return lowest(least), count
