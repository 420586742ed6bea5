"""Traces of a module with many equal blocks, from those of the same module with three and with four of them.

An update is a sequence of allocations. With one block more, the sequence has some more runs of allocations: in the forward, in
the backward, and in each operator over all parameters. Each such run repeats the one before it::

    three blocks    first  middle                   last  loss  last                   middle  first
    four blocks     first  middle  middle           last  loss  last           middle  middle  first
    n blocks        first  middle  middle  middle   last  loss  last   middle  middle  middle  first

The place where an allocation is released moves likewise: with its own run, against it, or not at all. A module whose traces do
not look like that, such as one whose blocks read the outputs of all earlier ones, is traced with all of its blocks.
"""

import bisect
import collections
import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...optim.replica_shards import BucketOwners
from ...replicas.buckets import make_buckets
from ...runtime.torch_private import children_of, parameters_of
from .allocations import Block
from .fakes import fake_devices
from .layouts import ReplicaLayout, Request, largest_partition

FEWEST = 3  # blocks in the shorter of two traces: one of them is neither the first nor the last
SHORTEST = 8  # a shorter stack is traced as it is: this takes as long as seven blocks
T = TypeVar("T")
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

    def moved(self, number: int, size: int, released: int | None) -> "Entry":
        """Returns the same allocation in another equal block."""
        block = self.block
        if block is not None and (number, size) != (self.number, block.size):
            block = dataclasses.replace(block, size=size, module=self.label[0].replace("#", str(number)))
        return Entry(self.label, number, block, released)


class Site(NamedTuple):
    """A run of ``length`` entries before ``end`` in the shorter sequence, which the longer one has once more."""

    end: int
    length: int
    shift: int  # lengths of the sites before this

    def place(self, offset: int, repetition: int, more: int) -> int:
        """Returns the place of an entry of this run in a sequence of ``more`` blocks than the shorter one has."""
        return self.end - self.length + offset + self.shift * more + self.length * repetition


_WINDOW = 3  # entries that must be equal behind an inserted run


def find_sites(short: Sequence[Entry], long: Sequence[Entry]) -> list[Site]:
    """Returns the runs that the longer sequence has once more.

    Raises:
        NotRepeating: the longer sequence differs in another way.
    """
    shapes, longer_shapes = ([entry.label for entry in entries] for entries in (short, long))
    a, b = ([(entry.label, entry.size) for entry in entries] for entries in (short, long))
    waiting: list[tuple[int, int, tuple[tuple[int, int], ...]]] = [(0, 0, ())]
    tried: set[tuple[int, int]] = set()
    while waiting:
        i, j, sites = waiting.pop()
        while i < len(a) and j < len(b) and a[i] == b[j]:
            i, j = i + 1, j + 1
        if i == len(a) and j == len(b):
            shifts = itertools.accumulate((length for _, length in sites), initial=0)
            return [Site(end, length, shift) for (end, length), shift in zip(sites, shifts, strict=False)]
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
                waiting.append((i, after, (*sites, (i - slack // 2, length))))
    raise NotRepeating


Seen = tuple[int, int]  # blocks more than the shorter sequence has, and a repetition


class Places:
    """Places in the sequences of any number of blocks, and rules for the ways in which they move with it."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = sites
        self._ends = [site.end for site in sites]
        self._shifts = [*(site.shift for site in sites), sum(site.length for site in sites)]

    def site_of(self, place: int) -> Site | None:
        """Returns the site to which a place of the shorter sequence belongs."""
        site = next(iter(self.sites[bisect.bisect(self._ends, place) :]), None)
        return site if site is not None and place >= site.place(0, 0, 0) else None

    def fixed(self, place: int, seen: Seen) -> int:
        """Returns the place of an entry that no block repeats."""
        return place + self._shifts[bisect.bisect(self._ends, place)] * seen[0]

    def rules(self, place: int) -> Iterator[Callable[[Seen], int]]:
        """Yields the ways in which a place may move: not at all, or with a run near it.

        It is in the run of the same repetition, of the opposite one, of the first, or of the last.
        """
        yield functools.partial(self.fixed, place)
        for site in self.sites[max(bisect.bisect(self._ends, place) - 1, 0) :][:3]:
            first, offset = divmod(place - site.place(0, 0, 0), site.length)
            for per_block, per_repetition in ((0, 1), (1, -1), (0, 0), (1, 0)) if abs(first) <= FEWEST else ():
                yield functools.partial(_moving, site, offset, (first, per_block, per_repetition))

    def rule_of(self, places: Mapping[Seen, int | None]) -> Callable[[Seen], int | None]:
        """Returns the rule of the places at which an entry was seen."""
        if all(place is None for place in places.values()):
            return lambda seen: None
        place = places[0, 0]
        for rule in self.rules(place) if place is not None else ():
            if all(rule(seen) == place for seen, place in places.items()):
                return rule
        raise NotRepeating


def _moving(site: Site, offset: int, move: tuple[int, int, int], seen: Seen) -> int:
    first, per_block, per_repetition = move
    return site.place(offset, first + per_block * seen[0] + per_repetition * seen[1], seen[0])


def extend(short: Sequence[Entry], long: Sequence[Entry], more: int) -> list[Entry]:
    """Returns the sequence of ``more`` blocks than the shorter one has. The longer one has one block more.

    Raises:
        NotRepeating: the two sequences do not show what a block adds.
    """
    places = Places(find_sites(short, long))
    result: list[Any] = [None] * (len(short) + (len(long) - len(short)) * more)
    for place, entry in enumerate(short):
        site = places.site_of(place)
        if site is None:
            where: Callable[[Seen], int] = functools.partial(places.fixed, place)
        else:
            where = functools.partial(_moving, site, place - site.place(0, 0, 0), (0, 0, 1))
        samples = {(0, 0): entry} | {seen: long[where(seen)] for seen in ((1, 0), (1, 1))[: 1 if site is None else 2]}
        *_, before, last = (sample.number for sample in samples.values())
        per_block, per_repetition = samples[1, 0].number - entry.number, 0 if site is None else last - before
        size = entry.size + (samples[1, 0].size - entry.size) * more
        released = places.rule_of({seen: sample.released for seen, sample in samples.items()})
        for repetition in range(1 if site is None else more + 1):
            seen = more, repetition
            number = entry.number + per_block * more + per_repetition * repetition
            result[where(seen)] = entry.moved(number, size, released(seen))
    return result


_MARKS = ("first", "second", "backward", "update")  # in their order


def entries_of(trace: Any, stack: Stack) -> list[Entry]:
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


def replace_entries(trace: T, entries: Sequence[Entry], flops: int) -> T:
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
    return dataclasses.replace(trace, blocks=blocks, events=events, marks=marks, flops=flops)  # type: ignore[type-var]


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
    """Yields the pieces of the parameters: by bucket and owner, or those of the rank with the most."""
    names = {id(parameter): stack.place(name) for name, parameter in request.module.named_parameters()}
    parameters = [parameter for parameter in request.module.parameters() if parameter.requires_grad]
    owners = fake_devices(request.devices if request.balanced else 1)
    if request.devices > 1 and request.layout is ReplicaLayout:
        for bucket in make_buckets(parameters):
            for piece in BucketOwners(bucket.parameters, [dict.fromkeys(owners, each) for each in bucket.parameters]).pieces:
                name, number = names[id(piece.parameter)]
                yield Entry((name, piece.index == 0, piece.owner, piece.values.numel()), number)
    elif request.devices > 1 and request.balanced:
        for parameter in largest_partition(parameters, request.devices):
            name, number = names[id(parameter)]
            yield Entry((name,), number)
