"""The memory of a training step, before it runs: :func:`estimate`, :func:`plan`."""

from .estimate import estimate
from .report import MemoryReport

__all__ = ["MemoryReport", "estimate"]
