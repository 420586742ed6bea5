"""The model and the criterion of this package on fake devices."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ...loss.criterion import DataParallelCriterion
from ...replicas.model import DataParallelModel
from ...replicas.replicas import Replicas
from ...replicas.workers import run_in_turn
from ...runtime.streams import SideStreams

__all__: list[str] = []

T = TypeVar("T")


class OwnValues:
    """An exchange in which a replica receives its own value in the place of each other value: one of the same size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def exchange(self, index: int, number: int, value: Any) -> list[Any]:
        """Returns ``value`` once per replica."""
        return [value] * self.size


def run_in_this_thread(work: Sequence[Callable[[], T]], devices: Sequence[torch.device], *, together: bool = True) -> list[T]:
    """Runs replicas one after the other: a fake mode belongs to one thread."""
    return run_in_turn(work, devices, OwnValues(len(work)))


def make_replicas(*, have_streams: bool) -> Replicas:
    """Makes replicas of fake tensors, which have no values to compare.

    Args:
        have_streams: the fake devices stand for devices with streams. Gradients then live until another stream has read them.
    """
    return Replicas(checksums=False, side=SideStreams() if have_streams else None, workers=run_in_this_thread)


class TracedModel(DataParallelModel):
    """A :class:`DataParallelModel` on fake devices.

    Args:
        module: of fake tensors on the first of ``devices``.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: list[torch.device],
        replicas: Replicas,
        *,
        dim: int,
        precision: str,
        split: Sequence[float] | None,
    ) -> None:
        nn.Module.__init__(self)
        self._set_up(devices, replicas, dim=dim, precision=precision, split=split)
        self.module = module


class TracedCriterion(DataParallelCriterion):
    """A :class:`DataParallelCriterion` with given replicas."""

    def __init__(self, criterion: Any, replicas: Replicas, *, dim: int, precision: str, whole: bool = False) -> None:
        super().__init__(criterion, dim=dim, precision=precision, whole=whole)
        self.replicas = replicas
