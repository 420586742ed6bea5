"""Sums of the bits of parameters, which show the writes that torch does not record.

Writes in place, another address and ``requires_grad`` are recorded. Other writes, such as
``parameter.data.mul_()``, change the sum of a parameter's bits. It is taken on the device of the
module when the copies have its values, and again before a later forward. The host waits for the
second sum, so every forward has the values that its parameters have now. ::

    device 0     update 7 | note   ...   compare |  copies of what differs | forward 8
    host                          makes replicas | waits                   | launches forward 8

A plain optimizer writes to what it trains in every update. Such parameters have no sums, and are
copied before each forward with gradients.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..runtime import transport
from ..runtime.devices import start_copy

Refresh = Literal["always", "recorded"]

_WORDS = 1021  # A prime, and no size of a layer.


def check_refresh(refresh: str) -> None:
    """Raises ``ValueError`` for another rule than those of :class:`DataParallelModel`."""
    if refresh not in ("always", "recorded"):
        raise ValueError(f"refresh={refresh!r}, expected 'always' or 'recorded'")


class GroupSum(NamedTuple):
    """Parameters that have one sum, as many as a buffer of transport has.

    The sum is on its way to the host.
    """

    places: list[int]
    total: Callable[[], Tensor]


class NotedSums:
    """Sums of parameters when their copies had the same values. A parameter has a place in its
    tree.
    """

    def __init__(self) -> None:
        self.groups: list[GroupSum] = []
        # Waits for a comparison, and returns the places of the groups that have another sum.
        self.read_changed: Callable[[], list[int]] | None = None

    def forget(self, places: Iterable[int]) -> None:
        """Forgets the sums of ``places``, and of the others in their groups."""
        gone = {*places}
        self.groups = [group for group in self.groups if gone.isdisjoint(group.places)]

    def note(self, parameters: Sequence[Tensor], *kinds: Collection[int]) -> None:
        """Takes the sums of places that have none. No group has places of two kinds."""
        for kind in kinds:
            # A subclass of tensors, such as a fake one, may have no bits.
            places = [i for i in sorted(kind) if type(parameters[i].detach()) is Tensor]
            chunks = transport.chunks([parameters[i] for i in places], transport.BUFFER_BYTES)
            for chunk in chunks:
                self.groups.append(_sum_up(parameters, [places[i] for i in chunk]))

    def compare(
        self,
        parameters: Sequence[Tensor],
        changed: Collection[int],
        wanted: set[int],
        kinds: Iterable[set[int]],
    ) -> set[int]:
        """Forgets the sums of ``changed``, and starts to compare groups within ``wanted``.

        Returns the places of ``wanted`` that are in none, which are to be copied. ``kinds`` are
        those of :meth:`note`, and other places are in none.
        """
        self.forget(changed)
        settled = wanted.intersection(itertools.chain(*kinds))
        groups = [group for group in self.groups if settled.issuperset(group.places)]
        if groups:
            after = [_sum_up(parameters, group.places) for group in groups]

            def read_changed() -> list[int]:
                self.read_changed = None
                places = [
                    place
                    for before, now in zip(groups, after, strict=True)
                    if before.total() != now.total()
                    for place in now.places
                ]
                self.forget(places)
                return places

            self.read_changed = read_changed
        unknown = wanted.difference(*[group.places for group in groups])
        self.forget(unknown)
        return unknown


def _sum_up(parameters: Sequence[Tensor], places: list[int]) -> GroupSum:
    return GroupSum(places, start_copy(checksum([parameters[i] for i in places])))


@torch.no_grad()
def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a number of the bits of tensors of one dtype, on their device.

    Their memory is read twice, as words of 64 bits in rows of 1021. The sums of all rows and of all
    columns have weights of their own. So other places and other signs make other numbers.
    """
    layouts = [*map(transport.layout_of, tensors)]
    flat = transport.pack(layouts, [each.detach() for each in tensors])
    width = _WORDS * 16 // flat.itemsize  # two rows, for complex numbers of 128 bits
    end = len(flat) - len(flat) % width
    rest = flat.new_zeros(width)
    rest[: len(flat) - end] = flat[end:]
    whole = flat[:end]
    if whole.storage_offset() % 8:  # Words have no such address.
        whole = whole.clone()
    words = [part.view(torch.int64).view(-1, _WORDS) for part in (whole, rest)]
    sums = torch.cat([part.sum(dim) for part in words for dim in (0, 1)])
    weights = torch.arange(1, len(sums) + 1, device=sums.device) ** 3 * -7046029254386353131 >> 33
    return ((sums ^ sums >> 32) * weights).sum()
