"""The gradients of groups of rows: they are taken after each backward, and summed as integers over
ranks at the end of an update.
"""

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime import collectives, values
from ..strategies.ddp import DDPUpdate
from ..strategies.replicas import ReplicaSync

_BUFFER_BYTES = 25 * 2**20  # Integers of so many bytes are summed at a time.


class GroupReport(NamedTuple):
    """Numbers of the groups of rows of a process, for all others."""

    losses: Sequence[float]  # the sum of the losses of each group
    weights: Sequence[float]
    additions: Counter[tuple[int, int]]  # by the number of a part, and its unit
    present: set[int]  # Numbers of the parameters with a gradient.
    digest: float  # The settings.
    refusal: str


class ReplicaGroups(ReplicaSync):
    """Takes the gradients of the replicas of one process."""

    def take(self, parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Returns parameters with a gradient on one of the devices, and forgets the gradients."""
        taken = []
        for replicas in (self.criterion.replicas, self.model.replicas):
            for bucket in replicas.gradients.buckets:
                for gradients in bucket.take():
                    for place, gradient in gradients.items():
                        taken.append((bucket.parameters[place], gradient))
        return taken + _take_gradients(parameters)

    def gather(self, report: GroupReport) -> list[GroupReport]:
        """Returns the reports of all processes."""
        return [report]

    def reduce(self, sizes: Sequence[int], tensors: Iterator[Tensor]) -> None:
        """Makes the tensors: there is one process."""
        for _ in tensors:
            pass

    def confirm(self) -> None:
        """Does nothing: there is one process."""


class DDPGroups(DDPUpdate):
    """Sums integers over ranks at the end of an update. The reducer does not run."""

    _sizes: list[int] = []  # noqa: RUF012 - Elements of tensors that are not summed yet.

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Keeps gradients on this rank in this block."""
        no_sync: contextlib.AbstractContextManager[None] = self._model.no_sync()
        return no_sync

    def take(self, parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Returns parameters with a gradient, and forgets the gradients."""
        return _take_gradients(parameters)

    def gather(self, report: GroupReport) -> list[GroupReport]:
        """Returns the reports of all ranks."""
        reports = collectives.gather_objects(report, self._record.group)
        self._with_rows = [bool(each.losses) for each in reports]
        self._is_reduced = True
        return reports

    def reduce(self, sizes: Sequence[int], tensors: Iterator[Tensor]) -> None:
        """Sums tensors of integers, with these numbers of elements, over all ranks, in place."""
        self._sizes = [*sizes]
        while self._sizes:
            self._reduce(tensors)

    def _reduce(self, tensors: Iterator[Tensor]) -> None:
        """Sums the next integers, of at most the bytes of a buffer, or of one tensor."""
        ends = itertools.accumulate(self._sizes)
        count = max(1, sum(8 * end <= _BUFFER_BYTES for end in ends))
        sizes = self._sizes[:count]
        parts = [*itertools.islice(tensors, count)]
        flat = torch.cat([part.flatten() for part in parts])
        total = collectives.sum_over_ranks(flat, self._record.group)
        del self._sizes[:count]
        for part, summed in zip(parts, total.split(sizes), strict=True):
            part.copy_(summed.view(part.shape))

    def confirm(self) -> None:
        """Tells that this rank has its gradients. Raises an error if another one has not."""
        collectives.gather_objects(True, self._record.group)
        self._has_agreed = True
        self._unshared = self._with_rows, False
        self._share()

    def multiply(self, tensors: Sequence[Tensor], factor: object) -> None:
        """Checks the gradients, which are those of the loss."""
        self._shared_gradients(tensors)

    def discard(self, error: BaseException, divide: Callable[[], object] = bool) -> bool:
        """Takes part in the sums of the other ranks, and tells them."""
        self._share()
        if not (self._has_agreed or isinstance(error, collectives.ElsewhereFailure)):
            while self._sizes:
                zeros = functools.partial(torch.zeros, dtype=torch.int64, device=self._device)
                self._reduce(map(zeros, self._sizes))
            self.tell(error, has_begun=not self._is_reduced)
            error = collectives.ElsewhereFailure()
        return super().discard(error)


GroupSync = ReplicaGroups | DDPGroups


def _take_gradients(parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Returns the parameters that have a gradient, each with it, and forgets the gradients."""
    taken = [(each, each.grad) for each in parameters if each.grad is not None]
    values.forget_gradients(parameter for parameter, _ in taken)
    return taken
