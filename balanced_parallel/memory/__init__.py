"""The memory of a training step before it runs: :func:`estimate` predicts it, :func:`plan` and :func:`fit` make a batch fit."""

from . import rank_memory  # registers with distributed.strategy
from .estimation import estimate
from .fitting import fit
from .memory_plan import MemoryPlan
from .planning import plan
from .report import MemoryReport

__all__ = ["MemoryPlan", "MemoryReport", "estimate", "fit", "plan", "rank_memory"]
