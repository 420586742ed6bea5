"""The memory of a training step before it runs: :func:`estimate` predicts it, :func:`plan` and
:func:`fit` make a batch fit.
"""

from .estimation import estimate
from .fitting import fit
from .planning import MemoryPlan, plan
from .report import MemoryReport

__all__ = ["MemoryPlan", "MemoryReport", "estimate", "fit", "plan"]
