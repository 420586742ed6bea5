"""The reduction of a criterion, as far as its settings can be believed."""

import inspect
from typing import Any

from .rules import FUNCTIONS, is_known, unwrap

__all__: list[str] = []


def reduction_of(criterion: Any) -> str:
    """``"mean"``, ``"batchmean"``, ``"sum"`` or ``"none"``: the setting of a loss of torch, of one that was registered, of a
    partial, or a function's default. Another module's attribute says nothing about what its ``forward`` returns."""
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
    """The reduction that keyword arguments of a function of torch ask for, also by ``size_average=`` and ``reduce=``, which
    torch deprecated and still obeys."""
    if settings.get("size_average") is None and settings.get("reduce") is None:
        return str(settings.get("reduction", "mean"))
    if settings.get("reduce") is False:
        return "none"
    return "sum" if settings.get("size_average") is False else "mean"
