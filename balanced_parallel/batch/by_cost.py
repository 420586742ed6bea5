"""``shard_by_cost``: a list of samples as one padded shard per device, each with rows of about the same cost."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..runtime.values import check_number, check_type
from . import containers
from .plan import Combine, cut_by_cost
from .rows import as_shards

__all__: list[str] = []


def shard_by_cost(
    samples: Sequence[Any],
    shards: int,
    *,
    cost: Callable[[Any], float],
    collate: Callable[[list[Any]], Any],
    combine: Combine | None = None,
) -> tuple[Any, Any]:
    """Splits samples of unequal cost into shards, and pads each shard on its own.

    Returns inputs for a :class:`DataParallelModel`, and targets for a :class:`DataParallelCriterion`. Each tensor is a
    :class:`PerReplica` of the shards. The gathered outputs have the order of the samples.

    Args:
        samples: one for each row.
        shards: the number of devices, ``len(model.devices)``.
        cost: of a sample, such as ``len``.
        collate: makes ``(inputs, targets)`` of any list of samples, or a mapping of inputs with ``"labels"``.
        combine: cost of a shard, from the costs of its rows, as in :class:`TrainStep`.

    Raises:
        TypeError: an argument of another type.
        ValueError: there are no samples, a cost is negative or not finite, or ``collate`` returns something else.

    Example:
        >>> samples = [torch.ones(length) for length in (9, 3, 4, 2, 3, 2, 1, 1)]
        >>> pad = torch.nn.utils.rnn.pad_sequence
        >>> inputs, targets = shard_by_cost(samples, 3, cost=len, collate=lambda some: (pad(some, True), torch.ones(len(some))))
        >>> [tuple(shard.shape) for shard in inputs]
        [(1, 9), (3, 4), (4, 2)]
        >>> outputs = DataParallelModel(torch.nn.Identity(), ["cpu"] * 3)(inputs)
        >>> outputs.gather().sum(1)
        tensor([9., 3., 4., 2., 3., 2., 1., 1.])
    """
    check_type("samples", samples, Sequence, "a list with one sample for each row")
    check_number("shards", shards, "the number of devices", at_least=1, whole=True)
    for name, function in (("cost", cost), ("collate", collate), ("combine", combine or sum)):
        check_type(name, function, Callable, "a function")
    if not samples:
        raise ValueError("there are no samples, expected at least one")
    runs = cut_by_cost([cost(sample) for sample in samples], shards, combine) if shards > 1 else [list(range(len(samples)))]
    pairs = [inputs_and_targets(collate([samples[row] for row in run])) for run in runs]
    sizes, order = [len(run) for run in runs], [row for run in runs for row in run]
    inputs, targets = zip(*pairs, strict=True)
    return as_shards(inputs, sizes, order), as_shards(targets, sizes, order)


def inputs_and_targets(collated: Any) -> tuple[Any, Any]:
    """Splits the result of a ``collate``.

    Raises:
        ValueError: it is not a pair, nor a mapping with labels.
    """
    if isinstance(collated, Mapping) and "labels" in collated:
        return collated, collated["labels"]
    if isinstance(collated, (tuple, list)) and len(collated) == 2:
        return collated[0], collated[1]
    raise ValueError(
        f"collate returned {containers.describe(collated)}, expected (inputs, targets), or a mapping of inputs with 'labels', "
        "which are the targets"
    )
