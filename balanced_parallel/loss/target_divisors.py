"""Divisors of several means by a ``weight=`` that depends on the targets alone. They are known before the first micro-batch."""

from collections.abc import Callable
from typing import Any

import torch

from ..batch.row_marks import without_mark
from .custom_weights import count_leading
from .weights import flat_weights, read_weights

__all__: list[str] = []


class OutputUsedError(AttributeError, TypeError):
    """A weight function has used an output that is not computed yet."""

    def __init__(self) -> None:
        super().__init__("it uses the output, which is not computed yet")


class MissingOutput:
    """Placeholder for an output that is not computed yet. Each use raises :class:`OutputUsedError`."""

    def __getattribute__(self, name: str) -> Any:
        raise OutputUsedError

    def __getitem__(self, key: Any) -> Any:
        raise OutputUsedError

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise OutputUsedError


class TargetDivisors:
    """Calls a weight function without outputs, until it has shown one divisor, or one that depends on the outputs.

    Attributes:
        error: of the last call, as text; empty if it returned divisors.
    """

    def __init__(self) -> None:
        self.error = ""
        self._needless: set[int] = set()  # numbers of targets

    def of(self, weight: Callable[..., Any], targets: tuple[Any, ...]) -> list[float] | None:
        """Returns the divisors of a whole batch, or None if there is one, or if they depend on the outputs."""
        count = len(targets)
        if count in self._needless:
            return None
        self.error = ""
        try:
            weights = weight(*[MissingOutput()] * count_leading(weight, count), *map(without_mark, targets))
        except (TypeError, ValueError, AttributeError) as error:  # wrong targets, or a use of the placeholder
            self.error = f"{type(error).__name__}: {error}"
            if isinstance(error, OutputUsedError):
                self._needless.add(count)
            return None
        if isinstance(weights, (torch.Tensor, float, int)):
            self._needless.add(count)
            return None
        return flat_weights(read_weights(weights))
