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

_WORDS = 8191  # A prime, and no size of a layer.


def check_refresh(refresh: str) -> None:
    """Raises ``ValueError`` for another rule than those of :class:`DataParallelModel`."""
    if refresh not in ("always", "recorded"):
        raise ValueError(f"refresh={refresh!r}, expected 'always' or 'recorded'")


class Group(NamedTuple):
    """Parameters that have one sum, as many as a buffer of transport has."""

    places: list[int]
    total: Tensor


class NotedSums:
    """Sums of parameters when their copies had the same values. A parameter has a place in its
    tree.
    """

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self._compared: list[Group] = []  # with their present sums
        self._wait: Callable[[], Tensor] | None = None

    def forget(self, places: Iterable[int]) -> None:
        """Forgets the sums of ``places``, and of the others in their groups."""
        gone = {*places}
        self.groups = [group for group in self.groups if gone.isdisjoint(group.places)]

    def note(self, parameters: Sequence[Tensor], *kinds: Collection[int]) -> None:
        """Takes the sums of places that have none. No group has places of two kinds."""
        for kind in kinds:
            # a subclass of tensors, such as fake ones, may have no bits
            places = [i for i in sorted(kind) if type(parameters[i].detach()) is Tensor]
            chunks = transport.chunks([parameters[i] for i in places], transport.BUFFER_BYTES)
            groups = [[places[i] for i in chunk] for chunk in chunks]
            self.groups += _sum_up(parameters, groups)

    def compare(self, parameters: Sequence[Tensor], places: Collection[int]) -> set[int]:
        """Starts to compare the groups within ``places``. Returns the places that these have."""
        wanted = {*places}
        groups = [group for group in self.groups if wanted.issuperset(group.places)]
        self._wait = None  # A forward that failed may have left one.
        if groups:
            self._compared = _sum_up(parameters, [group.places for group in groups])
            before, after = (
                torch.stack([group.total for group in each]) for each in (groups, self._compared)
            )
            self._wait = start_copy(after != before)
        return set[int]().union(*[group.places for group in groups])

    def read(self) -> list[Group]:
        """Waits for the comparison. Returns the groups with other sums, and forgets those before."""
        wait = self._wait
        self._wait = None
        if wait is None:
            return []
        changed = [*itertools.compress(self._compared, wait().tolist())]
        self.forget(itertools.chain(*[group.places for group in changed]))
        return changed


def _sum_up(parameters: Sequence[Tensor], groups: Sequence[list[int]]) -> list[Group]:
    totals = [checksum([parameters[i] for i in places]) for places in groups]
    return [*map(Group, groups, totals)]


@torch.no_grad()
def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a number of the bits of tensors of one dtype, on their device.

    Their memory is read twice, as words of 64 bits in rows of 8191. The sums of all rows and of all
    columns have weights of their own. So other places and other signs make other numbers.
    """
    layouts = [*map(transport.layout_of, tensors)]
    flat = transport.pack(layouts, [each.detach() for each in tensors])
    width = _WORDS * 8 // flat.itemsize
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
