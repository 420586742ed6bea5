"""Explanations of a step that does not fit, by packages that this one does not import."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .step import TrainStep

__all__: list[str] = []

Explain = Callable[["TrainStep", Any, Any], str]

_known: list[Explain] = []


def register(explain: Explain) -> Explain:
    """Registers a function of a step, inputs and targets. It returns sentences for the error, or raises."""
    _known.append(explain)
    return explain


def explain_step(step: "TrainStep", inputs: Any, targets: Any) -> str:
    """Returns what the registered functions know about the memory of a step."""
    found = []
    for explain in _known:
        try:
            found.append(explain(step, inputs, targets))
        except Exception as error:  # noqa: BLE001 - a failure must not replace the out of memory that is to be explained
            found.append(f"No estimate: {type(error).__name__}: {error}")
    return " ".join(found)
