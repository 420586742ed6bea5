"""Traces of a module with many equal blocks, from those of the same module with three and with four of them.

An update is a sequence of allocations. With one block more, the same sequence has some more runs of allocations: in the forward, in
the backward, and in each operator over all parameters. Each such run repeats the one before it::

    three blocks    first  middle                   last  loss  last                   middle  first
    four blocks     first  middle  middle           last  loss  last           middle  middle  first
    n blocks        first  middle  middle  middle   last  loss  last   middle  middle  middle  first

The place where an allocation is released moves likewise: with its own run, against it, or not at all. A module whose traces do not
look like that, such as one whose blocks read the outputs of all earlier ones, is traced with all of its blocks.
"""

import bisect
import collections
import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...runtime.torch_private import children_of, parameters_of
from .allocations import Block

FEWEST = 3  # blocks in the shorter of two traces: one of them is neither the first nor the last
SHORTEST = 8  # a shorter stack is traced as it is: this takes as long as seven blocks
_COUNT = re.compile(r"(^|_)(num|n)_?(hidden_|encoder_|decoder_)?(layers?|blocks?)$|^depth$")


@dataclass(frozen=True)
class Stack:
    """Equal blocks: ``length`` children of ``container`` from ``start`` on. ``prefix`` is the name of the container, with a dot."""

    container: nn.Module
    prefix: str
    start: int
    length: int

    @contextlib.contextmanager
    def cut(self, count: int) -> Iterator[None]:
        """Leaves only ``count`` of the blocks in the container, until the end of the block."""
        children = children_of(self.container)
        whole = dict(children)
        for name in list(whole)[self.start + count : self.start + self.length]:
            del children[name]
        try:
            yield
        finally:
            children.clear()
            children.update(whole)

    def correct_counts(self, module: nn.Module, count: int) -> None:
        """Sets numbers of layers in the attributes and the configurations of a copy with ``count`` blocks."""
        for owner in {id(part): part for each in module.modules() for part in (each, getattr(each, "config", None))}.values():
            for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
                if type(value) is int and value == self.length and _COUNT.search(name):
                    vars(owner)[name] = count

    def is_removed(self, name: str, count: int) -> bool:
        """Returns True for a module in one of the blocks that :meth:`cut` removes."""
        label, number = self.place(name)
        return label != name and number >= self.start + count

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


def _is_alike(left: Any, right: Any, distance: int, seen: set[tuple[int, int]]) -> bool:
    """Returns True if two parts of blocks are alike: equal numbers, numbers of their blocks, or rates between 0 and 1."""
    if left is right or (id(left), id(right)) in seen:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, (bool, str, bytes, type(None), torch.dtype, torch.device)):
        return bool(left == right)
    if isinstance(left, int):
        return right - left in (0, distance)
    if isinstance(left, float):
        return left == right or (0 < left < 1 and 0 < right < 1)  # such as the rates of stochastic depth
    if isinstance(left, Tensor):
        names = ("shape", "dtype", "layout", "device", "requires_grad")
        return [getattr(left, name) for name in names] == [getattr(right, name) for name in names]
    if isinstance(left, dict):
        return list(left) == list(right) and _is_alike(list(left.values()), list(right.values()), distance, seen)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(_is_alike(a, b, distance, seen) for a, b in zip(left, right, strict=True))
    if isinstance(left, MethodType):
        return left.__func__ is right.__func__
    if isinstance(left, FunctionType) or not hasattr(left, "__dict__"):
        return bool(left == right)
    seen.add((id(left), id(right)))
    return _is_alike(vars(left), vars(right), distance, seen)


class Entry(NamedTuple):
    """An allocation, or a mark (without a block). It is released after the entry at the place ``released``; None for never."""

    label: Hashable
    number: int  # of the equal block that the label has
    block: Block | None
    released: int | None

    @property
    def size(self) -> int:
        """The bytes of an allocation."""
        return 0 if self.block is None else self.block.size


_MARKS = ("first", "second", "backward", "update")  # in their order


def entries_of(trace: Any, stack: Stack) -> list[Entry]:
    """Returns the allocations and marks of a trace in their order."""
    marks = sorted(trace.marks, key=lambda name: (trace.marks[name], _MARKS.index(name)), reverse=True)
    entries: list[Entry] = []
    places: dict[int, int] = {}
    for position, event in enumerate([*trace.events, 0]):
        while marks and trace.marks[marks[-1]] == position:
            entries.append(Entry(marks.pop(), 0, None, None))
        if event > 0:
            places[event], block = len(entries), trace.blocks[event - 1]
            module, number = stack.place(block.module)
            label = block.device, block.kind, block.operator, module, block.line, block.stream
            entries.append(Entry(label, number, block, None))
        elif event < 0:
            place = places[-event]
            entries[place] = entries[place]._replace(released=len(entries) - 1)
    return entries


class Site(NamedTuple):
    """A run of ``length`` entries before ``end`` in the shorter sequence, which has one more repetition in the longer one."""

    end: int
    length: int
    shift: int  # lengths of the sites before this

    def place(self, offset: int, repetition: int, more: int) -> int:
        """Returns the place of an entry of this run in the sequence of ``more`` blocks than the shorter one has."""
        return self.end - self.length + offset + self.shift * more + self.length * repetition


_WINDOW = 3  # entries that must be equal behind an inserted run
_TRIES = 5000


def find_sites(short: Sequence[Entry], long: Sequence[Entry]) -> list[Site]:
    """Returns the runs that the longer sequence repeats once more.

    Raises:
        NotRepeating: the longer sequence differs in another way.
    """
    (shapes, more_shapes), (a, b) = (
        [[(entry.label, entry.size if sized else 0) for entry in entries] for entries in (short, long)] for sized in (False, True)
    )
    waiting: list[tuple[int, int, tuple[tuple[int, int], ...]]] = [(0, 0, ())]
    for _ in range(_TRIES):
        if not waiting:
            break
        i, j, sites = waiting.pop()
        while i < len(a) and j < len(b) and a[i] == b[j]:
            i, j = i + 1, j + 1
        if i == len(a) and j == len(b):
            shifts = itertools.accumulate((length for _, length in sites), initial=0)
            return [Site(end, length, shift) for (end, length), shift in zip(sites, shifts, strict=False)]
        if i < len(a) and j < len(b) and shapes[i] == more_shapes[j]:
            waiting.append((i + 1, j + 1, sites))  # its size depends on the number of blocks
        free = i - (sites[-1][0] if sites else 0)
        for length in range(min(len(b) - j - len(a) + i, free), 0, -1):  # the shortest is tried first
            if a[i - length : i] == b[j - length : j] == b[j : j + length]:
                after = j + length
                if shapes[i : i + _WINDOW] == more_shapes[after : after + _WINDOW][: len(shapes) - i]:
                    period = itertools.takewhile(lambda x: b[x] == b[x + length], range(j - length - 1, j - free - 1, -1))
                    waiting.append((i, after, (*sites, (i - len(list(period)) // 2, length))))
    raise NotRepeating


class NotRepeating(Exception):
    """The traces do not show what each further block adds."""


Rule = Callable[[int, int], int]  # from the blocks more and a repetition to a place


def extend(short: Sequence[Entry], long: Sequence[Entry], more: int) -> list[Entry]:
    """Returns the sequence of ``more`` blocks more than the shorter one has.

    Raises:
        NotRepeating: the two sequences do not show it.
    """
    sites = find_sites(short, long)
    ends = [site.end for site in sites]
    total = [*(site.shift for site in sites), sum(site.length for site in sites)]  # lengths of the sites before each place

    def fixed(place: int, blocks: int, _: int) -> int:
        return place + total[bisect.bisect(ends, place)] * blocks

    def in_site(site: Site, offset: int, move: tuple[int, int, int], blocks: int, repetition: int) -> int:
        first, per_block, per_repetition = move
        return site.place(offset, first + per_block * blocks + per_repetition * repetition, blocks)

    def rules_for(place: int) -> Iterator[Rule]:
        """Yields the ways in which a place of the shorter sequence may move."""
        yield functools.partial(fixed, place)
        for site in sites[max(bisect.bisect(ends, place) - 1, 0) :][:3]:
            first, offset = divmod(place - site.place(0, 0, 0), site.length)
            for per_block, per_repetition in ((0, 1), (1, -1), (0, 0), (1, 0)) if abs(first) <= FEWEST else ():
                yield functools.partial(in_site, site, offset, (first, per_block, per_repetition))

    def rule_of(places: Mapping[tuple[int, int], int | None]) -> Rule | None:
        """Returns the rule of some places, by blocks more and repetition."""
        if all(place is None for place in places.values()):
            return None
        first = places[0, 0]
        for rule in rules_for(first) if first is not None else ():
            if all(rule(*seen) == place for seen, place in places.items()):
                return rule
        raise NotRepeating

    result: list[Any] = [None] * (len(short) + total[-1] * more)
    for place, entry in enumerate(short):
        site = next(iter(sites[bisect.bisect(ends, place) :]), None)
        is_repeated = site is not None and place >= site.place(0, 0, 0)
        own = functools.partial(in_site, site, place - site.place(0, 0, 0), (0, 0, 1)) if is_repeated else functools.partial(fixed, place)
        samples = {(0, 0): entry} | {(1, k): long[own(1, k)] for k in range(1 + is_repeated)}
        released = rule_of({seen: each.released for seen, each in samples.items()})
        step = samples[1, 0].number - entry.number, samples[1, is_repeated].number - samples[1, 0].number
        size = entry.size + (samples[1, 0].size - entry.size) * more
        for repetition in range(more * is_repeated + 1):
            number = entry.number + step[0] * more + step[1] * repetition
            result[own(more, repetition)] = Entry(entry.label, number, _block_like(entry, number, size), released and released(more, repetition))
    return result


def _block_like(entry: Entry, number: int, size: int) -> Block | None:
    block = entry.block
    if block is None or (number, size) == (entry.number, block.size):
        return block
    return dataclasses.replace(block, size=size, module=entry.label[3].replace("#", str(number)))


def trace_of(trace: Any, entries: Sequence[Entry], flops: int) -> Any:
    """Returns a trace of some entries, which differs from a shorter one in its allocations and in its operations."""
    released: collections.defaultdict[int, list[int]] = collections.defaultdict(list)
    blocks: list[Block] = []
    events: list[int] = []
    marks: dict[str, int] = {}
    for place, entry in enumerate(entries):
        if entry.block is None:
            marks[str(entry.label)] = len(events)
        else:
            blocks.append(entry.block)
            events.append(len(blocks))
            if entry.released is not None:
                released[entry.released].append(-len(blocks))
        events += released.pop(place, [])
    return dataclasses.replace(trace, blocks=blocks, events=events, marks=marks, flops=flops)
