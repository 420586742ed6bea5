"""Traces of a module with many equal blocks, from those of the same module with three and with four
of them.

An update is a sequence of allocations. With one block more, the sequence has some more runs of
allocations: in the forward, in the backward, and in each operator over all parameters. Each such
run repeats the one before it::

    three blocks    first  middle                   last  loss  last                   middle  first
    four blocks     first  middle  middle           last  loss  last           middle  middle  first
    n blocks        first  middle  middle  middle   last  loss  last   middle  middle  middle  first

The place where an allocation is released moves likewise: with its own run, against it, or not at
all. A module whose traces do not look like that, such as one whose blocks read the outputs of all
earlier ones, is traced with all of its blocks.
"""

import collections
import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ..problem import Request
from .allocations import Block, Trace

Integers = NDArray[np.int64]
FEWEST = 3  # Blocks in the shorter of two traces: one of them is neither the first nor the last.
SHORTEST = 8  # A shorter stack is traced as it is, which takes as long as seven blocks.


@dataclass(frozen=True)
class Stack:
    """Equal blocks: ``length`` children of a container from ``start`` on.

    ``prefix`` is the name of the container, with a dot.
    """

    prefix: str
    start: int
    length: int

    @contextlib.contextmanager
    def cut(self, module: nn.Module, count: int) -> Iterator[None]:
        """Leaves only ``count`` of the blocks in the container, until the end of the block."""
        container = module.get_submodule(self.prefix.removesuffix("."))
        children = container._modules  # No public function returns a dictionary to change.
        with patch.dict(children):
            for name in list(children)[self.start + count : self.start + self.length]:
                del children[name]
            yield

    def place(self, name: str) -> tuple[str, int]:
        """Returns the name of a module with a # for the number of its block, and that number; 0
        outside of the stack.
        """
        number, dot, rest = name.removeprefix(self.prefix).partition(".")
        if (
            not name.startswith(self.prefix)
            or not number.isdigit()
            or not 0 <= int(number) - self.start < self.length
        ):
            return name, 0
        return f"{self.prefix}#{dot}{rest}", int(number)


def find_stack(module: nn.Module) -> Stack | None:
    """Returns the stack of at least ``SHORTEST`` equal blocks with the most modules."""
    owners = _owners(module)
    stacks: dict[Stack, int] = {}
    for name, container in module.named_modules():
        blocks = list(container) if isinstance(container, (nn.ModuleList, nn.Sequential)) else []
        start = 0
        while len(blocks) - start >= SHORTEST:
            length = _count_equal(blocks[start:], owners)
            if length >= SHORTEST:
                stack = Stack(f"{name}." if name else "", start, length)
                stacks[stack] = length * len(list(blocks[start].modules()))
            start += length
    return max(stacks, key=stacks.__getitem__, default=None)


def _owners(module: nn.Module) -> collections.Counter[int]:
    """Counts the modules that own each parameter, by id."""
    return collections.Counter(
        id(parameter)
        for part in module.modules()
        for _, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
    )


def _count_equal(blocks: Sequence[nn.Module], owners: Mapping[int, int]) -> int:
    """Returns the number of blocks from the first on that are alike, and share parameters with all
    of them or with none.
    """
    shared = _owners(blocks[0]).keys() & _owners(blocks[1]).keys()
    for number, block in enumerate(blocks):
        is_apart = all(
            owners[each] == count or each in shared for each, count in _owners(block).items()
        )
        pairs = (blocks[0], number), (blocks[max(number - 1, 0)], 1)
        if not (
            is_apart and all(_is_alike(other, block, distance, set()) for other, distance in pairs)
        ):
            return max(number, 1)
    return len(blocks)


def _is_alike(left: Any, right: Any, distance: int, seen: set[tuple[int, int]]) -> bool:
    """Returns True if two parts of blocks are alike: equal numbers, numbers of their blocks, or
    rates between 0 and 1.
    """
    if left is right or (id(left), id(right)) in seen:
        return True
    if type(left) is not type(right):
        return False
    seen.add((id(left), id(right)))
    if type(left) is int:
        return right - left in (0, distance)
    if isinstance(left, float):
        return left == right or (0 < left < 1 and 0 < right < 1)  # Stochastic depth has such rates.
    entries = _entries(left)
    others = _entries(right)
    if not (isinstance(entries, dict) and isinstance(others, dict)):
        return bool(entries == others)
    return list(entries) == list(others) and all(
        _is_alike(entries[key], others[key], distance, seen) for key in entries
    )


def _entries(value: object) -> object:
    """Returns the entries of a container, the attributes of an object, or else what must be equal."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.layout, value.device, value.requires_grad
    if isinstance(value, str) and len(parts := re.split(r"(\d+)", value)) > 1:
        # Layers of peft know their names, which have the numbers of blocks.
        value = [int(part) if part.isdecimal() else part for part in parts]
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, MethodType):
        return value.__func__
    return (
        vars(value)
        if hasattr(value, "__dict__") and not isinstance(value, (dict, FunctionType))
        else value
    )


class NotRepeating(Exception):
    """Two traces do not show what each further block adds."""


class Entry(NamedTuple):
    """An allocation, released after the entry at ``released``; without a block a mark, or a piece
    of a parameter.
    """

    label: tuple[Any, ...]
    number: int = 0  # The label has a # for the number of an equal block.
    released: int = -1
    block: Block | None = None

    @property
    def size(self) -> int:
        """The bytes of an allocation."""
        return 0 if self.block is None else self.block.size


_END = Entry(("end",))  # Blocks that stay are released at this last entry.


def find_sites(short: Sequence[Entry], long: Sequence[Entry]) -> list[tuple[int, int]]:
    """Returns the end in the shorter sequence, and the length, of each run that the longer one has
    once more.

    Raises:
        NotRepeating: the longer sequence differs in another way.
    """
    a, b = ([(entry.label, entry.size) for entry in entries] for entries in (short, long))
    sites: list[tuple[int, int]] = []
    i = j = 0
    while i < len(a) or j < len(b):
        free = i - (sites[-1][0] if sites else 0)
        candidates = *range(1, min(free, len(b) - j - len(a) + i) + 1), 0
        lengths = [length for length in candidates if b[j - length : j] == b[j : j + length]]
        matches = {n: _count_matches(a[i:], b[j + n :], may_differ=n == 0) for n in lengths}
        if not any(matches.values()):
            # The entry behind a run may differ too.
            matches = {n: _count_matches(a[i:], b[j + n :], may_differ=True) for n in lengths}
        length = max(matches, key=matches.__getitem__)
        if not matches[length]:
            raise NotRepeating
        if length:
            # Any place in the repeating part would do. In its middle, the first and the last block
            # are far.
            periods = range(j - length, j - free, -1)
            slack = next(
                (n for n, end in enumerate(periods) if b[end - 1] != b[end - 1 + length]),
                len(periods),
            )
            sites.append((i - slack // 2, length))
        i = i + matches[length]
        j = j + length + matches[length]
    return sites


Sized = tuple[tuple[Any, ...], int]  # the label and the bytes of an entry


def _count_matches(left: Sequence[Sized], right: Sequence[Sized], *, may_differ: bool) -> int:
    """Returns the number of equal first entries; the size of the first may differ if ``may_differ``."""
    pairs = enumerate(zip(left, right, strict=False))
    return next(
        (n for n, (a, b) in pairs if a != b and (n or not may_differ or a[0] != b[0])),
        min(len(left), len(right)),
    )


def extend(short: Sequence[Entry], long: Sequence[Entry], more: int) -> tuple[Integers, Integers]:
    """Returns the sequence of ``more`` blocks than the shorter one has: for each entry its place in
    the shorter one; and its number, its size and its release.

    The longer one has one block more.

    Places, numbers and sizes are affine in the blocks, and in the repetition of a run. An entry in
    both sequences, and its repetition in the longer one, give all terms.

    Raises:
        NotRepeating: the two sequences do not show what a block adds.
    """
    # Each further block adds so many entries before an entry, and in the run of an entry that
    # repeats.
    shifts, lengths = np.zeros((2, len(short)), dtype=np.int64)
    for end, length in find_sites(short, long):
        lengths[end - length : end] = length
        shifts[end:] += length
    first, others = (
        np.array([(each.number, each.size, each.released % len(entries)) for each in entries])
        for entries in (short, long)
    )
    places = np.arange(len(short)) + shifts
    starts = first + (others[places] - first) * more
    steps = others[places + lengths] - others[places]
    counts = np.where(lengths, more + 1, 1)
    sources = np.repeat(np.arange(len(short)), counts)
    repetitions = np.arange(len(sources)) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.argsort(sources + (shifts * more)[sources] + lengths[sources] * repetitions)
    sources = sources[order]
    facts = starts[sources] + steps[sources] * repetitions[order, None]
    labels = np.array([hash(entry.label) for entry in short])
    released = facts[:, 2]
    if released.min() < 0 or released.max() >= len(sources):
        raise NotRepeating
    # A release must be behind an entry of the same label.
    if (labels[sources[released]] != labels[first[sources, 2]]).any():
        raise NotRepeating
    return sources, facts


def entries_of(trace: Trace, stack: Stack) -> list[Entry]:
    """Returns the allocations and the marks of a trace in their order, and an end."""
    events: list[int | str] = [*trace.events, *_END.label]
    for name, position in reversed(trace.marks.items()):
        events.insert(position, name)
    entries: list[Entry] = []
    places: dict[int, int] = {}
    for event in events:
        if isinstance(event, str):
            entries.append(Entry((event,)))
        elif event > 0:
            places[event], block = len(entries), trace.blocks[event - 1]
            module, number = stack.place(block.module)
            label = module, block.device, block.kind, block.operator, block.line, block.stream
            entries.append(Entry(label, number, block=block))
        else:
            place = places.pop(-event)
            entries[place] = entries[place]._replace(released=len(entries) - 1)
    return entries


def extend_traces(shorts: Sequence[Trace], long: Trace, stack: Stack, more: int) -> list[Trace]:
    """Returns the traces of ``more`` blocks than the shorter ones have, which have other rows each.

    The longer one has one block more than the last of them, whose rows it has. Operations of a
    block are in proportion to the rows.

    Raises:
        NotRepeating: the traces do not show it.
    """
    *_, last = sequences = [entries_of(short, stack) for short in shorts]
    if len({tuple(entry[:3] for entry in entries) for entries in sequences}) > 1:
        raise NotRepeating
    sources, extended = extend(last, entries_of(long, stack), more)
    others = extended[:, 1]
    sizes = np.array([[entry.size for entry in entries] for entries in sequences])[:, sources]
    varies = sizes != sizes[-1]
    if (varies & (others != sizes[-1])).any():
        raise NotRepeating  # A size depends on the rows and on the number of blocks.
    blocks: list[list[Block]] = [[] for _ in shorts]
    events: list[int] = []
    marks: dict[str, int] = {}
    sizes = np.where(varies, sizes, others).T.tolist()
    releases = collections.defaultdict[int, list[int]](list)
    for place, (source, number, _, end) in enumerate(
        np.column_stack((sources, extended))[:-1].tolist()
    ):
        label, _, _, block = last[source]
        if block is None:
            marks[label[0]] = len(events)
        else:
            module = label[0].replace("#", str(number))
            for each, size in zip(blocks, sizes[place], strict=True):
                each.append(block._replace(size=size, module=module))
            events.append(len(blocks[0]))
            releases[end].append(-len(blocks[0]))
        events += releases.pop(place, ())
    flops = (long.flops - shorts[-1].flops) * more
    return [
        short._replace(
            blocks=each,
            events=events,
            marks=marks,
            flops=short.flops + flops * short.rows // shorts[-1].rows,
        )
        for short, each in zip(shorts, blocks, strict=True)
    ]


def find_repeated(request: Request) -> tuple[Stack, int] | None:
    """Returns the stack whose blocks repeat in a trace, and the fewest of them that show it; None if
    all must be traced.
    """
    # A block of FSDP2 is released while the next but one is gathered. Offloaded inputs of
    # checkpoints wait for two.
    waits = {"checkpoint_activations", "offload_activations"}.issubset(request.savings)
    count = FEWEST + request.layout.is_sharded + 4 * waits
    stack = request.stack or find_stack(request.module)
    if stack is None or stack.length < 2 * count + 2 or request.optimizer.has_state:
        return None
    # Devices must divide the parameters of each further block in the same way. Ranks divide whole
    # modules.
    if request.layout.is_distributed:
        return (stack, count) if request.devices == 1 or not request.balanced else None
    pieces = []
    for number in (FEWEST, FEWEST + 1, stack.length):
        with stack.cut(request.module, number):
            pieces.append(list(_pieces(request, stack)))
    try:
        sources, facts = extend(pieces[0], pieces[1], stack.length - FEWEST)
    except NotRepeating:
        return None
    numbers = zip(sources, facts[:, 0], strict=True)
    extended = [(pieces[0][place].label, number) for place, number in numbers]
    return (stack, count) if extended == [entry[:2] for entry in pieces[2]] else None


def _pieces(request: Request, stack: Stack) -> Iterator[Entry]:
    """Yields the pieces of the parameters, and an end."""
    names = {
        id(parameter): stack.place(name) for name, parameter in request.module.named_parameters()
    }
    for facts, parameter in request.layout.pieces(request):
        name, number = names[id(parameter)]
        yield Entry((name, *facts), number)
    yield _END
