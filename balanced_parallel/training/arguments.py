"""Checks of the arguments of :class:`TrainStep`."""

import math
from typing import Any

from ..loss.criterion import DataParallelCriterion
from ..loss.custom_weights import SEVERAL
from ..runtime.argument_checks import check_number
from .update import each_scheduler

__all__: list[str] = []


def check_arguments(criterion: Any, micro_batch_size: Any, max_grad_norm: float | None, scheduler: Any) -> None:
    """Raises ``TypeError`` for a criterion or a scheduler of another kind, ``ValueError`` for settings out of their range."""
    each_scheduler(scheduler)
    if not isinstance(criterion, DataParallelCriterion):
        more = SEVERAL if isinstance(criterion, (list, tuple, dict)) else ""
        raise TypeError(f"the criterion is a {type(criterion).__name__}, expected a DataParallelCriterion: wrap it in one{more}")
    if micro_batch_size != "auto":
        check_micro_batch_size(micro_batch_size, "None or 'auto'")
    if max_grad_norm is not None and not (isinstance(max_grad_norm, (int, float)) and max_grad_norm > 0):
        raise ValueError(f"max_grad_norm={max_grad_norm!r}, expected a positive number, or None for no clipping")


def check_micro_batch_size(rows: Any, otherwise: str) -> None:
    """Raises ``ValueError`` unless ``rows`` is a positive integer or None. ``otherwise`` names what else is possible."""
    if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 1):
        raise ValueError(f"micro_batch_size={rows!r}, expected a positive number of rows per device, {otherwise}")


def check_micro_batch_cost(cost: Any) -> None:
    """Raises ``TypeError`` or ``ValueError`` unless ``cost`` is a positive number or None."""
    if cost is not None:
        expected = "a positive number, the cost of a device in one forward"
        check_number("micro_batch_cost", cost, expected, at_least=math.ulp(0.0))  # the smallest positive number
