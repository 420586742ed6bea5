"""Options of :class:`TrainStep` for rows that cost differently."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from ..batch.cost_cuts import Combine
from ..loss.criterion import DataParallelCriterion
from ..runtime.argument_checks import check_number, check_type
from .arguments import check_micro_batch_cost
from .cost_batches import Samples
from .cost_micro_batches import CostCuts
from .cuts import Cuts, EqualRows, Unit
from .gradient_sync import GradientSync
from .micro_batches import Model
from .padded_batches import Padded, Trim

__all__: list[str] = []


Cost = Callable[[Any], Any]
Collate = Callable[[list[Any]], Any]


class CostOptions(NamedTuple):
    """The arguments of :class:`TrainStep` for a cost."""

    cost: Cost | None
    collate: Collate | None
    trim: Trim | None
    combine: Combine | None
    micro_batch_cost: float | None


def make_cuts(
    model: Model,
    criterion: DataParallelCriterion,
    sync: GradientSync,
    options: CostOptions,
    micro_batch_size: int | Literal["auto"] | None,
) -> Cuts:
    """Returns the way to cut batches: into equal rows, or by cost.

    Raises:
        TypeError: an option that is not a function.
        ValueError: options that exclude each other, or a budget that is not positive.
    """
    _check(options, micro_batch_size)
    cost, collate, trim, combine, _ = options
    if cost is None:
        return EqualRows(model, criterion, sync)
    source = Padded(cost, trim) if collate is None else Samples(cost, collate)
    unit: Unit = "rows" if isinstance(micro_batch_size, int) else "cost"
    return CostCuts(model, criterion, sync, source, combine, unit, is_strict=micro_batch_size != "auto")


def _check(options: CostOptions, micro_batch_size: int | Literal["auto"] | None) -> None:
    cost, collate, trim, combine, micro_batch_cost = options
    given = [name for name, value in options._asdict().items() if value is not None]
    if cost is None and given:
        raise ValueError(f"{given[0]}= was given without cost=, expected the cost of a row too, such as cost=len")
    for name, function in (("cost", cost), ("collate", collate), ("combine", combine)):
        check_type(name, function, Callable | None, "a function")
    for dim in trim.values() if isinstance(trim, Mapping) else [trim] if trim is not None else []:
        check_number("trim", dim, "a dimension, or a mapping to dimensions from the names of arguments", whole=True)
    if collate is not None and trim is not None:
        raise ValueError("collate= and trim= were given: expected collate= for lists of samples, trim= for padded batches")
    if micro_batch_cost is not None and micro_batch_size is not None:
        raise ValueError(f"micro_batch_size={micro_batch_size!r} and micro_batch_cost= were given, expected one of them")
    check_micro_batch_cost(micro_batch_cost)
