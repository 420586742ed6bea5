"""Settings of a :class:`TrainStep` that must be the same on all ranks. Ranks that differ in one train different models, or hang.

All settings are compared once, before the first update exchanges anything else. What a schedule changes later is a digest, which
travels with the losses: a later comparison costs no collective, and every rank decides on it alike.
"""

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ..batch.samplers import begun_batches
from ..loss.criterion import DataParallelCriterion
from ..loss.rules import unwrap
from ..optim.balanced import BalancedOptimizer
from ..runtime.collectives import compare_ranks, world_size
from ..runtime.torch_private import buffers_of

_SCHEDULED = ("lr", "momentum", "betas", "weight_decay")


@dataclass(frozen=True)
class Settings:
    """The settings of an update. Another process may have others."""

    criterion: DataParallelCriterion
    optimizers: Sequence[torch.optim.Optimizer]
    schedulers: Sequence[LRScheduler]
    precision: str
    max_grad_norm: float | None
    is_auto: bool  # micro_batch_size="auto"
    unit: str  # of the limit of micro-batches
    failure: str  # of the update before, on this rank: its optimizers are those of an earlier update, or in between

    def compare(self, expected: str = "the same settings on all of them") -> None:
        """Compares all settings, and raises ``ValueError`` on every rank if they differ. All ranks call this."""
        compare_ranks(self._facts(), expected)

    def digest(self) -> list[float]:
        """Returns a number of 20 bits for the settings that may change, and its square. No device is read."""
        numbers: list[Any] = [self.max_grad_norm or 0.0, bool(self.failure)]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for name in _SCHEDULED:
                    value = group.get(name, 0.0)
                    numbers += map(_number, value if isinstance(value, tuple) else [value])
        # of numbers alone, so it is the same in each process; sums over 8192 ranks are exact in float64
        number = hash(tuple(numbers)) % 2**20
        return [float(number), float(number * number)]

    def check(self, total: float, squares: float) -> None:
        """Raises ``ValueError`` on every rank if these sums over all ranks of :meth:`digest` are not of equal numbers."""
        if world_size() * int(squares) != int(total) ** 2:
            self.compare(
                "the same settings on all of them. Nothing was updated: set them alike, or go on from a checkpoint on all ranks"
            )

    def _facts(self) -> dict[str, Hashable]:
        facts: dict[str, Hashable] = {
            **describe_criterion(self.criterion),
            "precision": self.precision,
            "max_grad_norm": self.max_grad_norm,
            "micro_batch_size='auto'": self.is_auto,
            "unit of the micro-batches": self.unit,
            "optimizer": ", ".join(map(_name_of_optimizer, self.optimizers)),
            "scheduler": ", ".join(type(scheduler).__name__ for scheduler in self.schedulers) or "none",
            "the sampler's batches": begun_batches(),
            "the last step of the optimizer": self.failure or "was made",
        }
        for number, optimizer in enumerate(self.optimizers):
            of = f" of optimizer {number}" * bool(number)
            facts[f"number of param groups{of}"] = len(optimizer.param_groups)
            for index, group in enumerate(optimizer.param_groups):
                facts |= _settings({"number of parameters": len(group["params"]), **group}, f" of param group {index}{of}")
        return facts


def describe_criterion(criterion: DataParallelCriterion | None) -> dict[str, Hashable]:
    """Returns the settings of a criterion. Integers and strings of a loss that is not torch's may be its rank or device."""
    if criterion is None:
        return {"criterion": None}
    function, _, keywords = unwrap(criterion.module)
    facts = {
        "criterion": _name(function),
        "reduction": criterion.reduction,
        "weight=": criterion.weight if isinstance(criterion.weight, str) else _name(criterion.weight),
        "minimum": str(criterion.minimum),
        "whole": criterion.whole,
        "precision of the criterion": criterion.precision.name,
        **_settings(keywords, " of the criterion"),
    }
    for path, part in function.named_modules() if isinstance(function, nn.Module) else ():
        is_of_torch = type(part).__module__.startswith("torch.nn.")
        values = {**vars(part), **buffers_of(part)} if is_of_torch else vars(part)  # buffers: the weights of classes
        settings = {name: value for name, value in values.items() if is_of_torch or isinstance(value, float)}
        facts |= _settings(settings, f" of {path or 'the criterion'}")
    return facts


def _settings(values: Mapping[str, Any], suffix: str) -> dict[str, Hashable]:
    """Returns the numbers, strings, tuples of them and small tensors among some values, with a suffix to their names."""
    kinds = (int, float, str, NoneType)
    public = {name: value for name, value in values.items() if not name.startswith("_") and name != "training"}
    tensors = {name: str(value.tolist()) for name, value in public.items() if isinstance(value, Tensor) and not value.is_meta}
    return {
        name + suffix: value
        for name, value in (public | tensors).items()
        if all(isinstance(part, kinds) for part in (value if isinstance(value, tuple) else [value]))
    }


def _name_of_optimizer(optimizer: torch.optim.Optimizer) -> str:
    inner = f" of {_name(optimizer.recipe[0])}" if isinstance(optimizer, BalancedOptimizer) else ""
    return type(optimizer).__name__ + inner


def _name(function: Any) -> str | None:
    function = function.func if isinstance(function, functools.partial) else function
    return None if function is None else getattr(function, "__qualname__", type(function).__qualname__)


def _number(value: Any) -> float:
    """Returns a number on the host, otherwise 0."""
    is_on_host = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.is_cpu and value.numel() == 1)
    return float(value) if is_on_host else 0.0
