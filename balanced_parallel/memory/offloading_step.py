"""A :class:`TrainStep` whose activations wait for the backward in the memory of the host."""

from typing import Any

from torch import Tensor

from ..savings.offloading import offload_activations
from ..training.step import TrainStep

__all__: list[str] = []


class OffloadingStep(TrainStep):
    """A :class:`TrainStep` inside of :func:`offload_activations`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Trains on one effective batch."""
        with offload_activations():
            return super().__call__(*args, **kwargs)

    def add(self, inputs: Any, targets: Any = ()) -> None:
        """Accumulates the gradients of some more rows."""
        with offload_activations():
            super().add(inputs, targets)

    def apply(self) -> Tensor:
        """Updates with the gradients of all rows that were added."""
        with offload_activations():
            return super().apply()
