"""Two passes over the micro-batches of an update, for losses whose rows depend on each other (GradCache, arXiv:2101.06983).

    forward 0 | forward 1 | loss of all | forward 0 | backward 0 | forward 1 | backward 1 | update
     without a graph                      same random numbers and buffers

Batches are kept until the update, since their rows are needed twice. An update of one micro-batch takes one pass.
"""

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..batch.outputs import PerReplica
from ..batch.rows import Batch, Shard
from ..loss.coupled import CoupledLoss
from ..loss.sums import LossSum
from ..runtime.values import Precision
from .recovery import ElsewhereOutOfMemory, Snapshot, explain_writes, record_versions, retrying_allocations
from .strategy import GradientSync


class TwoPasses:
    """The first pass of one update, and the agreement of the ranks behind it.

    With ``is_auto``, batches run again after an out of memory.
    """

    def __init__(
        self, loss: CoupledLoss, sync: GradientSync, precision: Precision, devices: Sequence[torch.device], *, is_auto: bool
    ) -> None:
        self.loss, self._sync, self._precision, self._devices, self._is_auto = loss, sync, precision, devices, is_auto
        self._has_run = False  # a forward of the first pass
        self._is_single = False  # there is one pass
        self._has_agreed = False  # with the other ranks, on going on

    def takes_one(self, is_single: bool) -> bool:
        """Returns True if every rank has a single micro-batch, so that one pass is enough. All ranks call this."""
        self._is_single = bool(self._sync.smallest(is_single))
        return self._is_single

    def collect(self, outputs: PerReplica, shards: Sequence[Shard]) -> list[Any]:
        """Collects the parts of a micro-batch in the first pass."""
        self._has_run = True
        return self.loss.collect(outputs, shards)

    @contextlib.contextmanager
    def undone(self, batches: Sequence[Batch], before: Snapshot) -> Iterator[None]:
        """Surrounds the forwards of the first pass, without a graph. Random numbers and buffers are put back."""
        before.take()
        python, recorded = random.getstate(), [entry for batch in batches for entry in record_versions(batch)]
        with torch.no_grad():
            yield
            for _ in self._sync.forwards_without_rows(is_reduced=self._has_run):
                pass
        before.restore()
        if writes := explain_writes(recorded):
            raise RuntimeError(f"a loss whose rows depend on each other takes two forwards: {writes}")
        random.setstate(python)
        self._sync.begin()

    def at_once(self, outputs: PerReplica, shards: Sequence[Shard]) -> list[LossSum]:
        """Returns the losses of the only micro-batch of an update."""
        parts = self.loss.collect(outputs, shards)
        self.differentiate()
        return self.loss.hand_back_parts(parts)

    def differentiate(self) -> None:
        """Computes the derivatives of the loss of all ranks, after all of them have run their forwards."""
        self._agree("")
        # what follows the agreement of the ranks must not fail on one of them
        retrying = retrying_allocations(self._devices) if self._is_auto else contextlib.nullcontext()
        with retrying, self._precision.autocast(self._devices):
            self.loss.differentiate(self._precision.scaler_on(self._devices[0]))

    @contextlib.contextmanager
    def telling_ranks(self) -> Iterator[None]:
        """Tells the other ranks if this one runs out of memory in the block, before they differentiate."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self._is_auto and not self._has_agreed:
                self._sync.abandon()  # raises if the other ranks cannot be told
                with torch.set_grad_enabled(self._is_single):  # others may wait for this rank in their first forward
                    for _ in self._sync.forwards_without_rows(is_reduced=False):
                        pass
                self._agree(str(error))
            raise

    def _agree(self, failure: str) -> None:
        """Raises ``torch.OutOfMemoryError`` on all ranks if one has run out of memory, and would run its batches again."""
        self._has_agreed = True
        if self._is_auto and not self._sync.smallest(0 if failure else 1):
            raise torch.OutOfMemoryError(failure) if failure else ElsewhereOutOfMemory("another rank ran out of memory")
