"""Kinds of targets of the losses of torch, and divisors that depend on the targets alone."""

from typing import Any

from torch import Tensor

from .rules import RULES, TARGETS, Targets, find_torch_loss, unwrap

__all__: list[str] = []


def targets_of(criterion: Any) -> Targets | None:
    """Returns the kind of targets that a loss of torch takes: class indices, or tensors shaped like the output.

    None for losses with several targets or with targets that the output does not determine, and for other criteria.
    """
    function = find_torch_loss(criterion)
    return None if function is None else TARGETS[function]


def weight_of_targets(criterion: Any, targets: tuple[Any, ...]) -> Tensor | None:
    """Returns :func:`loss_weight` if it depends on the targets alone, otherwise None."""
    loss = find_torch_loss(criterion)
    unwrapped, arguments, settings = unwrap(criterion)
    if loss is None or TARGETS[loss] != "classes" or arguments or len(targets) != 1:
        return None
    class_weights = settings.get("weight", getattr(unwrapped, "weight", None))
    if class_weights is not None or not isinstance(targets[0], Tensor) or targets[0].is_floating_point():
        return None
    return RULES[loss](target=targets[0], ignore_index=settings.get("ignore_index", getattr(unwrapped, "ignore_index", -100)))
