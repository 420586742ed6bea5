"""The memory of a training step before it runs: :func:`estimate` predicts it, :func:`plan` and :func:`fit` make a batch fit.

The functions are loaded when they are first used, so that a program that only trains does not load the planner.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .estimation import estimate
    from .fitting import fit
    from .planning import MemoryPlan, plan
    from .report import MemoryReport

__all__ = ["MemoryPlan", "MemoryReport", "estimate", "fit", "plan"]

_PLACES = {"MemoryPlan": "planning", "MemoryReport": "report", "estimate": "estimation", "fit": "fitting", "plan": "planning"}


def __getattr__(name: str) -> Any:
    """Loads the module of a public name at its first use."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted({*globals(), *__all__})
