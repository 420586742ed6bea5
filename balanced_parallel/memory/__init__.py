"""The memory of a training step before it runs: :func:`estimate` predicts it, :func:`plan` and
:func:`fit` make a batch fit.
"""

from .estimation import compare_kinds, estimate
from .fitting import fit
from .planning import MemoryPlan, plan
from .report import KindComparison, MemoryReport

__all__ = [
    "KindComparison",
    "MemoryPlan",
    "MemoryReport",
    "compare_kinds",
    "estimate",
    "fit",
    "plan",
]
