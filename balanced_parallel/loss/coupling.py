"""Chooses how a criterion whose rows depend on each other is computed, and checks its settings."""

from typing import Any

import torch

from .additive import AdditiveLoss
from .coupled import CoupledLoss
from .loss_of_sums import LossOfSums
from .shard_runner import ShardRunner
from .whole_loss import WholeLoss

__all__: list[str] = []


def couple(criterion: ShardRunner, home: torch.device) -> CoupledLoss:
    """Returns the loss of one update of a criterion whose rows depend on each other.

    Args:
        criterion: with ``whole=True``, or of an :class:`AdditiveLoss`.
        home: a device of this process, for collectives if it has no rows.
    """
    return WholeLoss(criterion, home) if criterion.whole else LossOfSums(criterion, home)


def check_coupled(criterion: Any, whole: bool, weight: Any, reduction: str | None, minimum: float) -> None:
    """Raises ``ValueError`` for settings of a divisor, which a loss whose rows depend on each other does not have."""
    if not isinstance(whole, bool):
        raise ValueError(f"whole={whole!r}, expected True or False")
    name = "whole=True" if whole else "an AdditiveLoss" if isinstance(criterion, AdditiveLoss) else None
    given = {"weight": weight, "reduction": reduction, "minimum": minimum or None}
    for setting, value in given.items():
        if name is not None and value is not None:
            raise ValueError(
                f"{setting}={value!r} was given with {name}, expected neither weight, reduction nor minimum: the loss "
                "is computed once for all rows, so there is nothing to divide"
            )
