"""Two passes over the micro-batches of an update, for losses whose rows depend on each other (GradCache, arXiv:2101.06983).

    forward 0 | forward 1 | loss of all | forward 0 | backward 0 | forward 1 | backward 1 | update
     without a graph                      same random numbers and buffers

Batches are kept until the update, since their rows are needed twice. An update of one micro-batch takes one pass.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from ..loss.coupled import CoupledLoss, couple
from ..loss.criterion import BatchLosses, DataParallelCriterion
from ..loss.sums import LossSum
from ..runtime.values import Precision
from .accumulation import Batch, MicroBatch, Window, run_forward
from .cost_batches import Cuts
from .recovery import Attempts, ElsewhereOutOfMemory, Originals, Run, Snapshot, nothing
from .strategy import GradientSync

__all__: list[str] = []


T = TypeVar("T")


class TwoPasses:
    """Runs updates of a loss whose rows depend on each other.

    Args:
        model, criterion: with the buffers and random numbers of the first pass, which are put back.
        precision: of the forwards.
        cuts: of the batches.
        sync: of the gradients.
        window: keeps the batches until the update.
        adding: surrounds the first pass as it surrounds a batch; see :meth:`Window.adding`.
        attempts: runs the update.
    """

    def __init__(
        self,
        model: Any,
        criterion: DataParallelCriterion,
        precision: Precision,
        cuts: Cuts,
        sync: GradientSync,
        window: Window,
        adding: Callable[[], AbstractContextManager[Any]],
        attempts: Attempts,
    ) -> None:
        self._model, self._criterion, self._precision, self._cuts = model, criterion, precision, cuts
        self._sync, self._window, self._adding, self._attempts = sync, window, adding, attempts
        self._before = Snapshot([model, criterion], [*model.devices, *(criterion.devices or ())])
        self.run_again = attempts.run_again
        self._has_agreed = False  # with the other ranks, on going on

    @property
    def limit(self) -> float | None:
        """Rows per device at most in one forward, or their cost."""
        return self._attempts.limit

    @limit.setter
    def limit(self, limit: float | None) -> None:
        self._attempts.limit = limit

    def accumulate(self, run: Run, batch: Batch) -> None:
        """Keeps the batch until the update."""
        self._attempts.accumulate(self._keep, batch)

    def finish(self, run: Run, finish: Callable[[], T], before: Callable[[], None] = nothing) -> T:
        """Runs all batches, and returns the result of ``finish()``."""
        return self._attempts.finish(self._keep, finish, functools.partial(self._run, run))

    def retrying(self) -> AbstractContextManager[Any]:
        """Surrounds the optimizers' step."""
        return self._attempts.retrying()

    def _keep(self, batch: Batch) -> None:
        self._window.waiting.append(batch)

    def _run(self, run: Run) -> None:
        batches, self._window.waiting = self._window.waiting, []
        loss = couple(self._criterion, self._model.devices[0])
        with self._agreeing():
            if self._needs_one_pass(batches):
                run(batches.pop()._replace(losses=BatchLosses(functools.partial(self._at_once, loss))))
                return
            with self._adding():
                self._first_pass(batches, loss)
        while batches:
            run(batches.pop(0)._replace(losses=BatchLosses(loss.hand_back)))  # its rows can be freed then

    def _needs_one_pass(self, batches: list[Batch]) -> bool:
        """Returns True if every rank has one batch of one micro-batch."""
        count = len(self._cut(batches[0])) if len(batches) == 1 and batches[0].is_whole else 0
        return self._sync.smallest(int(count == 1)) == 1

    def _at_once(self, loss: CoupledLoss, outputs: Any, *targets: Any) -> list[LossSum]:
        parts = loss.collect_parts(outputs, *targets)
        self._differentiate(loss)
        return loss.hand_back_parts(parts)

    def _first_pass(self, batches: list[Batch], loss: CoupledLoss) -> None:
        """Runs all forwards without a graph, puts random numbers and buffers back, and computes the derivatives."""
        self._before.take()
        originals = Originals()
        for batch in batches:
            originals.add(batch)
        python, has_run = random.getstate(), False
        with torch.no_grad():
            for batch in batches:
                for micro_batch in self._cut(batch):
                    run_forward(self._model, self._precision, micro_batch, BatchLosses(loss.collect), None)
                    has_run = True
            for _ in self._sync.forwards_without_rows(is_reduced=has_run):
                pass
        self._before.restore()
        if writes := originals.explain_writes():
            raise RuntimeError(f"a loss whose rows depend on each other takes two forwards: {writes}")
        random.setstate(python)
        self._sync.begin()
        with self._precision.autocast(self._model.devices):
            self._differentiate(loss)

    def _differentiate(self, loss: CoupledLoss) -> None:
        """Computes the derivatives of the loss of all ranks, after all of them have run their forwards."""
        self._agree("")
        # what follows the agreement of the ranks must not fail on one of them
        with self.retrying():
            loss.differentiate(self._precision.scaler_on(self._model.devices[0]))

    @contextlib.contextmanager
    def _agreeing(self) -> Iterator[None]:
        """Tells the other ranks if this one runs out of memory in the block, before :meth:`_differentiate`."""
        self._has_agreed = False
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self.run_again and not self._has_agreed:
                self._sync.abandon()  # raises if the other ranks cannot be told
                self._agree(str(error))
            raise

    def _agree(self, failure: str) -> None:
        """Raises ``torch.OutOfMemoryError`` on all ranks if one has run out of memory, and would run its batches again."""
        self._has_agreed = True
        if self.run_again and not self._sync.smallest(0 if failure else 1):
            raise torch.OutOfMemoryError(failure) if failure else ElsewhereOutOfMemory("another rank ran out of memory")

    def _cut(self, batch: Batch) -> list[MicroBatch]:
        return self._cuts.cut(batch, self.limit).micro_batches
