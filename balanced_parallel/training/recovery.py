"""Recovery from an out of memory: the same effective batch runs again in smaller micro-batches::

    rank 0   forward | backward | out of memory      discard | put back | forward | backward | ...
    rank 1   forward | backward | forward | backward  finish | put back | forward | backward | ...

All ranks learn of it in the all-reduce of their losses. Nothing is updated before.
"""

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..runtime.collectives import ElsewhereOutOfMemory, rank
from ..runtime.devices import accelerators
from ..runtime.torch_private import TorchDispatchMode
from .settings import Settings
from .snapshot import explain_writes, record_versions
from .sync import GradientSync, UpdateSync
from .update import Attempt, BatchRun, Forwards, Limit, Reduced

_log = logging.getLogger(__name__)
_NO_LIMIT = 2**62
T = TypeVar("T")


class Recovery:
    """Runs the batches of an update, and after an out of memory runs all of them again in smaller
    micro-batches.

    Args:
        attempt: returns an attempt with a synchronisation.
        limit: of micro-batches, which is lowered.
    """

    def __init__(
        self,
        attempt: Callable[[UpdateSync], Attempt],
        strategy: GradientSync,
        forwards: Forwards,
        limit: Limit,
    ) -> None:
        self._attempt = attempt
        self._strategy = strategy
        self._limit = limit
        self._devices = forwards.model.devices
        self._shares: int | Sequence[float] = forwards.model.split or len(self._devices)
        self._runs: list[BatchRun] = []
        # tensors of the batches, and their version counters
        self._recorded: list[tuple[Tensor, int]] = []
        self._tried: list[float] = []  # limits that were too large
        self._reason = ""  # why memory was too small in this attempt
        self._is_local = False  # True for a forward or a backward of this rank.
        with RetriedAllocations():
            self._before = forwards.snapshot()
        self._sync = strategy.open()
        self._work: Attempt | None = None  # opened where an out of memory is kept

    def add(self, run: BatchRun) -> None:
        """Runs a batch, unless memory was too small before."""
        self._recorded += record_versions(run.batch)
        self._runs.append(run)
        self._add(run)

    def finish(self, settings: Callable[[], Settings]) -> Reduced:
        """Reduces all gradients. If memory was too small on any rank, all batches run again before."""
        while True:
            self._try(lambda attempt: attempt.run_kept())
            # None of the ranks must fail after their agreement.
            with retrying_allocations(self._devices):
                reduced = self._try(lambda attempt: attempt.reduce(settings), is_local=False)
            if reduced is not None:
                break
            self._restart()
        if self._tried and rank() == 0:
            tried = ", then ".join(f"{size:g}" for size in self._tried)
            kind = "rows" if self._limit.unit == "rows" else "of cost"
            _log.warning(
                "out of memory with %s %s per device in one forward: from now on at most %s",
                tried,
                kind,
                self._limit.value,
            )
        return reduced

    def discard(self, error: BaseException) -> bool:
        """Drops all gradients."""
        return (self._work or self._sync).discard(error)

    def _add(self, run: BatchRun) -> None:
        self._try(lambda attempt: attempt.add(run))

    def _try(self, work: Callable[[Attempt], T], *, is_local: bool = True) -> T | None:
        """Returns the result of a part of the attempt, or None if memory was too small before.

        The reason of an out of memory is kept for :meth:`finish`, without its traceback, which
        holds memory. All gradients are dropped, and the other ranks are told. It is raised if they
        have agreed to update.
        """
        if self._reason:
            return None
        try:
            self._work = self._work or self._attempt(self._sync)
            return work(self._work)
        except torch.OutOfMemoryError as error:
            self._is_local = is_local and not isinstance(error, ElsewhereOutOfMemory)
            self._reason = str(error) or type(error).__name__
            has_agreed = self.discard(error)
            self._work = None
            if has_agreed:
                raise
            return None

    def _restart(self) -> None:
        """Puts everything back, and runs all batches with a smaller limit, the same on all ranks."""
        sync = self._strategy.open()
        # The largest micro-batch of each batch per device, and the limit that halves it, 0 if
        # nothing does.
        largest = [run.batch.largest(self._shares, self._limit.value) for run in self._runs]
        size, half = max(largest, default=(0, 0))
        writes = explain_writes([*self._recorded, *self._before.uncopied])
        smaller = sync.smallest(0 if writes else half if self._is_local else _NO_LIMIT)
        if smaller == _NO_LIMIT:  # no forward or backward has failed, but the reduction behind them
            smaller = -sync.smallest(-half)  # The largest counts, since others may have no rows.
        self._before.restore()
        release_memory()
        if not smaller:
            from ..savings.saving import advice

            raise torch.OutOfMemoryError(
                f"{writes}, or give a micro_batch_size that fits: {self._reason}"
                if writes
                else f"one row per device does not fit: {self._reason.rstrip('.')}; memory.fit(step, inputs, targets) tells "
                f"which of these helps most: {advice()}"
            )
        self._tried.append(size)
        self._limit.set(self._limit.unit, smaller)
        self._is_local = False
        self._reason = ""
        self._sync = sync
        self._work = None
        for run in self._runs:
            if run.outputs is not None:
                run.outputs.clear()
            self._add(run)


class RetriedAllocations(TorchDispatchMode):
    """Runs an operator once more if it raises ``torch.OutOfMemoryError``, after the cached memory
    was given back.

    An optimizer's step cannot be undone in the middle. An operator can run again: it allocates
    before it writes.
    """

    def __torch_dispatch__(
        self, function: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # The traceback is released before memory is.
        with contextlib.suppress(torch.OutOfMemoryError):
            return function(*args, **kwargs)
        release_memory()
        return function(*args, **kwargs)


def retrying_allocations(devices: Sequence[torch.device]) -> AbstractContextManager[object]:
    """Returns a :class:`RetriedAllocations` for accelerators, which have a cache."""
    return (
        RetriedAllocations()
        if {device.type for device in devices} - {"cpu"}
        else contextlib.nullcontext()
    )


def release_memory() -> None:
    """Collects garbage and gives cached memory back to the devices.

    After an error, autograd's threads of the other devices end their operator, and free what they
    hold. Nothing tells when, so the memory in use is read until it stays the same.
    """
    gc.collect()
    if not torch.accelerator.is_available():
        return
    devices = accelerators()
    before = None
    for _ in range(200):
        now = [torch.accelerator.memory_allocated(device) for device in devices]
        if now == before:
            break
        before = now
        time.sleep(0.01)
    for device in devices:
        # blocks that another stream still uses are freed then
        torch.accelerator.synchronize(device)
    torch.accelerator.empty_cache()
