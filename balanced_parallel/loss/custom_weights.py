"""Settings of a criterion that say what its mean divides by, checked, called and missed."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from ..batch import nested
from .partial_sums import Criterion, Shard
from .reduction import reduction_of
from .rules import find_torch_loss

__all__: list[str] = []


def check_settings(criterion: Any, weight: Any, reduction: str | None, minimum: float) -> None:
    """Raises ``TypeError`` for a criterion that cannot be called, ``ValueError`` for settings out of their range."""
    if isinstance(criterion, type) or not callable(criterion):
        raise TypeError(f"the criterion is {_described(criterion)}, expected a module or a function")
    if weight is not None and weight != "rows" and not callable(weight):
        raise ValueError(f"weight={weight!r}, expected a function (output, *targets) -> scalar, or 'rows'")
    if not 0 <= minimum < float("inf"):
        raise ValueError(f"minimum={minimum!r}, expected the floor of what the mean divides by: finite, and not negative")
    if reduction not in (None, "sum", "mean", "none"):
        raise ValueError(f"reduction={reduction!r}, expected 'sum', 'mean' or 'none'")
    if reduction is not None and find_torch_loss(criterion) is not None and reduction_of(criterion) != reduction:
        raise ValueError(
            f"reduction={reduction!r} was given for a loss of torch with reduction={reduction_of(criterion)!r}: set it where the "
            "loss is made"
        )


def keywords_of(weight: Any) -> set[str] | None:
    """The keyword arguments that a weight function takes; None for all."""
    if not callable(weight):
        return None
    try:
        parameters = inspect.signature(weight).parameters.values()
    except (TypeError, ValueError):
        return None
    return None if any(one.kind is one.VAR_KEYWORD for one in parameters) else {one.name for one in parameters}


def call_weight(weight: Callable[..., Any], takes: set[str] | None, shard: Shard) -> Any:
    """Calls a weight function as the criterion is called, with the keyword arguments that it takes."""
    kwargs = {name: value for name, value in shard.kwargs.items() if takes is None or name in takes}
    return weight(*nested.spread(shard.output), *shard.targets, **kwargs)


def count_leading(function: Callable[..., Any], targets: int) -> int:
    """Arguments that stand before the ``targets`` last of those that ``function`` requires: an output fills them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    required = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty]
    return max(len(required) - targets, 1)


class _NotThere:
    """Stands for an output that is not computed yet: whatever is asked of it raises."""

    def __getattribute__(self, name: str) -> Any:
        raise AttributeError("there is no output yet")

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise TypeError("there is no output yet")


def weigh_without_output(weight: Callable[..., Any], targets: tuple[Any, ...]) -> Any:
    """Calls a weight function with ``targets`` alone. Returns None where it asks for the output."""
    try:
        return weight(*[_NotThere()] * count_leading(weight, len(targets)), *targets)
    except (TypeError, ValueError, AttributeError):  # of the output that is not there
        return None


def warn_unknown(criterion: Criterion, stacklevel: int) -> None:
    """Warns that a criterion is weighted by rows, and says what would tell more about it."""
    setting = getattr(criterion, "reduction", "mean")
    about = "" if setting == "mean" else f" (its attribute reduction={setting!r} says nothing about a forward of its own)"
    warnings.warn(
        f"it is not known what {_described(criterion)} divides its mean by: it is weighted by rows, which is exact only for a "
        "mean in which each row counts the same. Give DataParallelCriterion weight=, a function (output, *targets) -> scalar, "
        f"for another mean; reduction='sum' for a sum; weight='rows' where this is right{about}",
        stacklevel=stacklevel,
    )


def _described(criterion: Any) -> str:
    return f"the class {criterion.__name__}" if isinstance(criterion, type) else nested.describe(criterion)
