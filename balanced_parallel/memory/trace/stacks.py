"""Traces of a module with many equal blocks, from those of the same module with three and with four of them.

An update is a sequence of allocations. With one block more, the sequence has some more runs of allocations: in the forward, in
the backward, and in each operator over all parameters. Each such run repeats the one before it::

    three blocks    first  middle                   last  loss  last                   middle  first
    four blocks     first  middle  middle           last  loss  last           middle  middle  first
    n blocks        first  middle  middle  middle   last  loss  last   middle  middle  middle  first

The place where an allocation is released moves likewise: with its own run, against it, or not at all. A module whose traces do
not look like that, such as one whose blocks read the outputs of all earlier ones, is traced with all of its blocks.
"""

import collections
import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import Tensor, nn

from ...runtime.torch_private import children_of, parameters_of
from ..problem import Request
from .allocations import Block, Trace

FEWEST = 3  # blocks in the shorter of two traces: one of them is neither the first nor the last
SHORTEST = 8  # a shorter stack is traced as it is: this takes as long as seven blocks
_COUNT = re.compile(r"(^|_)(num|n)_?(hidden_|encoder_|decoder_)?(layers?|blocks?)$|^depth$")


@dataclass(frozen=True)
class Stack:
    """Equal blocks: ``length`` children of ``container`` from ``start`` on. ``prefix`` is its name, with a dot."""

    container: nn.Module
    prefix: str
    start: int
    length: int

    @contextlib.contextmanager
    def cut(self, count: int) -> Iterator[None]:
        """Leaves only ``count`` of the blocks in the container, until the end of the block."""
        children = children_of(self.container)
        with patch.dict(children):
            for name in list(children)[self.start + count : self.start + self.length]:
                del children[name]
            yield

    def correct_counts(self, module: nn.Module, count: int) -> None:
        """Sets numbers of layers in the attributes and the configurations of a copy with ``count`` blocks."""
        for owner in {id(part): part for each in module.modules() for part in (each, getattr(each, "config", None))}.values():
            for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
                if type(value) is int and value == self.length and _COUNT.search(name):
                    vars(owner)[name] = count

    def place(self, name: str) -> tuple[str, int]:
        """Returns the name of a module with a # for the number of its block, and that number; 0 outside of the stack."""
        number, dot, rest = name.removeprefix(self.prefix).partition(".")
        if not name.startswith(self.prefix) or not number.isdigit() or not 0 <= int(number) - self.start < self.length:
            return name, 0
        return f"{self.prefix}#{dot}{rest}", int(number)


def find_stack(module: nn.Module) -> Stack | None:
    """Returns the stack of at least ``SHORTEST`` equal blocks with the most modules."""
    owners = _owners(module)
    stacks: list[tuple[int, Stack]] = []
    for name, container in module.named_modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            blocks, start = list(container), 0
            while len(blocks) - start >= SHORTEST:
                length = _count_equal(blocks[start:], owners)
                if length >= SHORTEST:
                    stack = Stack(container, f"{name}." if name else "", start, length)
                    stacks.append((length * len(list(blocks[start].modules())), stack))
                start += length
    return max(stacks, key=lambda each: each[0])[1] if stacks else None


def _owners(module: nn.Module) -> collections.Counter[int]:
    """Counts the modules that own each parameter, by id."""
    parameters = (parameter for part in module.modules() for parameter in parameters_of(part).values())
    return collections.Counter(id(parameter) for parameter in parameters if parameter is not None)


def _count_equal(blocks: Sequence[nn.Module], owners: Mapping[int, int]) -> int:
    """Returns the number of blocks from the first on that are alike, and share parameters with all of them or with none."""
    shared = _owners(blocks[0]).keys() & _owners(blocks[1]).keys()
    for number, block in enumerate(blocks):
        is_apart = all(owners[each] == count or each in shared for each, count in _owners(block).items())
        before = blocks[max(number - 1, 0)]
        if not (is_apart and _is_alike(blocks[0], block, number, set()) and _is_alike(before, block, 1, set())):
            return max(number, 1)
    return len(blocks)


def _is_alike(left: object, right: object, distance: int, seen: set[tuple[int, int]]) -> bool:
    """Returns True if two parts of blocks are alike: equal numbers, numbers of their blocks, or rates between 0 and 1."""
    pair = id(left), id(right)
    if left is right or pair in seen:
        return True
    if type(left) is not type(right):
        return False
    if type(left) is int and type(right) is int:
        return right - left in (0, distance)
    if isinstance(left, float) and isinstance(right, float) and 0 < left < 1 and 0 < right < 1:
        return True  # Stochastic depth has such rates.
    seen.add(pair)
    (facts, parts), (other_facts, others) = _take_apart(left), _take_apart(right)
    return bool(facts == other_facts) and all(_is_alike(a, b, distance, seen) for a, b in zip(parts, others, strict=True))


def _take_apart(value: Any) -> tuple[object, list[object]]:
    """Returns what must be equal in two values, and their parts, which must be alike."""
    if isinstance(value, Tensor):
        return (value.shape, value.dtype, value.layout, value.device, value.requires_grad), []
    if isinstance(value, dict):
        return list(value), list(value.values())
    if isinstance(value, (list, tuple)):
        return len(value), list(value)
    if isinstance(value, MethodType):
        return value.__func__, []
    if isinstance(value, FunctionType) or not hasattr(value, "__dict__"):
        return value, []
    return None, [vars(value)]


class NotRepeating(Exception):
    """Two traces do not show what each further block adds."""


class Entry(NamedTuple):
    """An allocation; without a block a mark, or a piece of a parameter. It is released after the entry at place ``released``."""

    label: tuple[Any, ...]
    number: int  # of the equal block in the label
    block: Block | None = None
    released: int | None = None  # None for never

    @property
    def size(self) -> int:
        """The bytes of an allocation."""
        return 0 if self.block is None else self.block.size


_WINDOW = 3  # entries that must be equal behind an inserted run


def find_sites(short: Sequence[Entry], long: Sequence[Entry]) -> list[tuple[int, int]]:
    """Returns the end in the shorter sequence, and the length, of each run that the longer one has once more.

    Raises:
        NotRepeating: the longer sequence differs in another way.
    """
    shapes, longer_shapes = ([entry.label for entry in entries] for entries in (short, long))
    a, b = ([(entry.label, entry.size) for entry in entries] for entries in (short, long))
    waiting: list[tuple[int, int, list[tuple[int, int]]]] = [(0, 0, [])]
    tried: set[tuple[int, int]] = set()
    while waiting:
        i, j, sites = waiting.pop()
        while i < len(a) and j < len(b) and a[i] == b[j]:
            i, j = i + 1, j + 1
        if i == len(a) and j == len(b):
            return sites
        if (i, j) in tried:
            continue
        tried.add((i, j))
        if i < len(a) and j < len(b) and shapes[i] == longer_shapes[j]:
            waiting.append((i + 1, j + 1, sites))  # its size depends on the number of blocks
        free = i - (sites[-1][0] if sites else 0)
        for length in range(min(len(b) - j - len(a) + i, free), 0, -1):  # the shortest is tried first
            after = j + length
            is_repeated = a[i - length : i] == b[j - length : j] == b[j:after]
            if is_repeated and shapes[i : i + _WINDOW] == longer_shapes[after : after + len(shapes[i : i + _WINDOW])]:
                # any place in the repeating part would do; in its middle, the first and the last block, which differ, are far
                periods = range(j - length, j - free, -1)
                slack = next((n for n, end in enumerate(periods) if b[end - 1] != b[end - 1 + length]), len(periods))
                waiting.append((i, after, [*sites, (i - slack // 2, length)]))
    raise NotRepeating


def extend(short: Sequence[Entry], long: Sequence[Entry], more: int) -> list[Entry]:
    """Returns the sequence of ``more`` blocks than the shorter one has. The longer one has one block more.

    Places, numbers and sizes are affine in the blocks, and in the repetition of a run. An entry in both sequences, and its
    repetition in the longer one, give all terms.

    Raises:
        NotRepeating: the two sequences do not show what a block adds.
    """
    sites = find_sites(short, long)
    result: list[Any] = [None] * (len(short) + (len(long) - len(short)) * more)
    releases: list[tuple[int, Entry]] = []  # the place of each release, and the entry that it must be behind
    shift = 0  # entries that each block adds before the present one
    for place, entry in enumerate(short):
        while sites and place >= sites[0][0]:
            shift += sites.pop(0)[1]
        length = sites[0][1] if sites and place >= sites[0][0] - sites[0][1] else 0  # of the run that repeats the entry
        samples = entry, long[place + shift], long[place + shift + length]
        if len({sample.released is None for sample in samples}) > 1:
            raise NotRepeating
        for repetition in range(more + 1 if length else 1):
            number, size, released = (
                first + (longer - first) * more + (repeated - longer) * repetition
                for first, longer, repeated in zip(
                    *((each.number, each.size, each.released or 0) for each in samples), strict=True
                )
            )
            block = entry.block
            if block is not None and (number, size) != (entry.number, entry.size):
                block = dataclasses.replace(block, size=size, module=entry.label[0].replace("#", str(number)))
            if entry.released is not None:
                releases.append((released, short[entry.released]))
            end = None if entry.released is None else released
            result[place + shift * more + length * repetition] = Entry(entry.label, number, block, end)
    if not all(0 <= place < len(result) and result[place].label == entry.label for place, entry in releases):
        raise NotRepeating
    return result


_MARKS = ("first", "second", "backward", "update")  # in their order


def entries_of(trace: Trace, stack: Stack) -> list[Entry]:
    """Returns the allocations and the marks of a trace in their order."""
    marks = sorted(trace.marks, key=lambda name: (trace.marks[name], _MARKS.index(name)), reverse=True)
    entries: list[Entry] = []
    places: dict[int, int] = {}
    for position, event in enumerate([*trace.events, 0]):
        while marks and trace.marks[marks[-1]] == position:
            entries.append(Entry((marks.pop(),), 0))
        if event > 0:
            places[event], block = len(entries), trace.blocks[event - 1]
            module, number = stack.place(block.module)
            label = module, block.device, block.kind, block.operator, block.line, block.stream
            entries.append(Entry(label, number, block))
        elif event < 0:
            place = places[-event]
            entries[place] = entries[place]._replace(released=len(entries) - 1)
    return entries


def replace_entries(trace: Trace, entries: Sequence[Entry], flops: int) -> Trace:
    """Returns a trace with other allocations and operations."""
    released: collections.defaultdict[int, list[int]] = collections.defaultdict(list)
    blocks: list[Block] = []
    events: list[int] = []
    marks: dict[str, int] = {}
    for place, entry in enumerate(entries):
        if entry.block is None:
            marks[entry.label[0]] = len(events)
        else:
            blocks.append(entry.block)
            events.append(len(blocks))
            if entry.released is not None:
                released[entry.released].append(-len(blocks))
        events += released.pop(place, [])
    return dataclasses.replace(trace, blocks=blocks, events=events, marks=marks, flops=flops)


def divides_evenly(request: Request, stack: Stack) -> bool:
    """Returns True if devices or ranks divide the parameters of each further block in the same way."""
    pieces = []
    for count in (FEWEST, FEWEST + 1, stack.length):
        with stack.cut(count):
            pieces.append(list(_pieces(request, stack)))
    try:
        return extend(pieces[0], pieces[1], stack.length - FEWEST) == pieces[2]
    except NotRepeating:
        return False


def _pieces(request: Request, stack: Stack) -> Iterator[Entry]:
    """Yields the pieces of the parameters."""
    names = {id(parameter): stack.place(name) for name, parameter in request.module.named_parameters()}
    for facts, parameter in request.layout.pieces(request):
        name, number = names[id(parameter)]
        yield Entry((name, *facts), number)
