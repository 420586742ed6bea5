"""Names of the sums of a loss, which are equal in all shards and ranks that add them up."""

import dataclasses
import zlib
from collections.abc import Sequence
from itertools import permutations
from typing import Any

from torch import Tensor

from ..batch import containers
from .copies import ShardLoss
from .rules import find_torch_loss
from .shard_numbers import lengths_of

MASKED = "(errors * mask).sum() / mask.sum()"
ALWAYS = (
    "expected the same means times the same numbers for all rows, or statistics of equal shapes: compute each always, log no "
    "number of rows, divide a sum before it is multiplied, as a.mean() * (b.sum() / len(b)), or give weight='rows' for a mean of "
    "one loss per row, or weight="
)
SIZED = (
    ", expected a number that follows from the sizes of the rows, as len(errors) does: for a count of some rows, divide by a "
    "tensor, as in errors.sum() / mask.sum().clamp(min=1), or give DataParallelCriterion weight=, a function "
    "(output, *targets) -> scalar that counts them, and minimum=1 for max(count, 1); for a constant, multiply by 1 / constant"
)


class UnknownMeanError(ValueError):
    """A criterion is not a function of sums over the rows.

    Its text is ``what`` it is, and ``advice``.
    """

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(what, advice)
        self.what = what

    def __str__(self) -> str:
        return "".join(self.args)


class ChangedLossError(UnknownMeanError):
    """A criterion was a linear combination of sums over one count, and is another function now."""


@dataclasses.dataclass(frozen=True)
class SumName:
    """The name of a statistic, equal in all shards.

    ``per_row``, ``lengths``, ``averaged`` and ``numbers`` are those of :class:`Statistic` and
    :class:`Formula`.
    """

    number: int
    role: str  # "total" or "count"
    kind: str  # the function that computes it
    text: str  # the losses
    per_row: float | None = dataclasses.field(default=None, compare=False)
    lengths: Sequence[float | None] = dataclasses.field(default=(), compare=False)
    averaged: Sequence[float] = dataclasses.field(default=(), compare=False)
    numbers: Sequence[float] = dataclasses.field(default=(), compare=False)


def sizes_of(shard: ShardLoss, weight: Any) -> dict[Any, Any]:
    """Returns a name for the sum of a shard, which tells its elements a row if that is its weight."""
    name = str(getattr(find_torch_loss(shard.criterion), "__name__", "a loss"))
    is_size = isinstance(weight, Tensor) and weight.is_cpu and not weight.is_floating_point()
    shapes = [each.shape for each in containers.tensors_in((shard.output, shard.targets))]
    sizes = int(weight) / shard.rows if is_size else None, lengths_of(shapes, shard.rows)
    return {SumName(0, "count", name, name, *sizes): None}


def digest_names(names: Sequence[SumName]) -> float:
    """Returns a number for the names of the sums of a shard, which is not 0.

    Ranks whose sums are equal have one number.
    """
    counts = [each.lengths and each.per_row for each in names]
    facts = names[0].text, *counts, *sorted({*names[0].averaged})
    return 1.0 + zlib.crc32(repr(facts).encode())


def compare_names(first: Sequence[SumName], other: Sequence[SumName]) -> None:
    """Raises ``UnknownMeanError`` for a criterion that computes other formulas for other rows, or a
    mean over other numbers of elements for each row.
    """
    if first != other:
        texts = [f"{names[0].text:.200}" if names else "" for names in (first, other)]
        raise UnknownMeanError(
            f"the criterion computes {texts[0]} for some rows, and {texts[1]} for others",
            f"; {ALWAYS}",
        )
    for pair in zip(first, other, strict=True):
        name, match = pair
        lengths = zip(name.lengths, match.lengths, strict=False)
        are_longer = any(None not in each and each[0] != each[1] for each in lengths)
        counts = [(name.per_row, match.per_row)]
        extras = [sorted({*each.averaged} - {*base.averaged}) for each, base in permutations(pair)]
        counts += zip(*extras, strict=False)
        for number, another in counts if are_longer else ():
            if number is None or another is None or number == another:
                continue
            raise UnknownMeanError(
                f"the criterion computes {name.kind} over {number:g} elements for each of some rows, and over "
                f"{another:g} for each of others, as if each shard pads to its own longest row",
                f", expected the same for all rows: write {MASKED}",
            )
