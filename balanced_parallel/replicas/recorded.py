"""Replicas that copy a parameter after a write alone. Sums of bits find the writes that torch does
not record.

Writes in place, another address and ``requires_grad`` are recorded. Another write, such as
``parameter.data.mul_()``, changes the sum of the bits of a parameter. It is taken on the device of
the module, when the parameter is copied and before later forwards. The host reads the comparison
after it has launched the forward, when the device has begun it. After a write the parameter is
copied, and the forward runs again. ::

    device 0     update 7                              | sums | forward 8    | backward 8
    host         launches sums and forward 8 | waits for sums | launches backward 8

From then on this parameter is copied before each forward. So are those that a plain optimizer
trains, if gradients are computed: its step writes to them.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..runtime import transport
from ..runtime.devices import start_copy

Refresh = Literal["always", "recorded"]

_WORDS = 8191  # A prime: elements that a program permutes come to other columns.


def check_refresh(refresh: str) -> None:
    """Raises ``ValueError`` for another rule than those of :class:`DataParallelModel`."""
    if refresh not in ("always", "recorded"):
        raise ValueError(f"refresh={refresh!r}, expected 'always' or 'recorded'")


class Group(NamedTuple):
    """Parameters whose bits are summed together, as many as a buffer of transport has."""

    places: list[int]
    total: Tensor  # when they were copied


class UnrecordedWrites:
    """Writes to parameters that torch does not record. A parameter has a place in its tree."""

    def __init__(self) -> None:
        self.by_forward = False  # The forward itself makes such writes.
        self._groups: list[Group] = []
        self._distrusted = set[int]()  # They were written to before, and have no sums.
        self._compared: list[Group] = []
        self._totals = torch.empty(0)  # those of the groups that are compared
        self._wait: Callable[[], Tensor] | None = None

    @property
    def is_comparing(self) -> bool:
        """True between :meth:`compare` and :meth:`read`, if there is something to read."""
        return self._wait is not None

    def forget(self, places: Iterable[int]) -> None:
        """Forgets the sums of ``places``, and of the others in their groups."""
        gone = {*places}
        self._groups = [group for group in self._groups if gone.isdisjoint(group.places)]

    def distrust(self, places: Iterable[int]) -> None:
        """Takes no sums of ``places`` any more."""
        self._distrusted.update(places)
        self.forget(self._distrusted)

    def note(self, parameters: Sequence[Tensor], *kinds: set[int]) -> None:
        """Takes the sums of places that were copied. Each kind has groups of its own."""
        self.forget(set[int]().union(*kinds))
        groups = []
        for kind in kinds:
            places = sorted(kind - self._distrusted)
            tensors = [parameters[i] for i in places]
            for chunk in transport.chunks(tensors, transport.BUFFER_BYTES):
                groups.append([places[i] for i in chunk])
        totals = _sum_up(parameters, groups).unbind()
        self._groups += map(Group, groups, totals)

    def compare(self, parameters: Sequence[Tensor], places: set[int]) -> set[int]:
        """Starts to compare the groups within ``places``. Returns the places that these have."""
        self._compared = [group for group in self._groups if places.issuperset(group.places)]
        self._wait = None  # a forward that failed has left its comparison
        before = [group.total for group in self._compared]
        if before:
            self._totals = _sum_up(parameters, [group.places for group in self._compared])
            self._wait = start_copy(self._totals != torch.stack(before))
        return {place for group in self._compared for place in group.places}

    def read(self) -> list[int]:
        """Returns the places of the groups with other bits than when they were copied."""
        wait = self._wait
        self._wait = None
        if wait is None:
            return []
        groups = itertools.compress(self._compared, wait().tolist())
        return [place for group in groups for place in group.places]

    def have_changed(self, parameters: Sequence[Tensor]) -> bool:
        """Returns True if parameters have other bits than when the comparison began."""
        totals = _sum_up(parameters, [group.places for group in self._compared])
        return not torch.equal(totals, self._totals)


def _sum_up(parameters: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> Tensor:
    return checksums([parameters[i] for i in places] for places in groups)


def checksums(groups: Iterable[Sequence[Tensor]]) -> Tensor:
    """Returns a number of the bits of each group of tensors of one dtype, on their device.

    Memory is read once or twice. Sums of 64-bit words wrap around, so two signs that change could
    cancel there: values are added up as well.
    """
    columns = []
    for tensors in groups:
        layouts = [*map(transport.layout_of, tensors)]
        size = sum(map(torch.numel, tensors))
        flat = transport.pack(layouts, [each.detach() for each in tensors], size + -size % 8)
        if flat.storage_offset() % 8:
            flat = flat.clone()
        words = _sum_columns(flat.view(torch.int64))
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        if flat.is_floating_point() and flat.itemsize > 1:
            words = words * 31 + _sum_columns(flat).view(torch.int64)
        columns.append(words)
    if not columns:
        return torch.empty(0)
    total = torch.stack(columns)
    places = torch.arange(1, _WORDS + 1, device=total.device)
    weights = places**3 * -7046029254386353131 >> 33
    return ((total ^ (total >> 32)) * weights).sum(1)


def _sum_columns(flat: Tensor) -> Tensor:
    """Returns the sums of the columns, if a row has 8191 words of 64 bits."""
    width = _WORDS * 8 // flat.itemsize
    rows = len(flat) // width
    begin = rows * width
    # autocast would choose another dtype
    sums = flat[:begin].view(rows, width).sum(0, dtype=flat.dtype)
    sums[: len(flat) - begin] += flat[begin:]
    return sums
