"""Collectives by copies between devices, for devices that NCCL does not connect, and for simulated ones.

A copy between two GPUs runs on the current stream of its source, and the current stream of its target waits for it. So a device
takes part in one copy at a time. Copies between all devices are made in rounds of disjoint pairs, each in both directions::

    round    pairs of 4 devices
    1        0-3  1-2
    2        0-1  2-3
    3        0-2  1-3

Sums are taken in the order of the tensors, whatever the order of the copies is.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from .devices import move

__all__: list[str] = []


def pairs(count: int) -> Iterator[tuple[int, int]]:
    """Yields each pair of ``count`` devices once, round by round."""
    last = count - 1 + count % 2  # the last of an even number of devices; if ``count`` is odd, nobody's
    for turn in range(last):
        for one in range(last):
            other = (turn - one) % last
            other = last if other == one else other
            if one < other < count:
                yield one, other


def copy(target: Tensor, source: Tensor) -> None:
    """Copies values. Only copies to an accelerator are asynchronous, as in :func:`move`."""
    target.copy_(source, non_blocking=target.device.type != "cpu")


def broadcast(tensor: Tensor, targets: Sequence[Tensor]) -> None:
    """Copies ``tensor`` to each of ``targets``."""
    for target in targets:
        copy(target, tensor)


def reduce(tensors: Sequence[Tensor], output: Tensor) -> None:
    """Sums the tensors into ``output``."""
    copy(output, tensors[0])
    for tensor in tensors[1:]:
        output.add_(move(tensor, output.device))


def reduce_scatter(tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Sums the tensors, and puts one slice of the sum into each of ``outputs``, which are on the same devices.

    A slice is added as soon as those of all earlier devices are there.
    """
    slices = [tensor.split([output.numel() for output in outputs]) for tensor in tensors]
    received = [{place: slices[place][place]} for place in range(len(tensors))]
    added = [0] * len(tensors)

    def add(target: int) -> None:
        while (part := received[target].pop(added[target], None)) is not None:
            outputs[target].add_(part) if added[target] else copy(outputs[target], part)
            added[target] += 1

    add(0)
    for one, other in pairs(len(tensors)):
        for source, target in ((one, other), (other, one)):
            part = slices[source][target]
            received[target][source] = move(part, outputs[target].device) if source else part  # the first is copied by add()
            add(target)


def all_gather(tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Concatenates the tensors in each of ``outputs``, which are on the same devices. A tensor may be a slice of its output."""
    slices = [output.split([tensor.numel() for tensor in tensors]) for output in outputs]
    for place, tensor in enumerate(tensors):
        if slices[place][place].data_ptr() != tensor.data_ptr():
            copy(slices[place][place], tensor)
    for one, other in pairs(len(tensors)):
        copy(slices[one][other], tensors[other])
        copy(slices[other][one], tensors[one])
