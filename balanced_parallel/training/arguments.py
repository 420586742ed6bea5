"""Checks of the arguments of :class:`TrainStep`."""

from typing import Any

from ..loss.criterion import DataParallelCriterion
from ..loss.custom_weights import SEVERAL
from .update import each_scheduler

__all__: list[str] = []


def check_arguments(criterion: Any, micro_batch_size: Any, max_grad_norm: float | None, scheduler: Any) -> None:
    """Raises ``TypeError`` for a criterion or a scheduler of another kind, ``ValueError`` for settings out of their range."""
    each_scheduler(scheduler)
    if not isinstance(criterion, DataParallelCriterion):
        more = SEVERAL if isinstance(criterion, (list, tuple, dict)) else ""
        raise TypeError(f"the criterion is a {type(criterion).__name__}, expected a DataParallelCriterion: wrap it in one{more}")
    is_number = isinstance(micro_batch_size, int) and not isinstance(micro_batch_size, bool) and micro_batch_size > 0
    if not is_number and micro_batch_size not in (None, "auto"):
        raise ValueError(f"micro_batch_size={micro_batch_size!r}, expected a positive number of rows per device, None or 'auto'")
    if max_grad_norm is not None and not (isinstance(max_grad_norm, (int, float)) and max_grad_norm > 0):
        raise ValueError(f"max_grad_norm={max_grad_norm!r}, expected a positive number, or None for no clipping")
