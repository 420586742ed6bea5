"""An update of a loss whose rows depend on each other, in two passes over its micro-batches
(GradCache, arXiv:2101.06983)::

    forward 0 | forward 1 | loss of all | forward 0 | backward 0 | forward 1 | backward 1 | update
     without a graph                      same random numbers and buffers

Batches are kept until the update. An update of one micro-batch takes one pass.
"""

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch

from ..loss.copies import Calls
from ..loss.coupled import CoupledLoss
from ..loss.sums import LossSum
from ..runtime.collectives import ElsewhereFailure, tell_failure
from .recovery import retrying_allocations
from .settings import Settings
from .snapshot import explain_writes, record_versions
from .sync import gradient_sync
from .update import Accumulation, Attempt, BatchRun, Forwards, Reduced


class TwoPasses(Attempt):
    """Keeps the batches of an update, and runs them in two passes.

    Args:
        accumulation: runs the second pass.
        is_auto: an out of memory runs all batches again.
    """

    def __init__(self, accumulation: Accumulation, *, is_auto: bool) -> None:
        self.sync = accumulation.sync
        self._accumulation = accumulation
        self._forwards = accumulation.forwards
        self._is_auto = is_auto
        self._runs: list[BatchRun] = []
        self._loss: CoupledLoss | None = None
        self._has_begun = False  # The ranks have agreed on the number of passes.
        self._is_single = False  # All of them have one micro-batch, and run it once.
        self._has_run = False  # The forwards of the first pass are over.

    def add(self, run: BatchRun) -> None:
        """Keeps a batch."""
        self._runs.append(run)

    def run_kept(self) -> None:
        """Runs all batches, in one pass if every rank has a single micro-batch.

        All ranks call this.
        """
        kind = self._accumulation.kind
        home = self._forwards.model.devices[0]
        is_single = (
            self._accumulation.takes_one_pass
            and len(self._runs) == 1
            and self._runs[0].is_whole
            and len(self._accumulation.plan(self._runs[0])) == 1
        )
        self._loss = loss = kind.loss(
            self._forwards.copies,
            home,
            is_split=self._is_auto or self._forwards.may_split or not is_single,
        ).of_model(self._forwards.model)
        self._is_single = bool(self.sync.smallest(is_single))
        self._has_begun = True
        if self._is_single:
            self._accumulation.run(
                self._runs[0], self._accumulation.plan(self._runs[0]), self._losses_at_once
            )
            return
        if self._forwards.state is not None:
            self._forwards.state.open()
        with self._undone():
            for run in self._runs:
                for shards in self._accumulation.plan(run):
                    self._forwards.run(shards, loss.collect)
        self._differentiate(loss)
        for run in self._runs:
            learned = self._accumulation.kind.learned(self._forwards.copies, loss)
            self._accumulation.run_again(run, learned, loss.hand_back)

    def reduce(self, settings: Callable[[], Settings]) -> Reduced:
        """Reduces all gradients."""
        reduced = self._accumulation.finish(settings)
        return reduced._replace(
            kind=self._accumulation.kind.learned(self._forwards.copies, self._loss)
        )

    def _losses_at_once(self, calls: Calls) -> list[LossSum]:
        """Returns the losses of the only micro-batch of the update."""
        assert self._loss is not None
        parts = self._loss.collect(calls)
        self._differentiate(self._loss)
        return self._loss.hand_back_parts(parts)

    @contextlib.contextmanager
    def _undone(self) -> Iterator[None]:
        """Surrounds the forwards of the first pass, without a graph.

        Random numbers and buffers are put back.
        """
        before = self._forwards.snapshot()
        python, of_numpy = random.getstate(), np.random.get_state()
        recorded = [entry for run in self._runs for entry in record_versions(run.batch)]
        try:
            with torch.no_grad():
                yield
                for _ in self.sync.forwards_without_rows(is_reduced=False):
                    pass
        except RuntimeError as error:
            if "does not require grad" in str(error):
                error.add_note(
                    "the loss takes two forwards, and the first has no graph: put torch.autograd.grad and what it differentiates "
                    "into a block of torch.enable_grad()"
                )
            raise
        finally:
            before.restore()
        if writes := explain_writes(recorded):
            raise RuntimeError(
                f"a loss whose rows depend on each other takes two forwards: {writes}"
            )
        random.setstate(python)
        np.random.set_state(of_numpy)

    def _differentiate(self, loss: CoupledLoss) -> None:
        """Computes the derivatives of the loss of all ranks, after all of them have run their
        forwards.
        """
        self._has_run = True
        devices = self._forwards.model.devices
        precision = self._forwards.precision
        # The others cannot be told of a failure here, until they have all parts.
        with retrying_allocations(devices if self._is_auto else ()), precision.autocast(devices):
            loss.differentiate(precision.scaler)

    def discard(self, error: BaseException) -> bool:
        """Drops the gradients of this rank. Others wait for its part of the loss, if it has none."""
        is_shared = self._loss is not None and self._loss.is_shared
        if is_shared or isinstance(error, ElsewhereFailure):
            return self.sync.discard(error)
        if self._has_run or (self._forwards.copies.collectives.asks and not self._runs):
            tell_failure(error)
        else:
            self.sync.tell(error, has_begun=self._has_begun, is_single=self._is_single)
        return self.sync.discard(ElsewhereFailure())


def begin_update(forwards: Forwards, last: Reduced | None = None) -> Attempt:
    """Begins an update of a step of your own.

    Returns an :class:`Accumulation`, or a :class:`TwoPasses` around it for a loss that needs all
    rows before the first backward. Clear the gradients before. Unlike those of :class:`TrainStep`,
    hooks of parameters get the gradients of one micro-batch, and ranks do not compare settings.

    Args:
        forwards: those of the step.
        last: the result of the update before. A loss may need one pass then, where the first
            update has taken two.

    Raises:
        TypeError: the model is another one than those of :class:`Forwards`.

    Example:
        >>> net = torch.nn.Linear(4, 1)
        >>> model = DataParallelModel(net, ["cpu"] * 2)
        >>> forwards = Forwards(model, DataParallelCriterion(torch.nn.MSELoss()), limit=2)
        >>> work = begin_update(forwards)
        >>> with forwards.updating(work):
        ...     work.add(forwards.batch(torch.ones(7, 4), torch.ones(7, 1)))
        ...     reduced = work.finish()
        ...     reduced.scale(net.parameters())
        >>> reduced.weight, net.weight.grad.shape
        (7.0, torch.Size([1, 4]))
    """
    model, criterion = forwards.model, forwards.criterion
    kind = criterion.follow_reduction()
    if last is not None and last.kind.reduction == kind.reduction:
        kind = last.kind
    sync = gradient_sync(model, criterion).open()
    accumulation = Accumulation(forwards, sync, kind, last.weight if last else 0.0)
    return accumulation if kind.passes == 1 else TwoPasses(accumulation, is_auto=False)
