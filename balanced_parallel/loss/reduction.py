"""Reduction of a criterion, from its settings."""

import inspect
from typing import Any

from .rules import FUNCTIONS, is_known, unwrap

__all__: list[str] = []


def reduction_of(criterion: Any) -> str:
    """Returns the reduction of a criterion: ``"mean"``, ``"batchmean"``, ``"sum"`` or ``"none"``.

    It is the keyword argument of a partial, the default of a function, or the attribute of a loss of torch or of a registered
    loss. The attribute of another module does not determine the result of its ``forward``, which is assumed to be a mean.
    """
    function, _, settings = unwrap(criterion)
    if "reduction" in settings or "size_average" in settings or "reduce" in settings:
        return str(reduction_in(settings))
    if isinstance(function, FUNCTIONS):
        try:
            parameter = inspect.signature(function).parameters.get("reduction")
        except ValueError:  # a builtin without a signature
            parameter = None
        default = "mean" if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default
        return str(default)
    return str(getattr(function, "reduction", "mean")) if is_known(criterion) else "mean"


def reduction_in(settings: dict[str, Any]) -> str:
    """Returns the reduction that keyword arguments select, including the deprecated ``size_average=`` and ``reduce=``."""
    if settings.get("size_average") is None and settings.get("reduce") is None:
        return str(settings.get("reduction", "mean"))
    if settings.get("reduce") is False:
        return "none"
    return "sum" if settings.get("size_average") is False else "mean"
