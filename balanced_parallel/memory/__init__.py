"""The memory of a training step, before it runs: :func:`estimate` says what it needs, :func:`plan` how it fits."""

from .estimation import estimate
from .planning import MemoryPlan, plan
from .report import MemoryReport

__all__ = ["MemoryPlan", "MemoryReport", "estimate", "plan"]
