"""Settings for the divisor of a criterion's mean: validation, calls of weight functions, and the warning if none is given."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from ..batch import nested
from .partial_sums import Criterion, Shard, call_spread
from .reduction import reduction_of
from .rules import find_torch_loss
from .weights import check_minimum

__all__: list[str] = []

SEVERAL = "; several losses are one module that returns a mapping of them, with a weight= that returns a divisor for each"


def check_settings(criterion: Any, weight: Any, reduction: str | None, minimum: float) -> None:
    """Validates the settings of a criterion.

    Raises:
        TypeError: if the criterion cannot be called.
        ValueError: if a setting is invalid, or contradicts the reduction of a loss of torch.
    """
    if isinstance(criterion, type) or not callable(criterion):
        more = SEVERAL if isinstance(criterion, (list, tuple, dict)) else ""
        raise TypeError(f"the criterion is {_described(criterion)}, expected a module or a function{more}")
    if weight is not None and weight != "rows" and not callable(weight):
        raise ValueError(f"weight={weight!r}, expected a function (output, *targets) -> scalar, or 'rows'")
    check_minimum(minimum)
    if reduction not in (None, "sum", "mean", "none"):
        raise ValueError(f"reduction={reduction!r}, expected 'sum', 'mean' or 'none'")
    if reduction is not None and find_torch_loss(criterion) is not None and reduction_of(criterion) != reduction:
        raise ValueError(
            f"reduction={reduction!r} was given for a loss of torch with reduction={reduction_of(criterion)!r}: set it in the "
            "constructor of the loss"
        )


def keywords_of(weight: Any) -> set[str] | None:
    """Returns the names of the keyword arguments that a weight function accepts, or None if it accepts any."""
    if not callable(weight):
        return None
    try:
        parameters = inspect.signature(weight).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def call_weight(weight: Callable[..., Any], takes: set[str] | None, shard: Shard) -> Any:
    """Calls a weight function with the arguments of the criterion, without the keyword arguments that it does not accept."""
    kwargs = {name: value for name, value in shard.kwargs.items() if takes is None or name in takes}
    return call_spread(weight, shard.output, shard.targets, kwargs)


def count_leading(function: Callable[..., Any], targets: int) -> int:
    """Returns the number of required arguments of ``function`` before its last ``targets`` ones. An output fills them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    positional = [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    required = [parameter for parameter in positional if parameter.default is parameter.empty]
    return max(len(required) - targets, 1)


def warn_unknown(criterion: Criterion, stacklevel: int) -> None:
    """Warns that a criterion is weighted by rows, and names the settings for other criteria."""
    setting = getattr(criterion, "reduction", "mean")
    note = "" if setting == "mean" else f" (the attribute reduction={setting!r} has no effect on a forward of its own)"
    warnings.warn(
        f"the divisor of the mean of {_described(criterion)} is unknown: it is weighted by rows, which is exact only for a mean "
        "over rows with equal weights. Give DataParallelCriterion weight=, a function (output, *targets) -> scalar, for another "
        f"mean; reduction='sum' for a sum; weight='rows' for a mean over rows{note}",
        stacklevel=stacklevel,
    )


def _described(criterion: Any) -> str:
    return f"the class {criterion.__name__}" if isinstance(criterion, type) else nested.describe(criterion)
