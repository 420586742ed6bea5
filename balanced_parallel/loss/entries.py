"""The entries of the result of a criterion: losses, which a step adds up, and values to log.

::

    {"loss": ce + 0.1 * l2, "ce": ce, "l2": l2}    the entry loss is the loss
    (ce, accuracy)                                 otherwise, entries with a gradient are losses
    {"total": ce + 0.1 * l2, "ce": ce, "l2": l2}   an error: a total and its parts would be added up

The same holds for mappings, tuples, named tuples and dataclasses.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..batch import containers
from ..runtime.collectives import gather_objects
from .copies import Criterion, ShardLoss
from .sums import LossSum, add_tensors, weighted_sum


class LoggedSums(NamedTuple):
    """A value to log that is a function of sums, which add up over the parts."""

    compute: Callable[[Sequence[Tensor]], Any]  # No parameters are needed.
    sums: Sequence[Any]


LoggedMeans = Mapping[str, LoggedSums | None]


def log_mean(mean: LossSum) -> LoggedSums:
    """Returns a mean as a value to log."""
    least = mean.bound.minimum if mean.bound else 0.0
    weights = [] if mean.weight is None else [mean.weight]
    return LoggedSums(functools.partial(_divide, least=least), [mean.total.detach(), *weights])


def _divide(sums: Sequence[Tensor], least: float) -> Tensor | float:
    total, *weights = sums
    divisor = max(float(weights[0]), least) if weights else 1.0
    return total / divisor if divisor else math.nan


def places_beside_loss(result: object) -> set[str]:
    """Returns the places of all entries but ``loss``, if the result of a criterion has that one."""
    container = containers.open_container(result)
    names = containers.entry_names(container) if container is not None else []
    if container is None or "loss" not in names:
        return set()
    loss = container.places[names.index("loss")]
    return {place for place, _ in containers.leaves(result) if not place.startswith(loss)}


def values_to_log(result: object) -> set[str]:
    """Returns the places of the values to log in the result of a criterion."""
    places = places_beside_loss(result)
    if places or containers.open_container(result) is None:
        return places
    trained = _trained(result)
    return {place for place, _ in containers.leaves(result)} - trained if trained else set()


def places_to_log(result: object) -> set[str]:
    """Returns the places of the values to log in the result of a criterion.

    Raises ``ValueError`` if one of several losses is called their total.
    """
    places = values_to_log(result)
    container = containers.open_container(result)
    if container is None or places_beside_loss(result):
        return places
    names = {"total", "total_loss"} & {*containers.entry_names(container)}
    if names and len(_trained(result)) > 1:
        refuse_total(f"an entry {names.pop()!r} beside others")
    return places


def _trained(result: object) -> set[str]:
    """Returns the places of entries with a gradient."""
    trained = set[str]()
    for place, leaf in containers.leaves(result):
        tensor = leaf.total if isinstance(leaf, LossSum) else leaf
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            trained.add(place)
    return trained


def refuse_total(reason: str) -> NoReturn:
    """Raises ``ValueError`` for losses of which one may be the sum of others."""
    raise ValueError(
        f"the criterion returned {reason}, which a step would add up, expected the total in an entry 'loss', and values to log "
        "in the others: {'loss': total, ...}; or losses that have nothing in common"
    )


def add_leaves(loss: object) -> Tensor:
    """Returns the sum of all losses in a structure."""
    places = places_to_log(loss)
    terms = []
    for place, leaf in containers.leaves(loss):
        if leaf is not None and place not in places:
            terms.append(weighted_sum(leaf, 1))
    return functools.reduce(torch.add, terms)


def plain_loss(criterion: Criterion, output: object, targets: tuple[object, ...]) -> Tensor:
    """Returns the loss of a plain program, as a step takes it: a tensor, the entry ``loss``, or the
    sum of several losses.
    """
    loss = ShardLoss(criterion, 0, output, targets, {}).call()
    return loss if isinstance(loss, Tensor) else add_leaves(loss)


def add_means(part: object) -> LossSum:
    """Returns the sum of all losses of one replica, whose sums have one weight."""
    entries = {place: leaf for place, leaf in containers.leaves(part) if leaf is not None}
    places = places_to_log(part) & {*entries}
    sums = [leaf for place, leaf in entries.items() if place not in places]
    are_bounded = any(
        mean.bound and mean.bound.is_of_counts and mean.bound.minimum and mean.weight % 1
        for mean in sums
    )
    if are_bounded or len({(mean.weight, mean.bound) for mean in sums}) > 1:
        raise ValueError(
            "the criterion returns means with divisors of their own, which have to be known before the first micro-batch: call "
            "step(inputs, targets) with functions of the targets alone, one per mean, as in weight={'class': lambda target: "
            "len(target), ...}; or, in place of TrainStep, call criterion(outputs, targets), add up the losses, and call backward"
        )
    logged = {place: log_mean(entries[place]) for place in places}
    total = functools.reduce(torch.add, [mean.total for mean in sums])
    return LossSum(total, sums[0].weight, logged=logged)


def merge_logged(parts: Iterable[LoggedMeans]) -> dict[str, float]:
    """Returns the values to log of all parts, over all ranks, by the names of their entries.

    The host waits for the devices. All ranks call this.
    """
    local = []
    for part in parts:
        for place, value in part.items():
            numbers = value and value._replace(sums=[*map(_on_host, value.sums)])
            local.append((place.strip(".[]'\""), numbers))
    values: dict[str, list[LoggedSums | None]] = {}
    for name, numbers in itertools.chain(*gather_objects(local)):
        values.setdefault(name, []).append(numbers)
    return {name: _merge(name, each) for name, each in values.items()}


def _merge(name: str, values: list[LoggedSums | None]) -> float:
    """Returns the value of the whole batch."""
    functions = [value for value in values if value is not None]
    if len(functions) < len(values):
        raise ValueError(
            f"the value {name!r} beside the loss is not a function of sums over the rows, so that of the whole batch is unknown, "
            "expected sums and means over the rows, as tensors without .item(); or compute it of the outputs: "
            "step(..., return_outputs=True)"
        )
    columns = zip(*(value.sums for value in functions), strict=True)
    return float(functions[0].compute([*map(add_tensors, columns)]))


def _on_host(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device="cpu")
