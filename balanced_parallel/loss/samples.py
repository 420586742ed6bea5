"""Samples of the rows of shards, and rows of several shards that are joined."""

import contextlib
import itertools
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..batch import containers
from ..batch.marks import (
    Along,
    Arguments,
    Rows,
    Whole,
    mark,
    mark_leaves,
    objects_in,
    without_mark,
)
from ..batch.outputs import PerReplica, join_outputs, join_tensors, padded, repeated_rows
from ..batch.rows import Shard, move_leaves
from ..runtime.devices import move

_CONSTANT = (
    "{} has no entry for each row, and each shard would add it: expected a value for each row, or a penalty that is added to "
    "the loss that the criterion returned"
)
_APART = "which can be neither cut into rows nor joined: return the tensors that it has, and make it of them in the criterion"
# Positions that only other shards have. It is finite, and has no part in a softmax.
_PADDING = -1e4


class Sample(NamedTuple):
    """Rows of a shard."""

    pair: Any  # Output and targets, marked.
    rows: int
    constant: AbstractSet[str] = frozenset()  # Outputs at these places have no rows.

    def without_rows(self, places: AbstractSet[str]) -> "Sample":
        """Returns the sample with the tensors at some places as they are for all rows."""

        def unmark(place: str, leaves: list[Any]) -> Any:
            (leaf,) = leaves
            return Whole(without_mark(leaf)) if place in places else leaf

        return self._replace(pair=containers.zip_leaves(unmark, [self.pair]), constant=places)

    @property
    def reason(self) -> str:
        """The reason why its sums may not add up."""
        objects = objects_in(self.pair[0])
        if objects:
            return f"the output has {containers.describe(objects[0])}, {_APART}"
        places = (f"output{place.removeprefix('[0]')}" for place in sorted(self.constant))
        return _CONSTANT.format(", ".join(places)) if self.constant else ""


def sample_of(output: PerReplica, rows: int, shard: Shard, dim: int) -> Sample:
    """Returns the rows of a shard, whose unmarked targets have theirs in dimension ``dim``."""
    targets = mark(shard.targets, dim)
    entry = output[0]
    if has_entry_per_row(entry, rows, targets):
        entry = Rows(entry)
    pair = mark_leaves(entry, output.dim, "the output"), targets
    leaves = containers.leaves(pair[:1])
    sizes = {place: size for place, leaf in leaves if (size := size_of(leaf)) is not None}
    counts = {*sizes.values()}
    # words, or a packed row
    if counts == {shard.target_rows} or (shard.is_joined and counts == {1}):
        rows = counts.pop()
    constant = {place for place, size in sizes.items() if rows != 1 and size != rows}
    sample = Sample(pair, rows, constant)
    if sample.constant and rows not in counts:
        reason = repeated_rows(output, output.sizes, output.dim)
        raise ValueError(f"{reason}; or pass flat targets too" if reason else sample.reason)
    return sample


def is_list(leaf: object) -> bool:
    """Returns True for a list with an entry for each row."""
    return isinstance(leaf, Rows) or containers.is_row_list(without_mark(leaf))


def has_entry_per_row(output: object, rows: int, targets: Arguments) -> bool:
    """Returns True for a list with an entry for each row: beside another one, or of tensors that do
    not have all rows.
    """
    if type(output) is not list or len(output) != rows:
        return False
    if any(isinstance(leaf, Rows) for _, leaf in containers.leaves(targets)):
        return True
    return any(tensor.shape[:1] != (rows,) for tensor in containers.tensors_in(output))


def join_rows(place: str, values: list[Any], device: torch.device, padding: str = "") -> Any:
    """Returns the rows of marked values as one on ``device``, or the first value if they have no
    rows.

    A tensor at the place ``padding`` is padded.
    """
    first = values[0]
    plain = [without_mark(value) for value in values]
    if isinstance(first, Along) and isinstance(first.leaf, Tensor):
        plain = padded(plain, first.dim, _PADDING) if place == padding else plain
        return Along(join_tensors(place, plain, device, first.dim), first.dim)
    if isinstance(first, PerReplica):
        return mark_leaves(join_outputs(values, first.dim).on(device), first.dim, place)
    if is_list(first):
        kind: Any = Rows if isinstance(first, Rows) else type(plain[0])
        return kind([*itertools.chain(*plain)])
    if len(values) > 1 and objects_in(first):
        return _Apart(first)
    return move(first, device) if isinstance(first, Tensor) else first


class _Apart(containers.Leaf):
    """Stands for objects of several shards, whose tensors cannot be joined."""

    def __init__(self, value: object) -> None:
        self._name = containers.describe(value)

    def __getattr__(self, name: str) -> NoReturn:
        raise TypeError(f"the output has {self._name}, {_APART}")


def join_equal(place: str, values: list[Any], device: torch.device, padding: str) -> Any:
    """Returns the rows of marked values as one. Raises ``ValueError`` if tensors and numbers without
    rows differ.
    """
    first, *others = [move_leaves(value, device) for value in values]
    is_one = not isinstance(values[0], (Along, Rows)) and isinstance(first, (Tensor, int, float))
    if is_one and not all(torch.equal(*map(torch.as_tensor, (first, each))) for each in others):
        raise ValueError(f"{place} differs between samples, expected one value for all")
    return join_rows(place, values, device, padding)


def size_of(leaf: object) -> int | None:
    """Returns the size of a marked tensor in the dimension of its rows, None for another value."""
    if not isinstance(leaf, Along) or not isinstance(leaf.leaf, Tensor):
        return None
    return leaf.leaf.size(leaf.dim)


def find_constant(samples: Sequence[Sample]) -> set[str]:
    """Returns the places of outputs that are the same for all shards, while others are not.

    They have no rows, as prototypes, whose number is by chance that of the rows of a shard. As many
    equal rows as those of the shard may be one value that is expanded to them.
    """
    equal: dict[str, bool] = {}
    constant: set[str] = set()

    def look(place: str, values: list[Any]) -> None:
        first, *others = map(without_mark, values)
        if not place.startswith("[0]") or not isinstance(first, Tensor):
            return
        equal[place] = all(torch.equal(first, other) for other in others)
        if equal[place] and isinstance(values[0], Along) and first.is_floating_point():
            count = first.size(values[0].dim)
            row = first.narrow(values[0].dim, 0, min(count, 1))
            if count != samples[0].rows or not bool((first == row).all()):
                constant.add(place)

    if len(samples) > 1:
        with contextlib.suppress(ValueError):  # Lists with an entry for each row may differ.
            containers.zip_leaves(look, [sample.pair for sample in samples])
    return set() if all(equal.values()) else constant


def bytes_of(node: object) -> int:
    """Returns the bytes of the tensors in a marked structure."""
    return sum(tensor.nbytes for tensor in containers.tensors_in(move_leaves(node, None)))
