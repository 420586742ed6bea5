"""Two passes over the micro-batches of an update, for losses whose rows depend on each other (GradCache, arXiv:2101.06983).

    forward 0 | forward 1 | loss of all | forward 0 | backward 0 | forward 1 | backward 1 | update
     without a graph                      same random numbers and buffers

Batches are kept until the update, since their rows are needed twice. An update of one micro-batch takes one pass.
"""

import functools
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from ..loss.batch_losses import BatchLosses
from ..loss.coupled import CoupledLoss
from ..loss.coupling import couple
from .gradient_sync import GradientSync
from .micro_batches import Batch, MicroBatch, cut_micro_batches, run_forward
from .recovery import Attempts, Run, recovering
from .rollback import Snapshot
from .update import Update

if TYPE_CHECKING:
    from .step import TrainStep

__all__: list[str] = []

T = TypeVar("T")


def make_attempts(step: "TrainStep", sync: GradientSync, micro_batch_size: int | Literal["auto"] | None) -> Attempts:
    """Returns the way to run updates: in two passes if the rows of the loss depend on each other."""
    attempts = recovering(step, sync, micro_batch_size)
    return TwoPasses(step, sync, attempts) if step.criterion.is_coupled else attempts


class TwoPasses:
    """Runs updates of a loss whose rows depend on each other.

    Args:
        step: its model, criterion and window are used.
        sync: of its gradients.
        attempts: runs the update.
    """

    def __init__(self, step: "TrainStep", sync: GradientSync, attempts: Attempts) -> None:
        model: Any = step.model
        self._step, self._sync, self._attempts = step, sync, attempts
        self._before = Snapshot([model, step.criterion], [*model.devices, *(step.criterion.devices or ())])
        self._batches: list[Batch] = []
        self.run_again = attempts.run_again

    @property
    def micro_batch_size(self) -> int | None:
        """Rows per device at most in one forward."""
        return self._attempts.micro_batch_size

    @micro_batch_size.setter
    def micro_batch_size(self, rows: int | None) -> None:
        self._attempts.micro_batch_size = rows

    def accumulate(self, run: Run, batch: Batch) -> None:
        """Keeps the batch until the update."""
        self._attempts.accumulate(self._keep, batch)

    def finish(self, run: Run, finish: Callable[[], T]) -> T:
        """Runs all batches, and returns the result of ``finish()``."""
        return self._attempts.finish(self._keep, functools.partial(self._run, run, finish))

    def updating(self, update: Update) -> AbstractContextManager[None]:
        """Surrounds an update."""
        return self._attempts.updating(update)

    def _keep(self, batch: Batch) -> None:
        with self._step._adding():
            self._batches.append(batch)

    def _run(self, run: Run, finish: Callable[[], T]) -> T:
        batches, self._batches = self._batches, []
        loss = couple(self._step.criterion, self._step.model.devices[0])
        with self._sync.repeating():
            with self._step._adding():
                scaler = self._step.precision.scaler_on(self._step.model.devices[0])
                if self._needs_one_pass(batches):
                    losses = BatchLosses(functools.partial(loss.at_once, scaler))
                else:
                    self._first_pass(batches, loss)
                    self._differentiate(loss, scaler)
                    losses = BatchLosses(loss.hand_back)
            while batches:
                run(batches.pop(0)._replace(losses=losses))  # its rows can be freed then
            return finish()

    def _needs_one_pass(self, batches: list[Batch]) -> bool:
        """Returns True if every rank has one batch of one micro-batch."""
        count = len(self._cut(batches[0])) if len(batches) == 1 and batches[0].is_whole else 0
        return self._sync.smallest(int(count == 1)) == 1

    def _first_pass(self, batches: list[Batch], loss: CoupledLoss) -> None:
        """Runs all forwards without a graph, and puts random numbers and buffers back."""
        step, failure = self._step, ""
        self._before.take()
        python = random.getstate()
        has_run = False
        try:
            with torch.no_grad():
                for batch in batches:
                    for micro_batch in self._cut(batch):
                        run_forward(step.model, step.precision, micro_batch, BatchLosses(loss.collect), None)
                        has_run = True
                for _ in self._sync.forwards_without_rows(is_reduced=has_run):
                    pass
        except torch.OutOfMemoryError as error:
            if not self.run_again:
                raise
            self._sync.abandon()  # raises if the other ranks cannot be told
            failure = str(error)
        if self.run_again and not self._sync.smallest(0 if failure else 1):
            raise torch.OutOfMemoryError(failure or "another rank ran out of memory")
        self._before.restore()
        random.setstate(python)
        self._sync.begin()

    def _differentiate(self, loss: CoupledLoss, scaler: torch.amp.GradScaler | None) -> None:
        try:
            with self._step.precision.autocast(self._step.model.devices):
                loss.differentiate(scaler)
        except torch.OutOfMemoryError as error:
            kind = RuntimeError if self.run_again else torch.OutOfMemoryError  # which would run the batch again, in vain
            raise kind(
                f"the loss of all rows does not fit, which smaller micro-batches do not change: give the criterion another "
                f"output_device, or smaller batches. {error}"
            ) from error

    def _cut(self, batch: Batch) -> list[MicroBatch]:
        step = self._step
        return cut_micro_batches(step.model, step.criterion, self._sync, batch, self.micro_batch_size)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batches": []}  # a copy has no gradients
