"""Settings and values of a :class:`TrainStep` that must be the same on all ranks.

Otherwise they train different models, or hang.

All are compared once, before the first update exchanges anything else. What may change later is a
digest, which travels with the losses: a later comparison costs no collective, and every rank
decides on it alike. The digest also tells that a program has written to parameters, as a
``load_state_dict()`` on one rank alone. Then all are compared again.
"""

import functools
import itertools
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..batch.rows import ParallelModel
from ..loss.criterion import DataParallelCriterion
from ..loss.rules import unwrap
from ..optim.balanced import BalancedOptimizer
from ..replicas.recorded import checksum
from ..runtime.collectives import compare_ranks, facts_of_process, max_over_ranks
from ..runtime.torch_private import buffers_of, uncompiled_name, versions
from ..runtime.values import Precision


class TrainedObjects(NamedTuple):
    """The objects of a training step that have state."""

    model: ParallelModel
    criterion: DataParallelCriterion
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[LRScheduler]
    precision: Precision  # The scaler is in it.
    trained: Mapping[str, Tensor]  # the parameters by name


class LastUpdate(NamedTuple):
    """The end of the last update on this rank."""

    failure: str = ""  # An error of the optimizers, which may have updated some parameters.
    states: Sequence[object] = ()  # The state of each optimizer.
    versions: Sequence[int] = ()  # Version counters of the trained parameters.


@dataclass(frozen=True)
class Settings:
    """The settings of an update. Another process may have others."""

    state: TrainedObjects
    arguments: Mapping[str, Hashable]  # Settings of the step, by their names in an error.
    before: LastUpdate

    @functools.cached_property
    def has_loaded(self) -> bool:
        """True if an optimizer has another state than after the last update."""
        states = [optimizer.state for optimizer in self.state.optimizers]
        return any(map(operator.is_not, states, self.before.states))

    def compare(self, expected: str = "the same settings on all of them") -> None:
        """Compares all settings, and raises ``ValueError`` on every rank if they differ.

        All ranks call this.
        """
        names = [
            f"{type(each).__name__} of {name_of(each.recipe[0])}"
            if isinstance(each, BalancedOptimizer)
            else type(each).__name__
            for each in self.state.optimizers
        ]
        facts: dict[str, Hashable] = {
            **describe_criterion(self.state.criterion),
            **self.arguments,
            "optimizer": ", ".join(names),
            "scheduler": ", ".join(type(scheduler).__name__ for scheduler in self.state.schedulers)
            or "none",
            **facts_of_process,
            "the last step of the optimizer": self.before.failure or "was made",
        }
        for number, optimizer in enumerate(self.state.optimizers):
            of = f" of optimizer {number}" if number else ""
            facts[f"number of param groups{of}"] = len(optimizer.param_groups)
            for index, group in enumerate(optimizer.param_groups):
                values = {"number of parameters": len(group["params"]), **group}
                facts |= _settings(values, f" of param group {index}{of}")
        compare_ranks(facts | self._values(), expected)

    def digest(self) -> float:
        """Returns a number for the settings that may change. No device is read."""
        has_written = versions([*self.state.trained.values()]) != [*self.before.versions]
        values = [
            bool(self.before.failure),
            self.has_loaded,
            has_written,
            self.state.model.module.training,
            *self.arguments.values(),
        ]
        for optimizer in self.state.optimizers:
            for group in optimizer.param_groups:
                for value in group.values():
                    values += value if isinstance(value, tuple) else [value]
        # The hash of another value may differ in each process.
        for place, value in enumerate(values):
            if isinstance(value, Tensor) and value.is_cpu and value.numel() == 1:
                values[place] = value.item()
            elif not isinstance(value, (int, float)):
                values[place] = 0
        # Numbers have the same hash in each process. It is exact in float64.
        return float(hash(tuple(values)) % 2**53)

    def trains_others(self, dtypes: Mapping[int, torch.dtype]) -> bool:
        """Returns True if an optimizer has a parameter to train of another id, or dtype."""
        groups = [group for optimizer in self.state.optimizers for group in optimizer.param_groups]
        parameters = itertools.chain(*[group["params"] for group in groups])
        trained = [each for each in parameters if each.requires_grad]
        return bool([each for each in trained if each.dtype != dtypes.get(id(each))])

    def check(self, *, is_same: bool) -> None:
        """Compares again unless :meth:`digest` is the same on all ranks, or if all have loaded."""
        if self.has_loaded or not is_same:
            self.compare(
                "the same settings on all of them. Nothing was updated: set them alike, or go on from a checkpoint on all ranks"
            )

    def _values(self) -> dict[str, Hashable]:
        """Returns facts about each layer, group and tensor. All ranks call this.

        A forward changes buffers, until the end of the update shares those of a rank, and layers of
        the user may note values.
        """
        is_new = not max_over_ranks(len(self.state.model.runs))
        both = nn.ModuleDict({"model": self.state.model.module, "criterion": self.state.criterion})
        facts: dict[str, Hashable] = {}
        for path, part in both.named_modules():
            kinds = (
                (int, float, str, tuple)
                if type(part).__module__.startswith("torch.nn.")
                else (float,) * is_new
            )
            facts |= {
                f"{name} of {path}": str(value)
                for name, value in vars(part).items()
                if name == "training" or (name[0] != "_" and isinstance(value, kinds))
            }
        tensors = {**self.state.trained, **dict(both.named_buffers() if is_new else ())}
        for optimizer in self.state.optimizers:
            for number, names in enumerate(names_by_group(optimizer, self.state.trained)):
                facts |= {f"group of {name}": number for name in names}
            # others may have other state on each rank
            is_of_torch = type(optimizer).__module__.startswith("torch.optim.")
            for name, parameter in self.state.trained.items() if is_of_torch else ():
                tensors |= {
                    f"{key} of {name}": value
                    for key, value in sorted(optimizer.state.get(parameter, {}).items())
                }
        return facts | {name: _checksum(value) for name, value in tensors.items()}


class Unchecked(Settings):
    """The settings of a step that has its own. Ranks do not compare them."""

    def __init__(self) -> None:
        """Takes nothing."""

    def digest(self) -> float:
        """Returns a number that is the same on all ranks."""
        return 0.0

    def trains_others(self, dtypes: Mapping[int, torch.dtype]) -> bool:
        """Returns True: the optimizers are unknown."""
        return True

    def check(self, *, is_same: bool) -> None:
        """Compares nothing."""


def describe_criterion(criterion: DataParallelCriterion | None) -> dict[str, Hashable]:
    """Returns the settings of a criterion.

    Integers and strings of a loss that is not torch's may be its rank or device.
    """
    if criterion is None:
        return {"criterion": None}
    function, _, keywords = unwrap(criterion.module)
    facts = {
        "criterion": name_of(function),
        "reduction": criterion.reduction,
        "weight=": criterion.weight
        if isinstance(criterion.weight, str)
        else name_of(criterion.weight),
        "minimum": str(criterion.minimum),
        "whole": criterion.whole,
        "sums_rows": criterion.copies.collectives.sums_rows,
        "precision of the criterion": criterion.precision.name,
        **_settings(keywords, " of the criterion"),
    }
    for path, part in function.named_modules() if isinstance(function, nn.Module) else ():
        if type(part).__module__.startswith("torch.nn."):
            settings = {**vars(part), **buffers_of(part)}  # the weights of classes are buffers
        else:
            settings = {
                name: value for name, value in vars(part).items() if isinstance(value, float)
            }
        facts |= _settings(settings, f" of {path or 'the criterion'}")
    return facts


def _settings(values: Mapping[str, Any], suffix: str) -> dict[str, Hashable]:
    """Returns the numbers, strings, tuples of them and small tensors among some values, with a
    suffix to their names.
    """
    facts: dict[str, Hashable] = {}
    for name, value in values.items():
        if name.startswith("_") or name == "training":
            continue
        if isinstance(value, Tensor) and not value.is_meta:
            value = str(value.tolist())
        parts = value if isinstance(value, tuple) else [value]
        if all(isinstance(part, (int, float, str, NoneType)) for part in parts):
            facts[name + suffix] = value
    return facts


def names_by_group(optimizer: Optimizer, trained: Mapping[str, Tensor]) -> list[list[str]]:
    """Returns the names of the parameters in each group, in the order in which a ``state_dict()``
    numbers them.
    """
    names = {id(parameter): uncompiled_name(name) for name, parameter in trained.items()}
    groups = (
        optimizer.recipe[1] if isinstance(optimizer, BalancedOptimizer) else optimizer.param_groups
    )
    numbers = itertools.count()
    return [
        [names.get(id(parameter), f"parameter {next(numbers)}") for parameter in group["params"]]
        for group in groups
    ]


def name_of(function: object) -> str | None:
    """Returns the name of a function or of the class of another object; None for None."""
    function = function.func if isinstance(function, functools.partial) else function
    return (
        None if function is None else getattr(function, "__qualname__", type(function).__qualname__)
    )


def _checksum(value: Any) -> str:
    """Returns a sum of the bits of a tensor; of a shard or another kind of tensor, none."""
    if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided or value.is_meta:
        return str(value) if isinstance(value, (int, float)) else "unknown"
    return f"checksum {int(checksum([value.contiguous()]))}{' trained' * value.requires_grad}"
