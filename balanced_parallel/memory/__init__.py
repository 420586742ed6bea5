"""The memory of a training step before it runs: :func:`estimate` predicts it, :func:`plan` makes a batch fit."""

from .estimation import estimate
from .planning import MemoryPlan, plan
from .report import MemoryReport

__all__ = ["MemoryPlan", "MemoryReport", "estimate", "plan"]
