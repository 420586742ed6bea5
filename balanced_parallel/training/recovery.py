"""Forwards that run again: after an out of memory, and for losses whose rows depend on each other.

After an out of memory, everything is put back, and the same effective batch runs again in smaller micro-batches.

    rank 0   forward | backward | out of memory      abandon | put back | forward | backward | ...
    rank 1   forward | backward | forward | backward  finish | put back | forward | backward | ...

All ranks learn of it in the all-reduce of their losses. Nothing is updated before. :class:`TrainStep` has the loop. What a failed
attempt changes is here: random numbers, buffers, and batches that a model changes in place, which cannot run again.

A loss whose rows depend on each other takes two passes over the micro-batches of an update (GradCache, arXiv:2101.06983)::

    forward 0 | forward 1 | loss of all | forward 0 | backward 0 | forward 1 | backward 1 | update
     without a graph                      same random numbers and buffers

Batches are kept until the update. An update of one micro-batch takes one pass.
"""

import contextlib
import gc
import logging
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..batch.containers import leaves
from ..batch.outputs import PerReplica
from ..batch.rows import Batch, ParallelModel, Shard, move_leaves
from ..loss.coupled import CoupledLoss
from ..loss.criterion import DataParallelCriterion
from ..loss.sums import LossSum
from ..replicas.batchnorm import meets_other_ranks
from ..runtime import torch_private
from ..runtime.collectives import rank, world_size
from ..runtime.devices import accelerators
from ..runtime.random_numbers import RandomState
from ..runtime.torch_private import TorchDispatchMode, buffers_of, parameters_of, versions
from ..runtime.values import Precision
from ..savings.saving import advice
from .accumulation import UpdateSync

_log = logging.getLogger(__name__)
_NO_LIMIT = 2**62


class ElsewhereOutOfMemory(torch.OutOfMemoryError):
    """Another rank is out of memory."""


class Recovery:
    """Failures of an update for lack of memory, and the state from before, for running it again in smaller micro-batches.

    ``has_failed`` tells that memory was too small since the last :meth:`restart`.
    """

    def __init__(self, model: ParallelModel, criterion: DataParallelCriterion) -> None:
        if world_size() > 1 and meets_other_ranks(model.modules()):
            raise ValueError(
                "micro_batch_size='auto' with batch norm over all ranks: after an out of memory in the forward of one rank, the "
                "others would wait for it; give micro_batch_size a number, as memory.fit finds it"
            )
        self._before = Snapshot([model, criterion], [*model.devices, *(criterion.devices or ())])
        self.forget()

    def forget(self) -> None:
        """Forgets the update."""
        self._has_begun = self.has_failed = self._is_local = False
        self._recorded, self._tried, self._reason = list[tuple[Tensor, int]](), list[float](), ""

    def begin(self, batch: Batch | None = None) -> None:
        """Copies what an update changes, before its first forward, and records a batch of it."""
        if not self._has_begun:
            with RetriedAllocations():
                self._before.take()
            self._has_begun = True
        if batch is not None:
            self._recorded += record_versions(batch)

    def keep(self, error: torch.OutOfMemoryError, *, is_local: bool) -> None:
        """Records an out of memory, without its traceback, which holds memory. ``is_local`` is False if all ranks raise it."""
        self.has_failed = True
        is_elsewhere = isinstance(error, ElsewhereOutOfMemory)
        self._is_local = not is_elsewhere if is_local else self._is_local
        self._reason = self._reason or str(error)

    def restart(self, largest: Sequence[tuple[float, float]], sync: UpdateSync) -> float:
        """Puts everything back. Returns a smaller limit, the same on all ranks.

        ``largest`` are the largest micro-batch of each batch per device, and the limit that halves it, 0 if nothing does.
        """
        size, half = max(largest, default=(0, 0))
        writes = explain_writes([*self._recorded, *self._before.uncopied])
        smaller = sync.smallest(0 if writes else half if self._is_local else _NO_LIMIT)
        if smaller == _NO_LIMIT:  # no forward or backward has failed, but the reduction behind them
            smaller = -sync.smallest(-half)  # of the largest, since others may have no rows
        self._before.restore()
        release_memory()
        if not smaller:
            if writes:
                raise torch.OutOfMemoryError(f"{writes}, or give a micro_batch_size that fits: {self._reason}")
            raise torch.OutOfMemoryError(
                f"one row per device does not fit: {self._reason}. memory.fit(step, inputs, targets) names the largest holders "
                f"of memory, and the saving that helps most of these: {advice()}"
            )
        self._tried.append(size)
        self.has_failed, self._is_local, self._reason = False, False, ""
        return smaller

    def end(self, unit: str, limit: float | None) -> None:
        """Ends the update, and logs the limits that were too large."""
        if self._tried and rank() == 0:
            tried = ", then ".join(f"{size:g}" for size in self._tried)
            kind = "rows" if unit == "rows" else "of cost"
            _log.warning("out of memory with %s %s per device in one forward: from now on at most %s", tried, kind, limit)
        self._before.learn()
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_has_begun": False, "has_failed": False, "_recorded": [], "_tried": []}


class Snapshot:
    """Copies of what the forwards of an update change, in the same memory each time: buffers of modules, and random numbers.

    Copies of all parameters would take too much memory. ``uncopied`` are those without a copy, with their version counters:
    all, but for those that the forwards of an update have written before, such as those of a momentum encoder.
    """

    def __init__(self, modules: Iterable[Any], devices: Sequence[torch.device]) -> None:
        self._modules, self._devices = list(modules), list(devices)
        self._buffers: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []  # of each module, and a copy
        self._copies: list[Tensor] = []
        self._kinds: list[tuple[Any, ...]] = []
        self._random: RandomState | None = None
        self._written: dict[int, Tensor] = {}  # parameters, by id
        self.uncopied: list[tuple[Tensor, int]] = []

    def __reduce__(self) -> Any:  # a copy has nothing to put back
        return Snapshot, (self._modules, self._devices)

    def take(self) -> None:
        """Copies the present state."""
        self._random = RandomState(self._devices)
        parts = [part for module in self._modules for part in module.modules()]
        self._buffers = [(buffers_of(part), buffers_of(part).copy()) for part in parts]
        stable = [parameters_of(part) for part in parts if not getattr(part, "max_norm", None)]  # rescaling twice changes nothing
        parameters = [each for part in stable for each in part.values() if each is not None and id(each) not in self._written]
        self.uncopied = list(zip(parameters, versions(parameters), strict=True))
        buffers = self._tensors()
        kinds = [(buffer.shape, buffer.dtype, buffer.device) for buffer in buffers]
        with torch.no_grad():
            if kinds == self._kinds:
                torch_private.foreach_copy_(self._copies, buffers)
            else:
                self._kinds, self._copies = [], [buffer.clone() for buffer in buffers]  # a clone may run out of memory
                self._kinds = kinds

    def restore(self) -> None:
        """Puts the state back. Buffers that a forward has replaced are the former tensors again, those it has added are gone.

        Raises ``RuntimeError`` if a parameter was written of which there is no copy.
        """
        if self._random is not None:
            self._random.restore()
        for part, before in self._buffers:
            part.clear()
            part.update(before)
        with torch.no_grad():
            torch_private.foreach_copy_(self._tensors(), self._copies)
        if writes := explain_writes(self.uncopied):
            raise RuntimeError(writes)

    def learn(self) -> None:
        """Notes the parameters that were written since :meth:`take`, which copies them from now on."""
        now = versions([parameter for parameter, _ in self.uncopied])
        self._written |= {id(each): each for (each, before), after in zip(self.uncopied, now, strict=True) if before != after}

    def _tensors(self) -> list[Tensor]:
        buffers = [buffer for _, before in self._buffers for buffer in before.values() if buffer is not None]
        return [*buffers, *self._written.values()]


def record_versions(batch: Batch) -> list[tuple[Tensor, int]]:
    """Returns the tensors of a batch with their version counters, before its first forward."""
    unmarked = leaves(move_leaves([batch.inputs, batch.targets], None))
    tensors = [leaf for _, leaf in unmarked if isinstance(leaf, Tensor)]
    return list(zip(tensors, versions(tensors), strict=True))


def explain_writes(recorded: Sequence[tuple[Tensor, int]]) -> str:
    """Describes a tensor that was changed in place, so that forwards cannot run again. Returns an empty text if there is none."""
    for tensor, before in recorded:
        if versions([tensor]) != [before]:
            kind = f"({tensor.dtype}, shape {tuple(tensor.shape)}) was changed in place"
            if isinstance(tensor, nn.Parameter):
                return f"a parameter {kind} by a forward that has to run again, expected a change outside of forward"
            return (
                f"a tensor of the batch {kind} since it was passed, but has to run again, expected the same values: change a "
                "copy (tensor.clone()) in the forward"
            )
    return ""


class RetriedAllocations(TorchDispatchMode):
    """Runs an operator once more if it raises ``torch.OutOfMemoryError``, after the cached memory was given back.

    An optimizer's step cannot be undone in the middle. An operator can run again: it allocates before it writes.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return function(*args, **(kwargs or {}))
        except torch.OutOfMemoryError:
            pass  # the traceback is released before memory is
        release_memory()
        return function(*args, **(kwargs or {}))


def retrying_allocations(devices: Sequence[torch.device]) -> AbstractContextManager[Any]:
    """Returns a :class:`RetriedAllocations` for accelerators, which have a cache."""
    return RetriedAllocations() if {device.type for device in devices} - {"cpu"} else contextlib.nullcontext()


def release_memory() -> None:
    """Collects garbage and gives cached memory back to the devices.

    After an error, autograd's threads of the other devices end their operator, and free what they hold. Nothing tells when, so
    the memory in use is read until it stays the same.
    """
    gc.collect()
    if not torch.accelerator.is_available():
        return
    devices, before = accelerators(), None
    for _ in range(200):
        now = [torch.accelerator.memory_allocated(device) for device in devices]
        if now == before:
            break
        before = now
        time.sleep(0.01)
    for device in devices:
        torch.accelerator.synchronize(device)  # blocks that another stream still uses are freed then
    torch.accelerator.empty_cache()


class TwoPasses:
    """The first pass of one update, and the agreement of the ranks behind it. ``is_auto`` runs batches again."""

    def __init__(
        self, loss: CoupledLoss, sync: UpdateSync, precision: Precision, devices: Sequence[torch.device], *, is_auto: bool
    ) -> None:
        self.loss, self._sync, self._precision, self._devices, self._is_auto = loss, sync, precision, devices, is_auto
        self._is_single = False  # there is one pass
        self._has_agreed = False  # with the other ranks, on going on

    def takes_one(self, is_single: bool) -> bool:
        """Returns True if every rank has a single micro-batch, so that one pass is enough. All ranks call this."""
        self._is_single = bool(self._sync.smallest(is_single))
        return self._is_single

    @contextlib.contextmanager
    def undone(self, batches: Sequence[Batch], before: Snapshot) -> Iterator[None]:
        """Surrounds the forwards of the first pass, without a graph. Random numbers and buffers are put back."""
        before.take()
        python, recorded = random.getstate(), [entry for batch in batches for entry in record_versions(batch)]
        with torch.no_grad():
            yield
            for _ in self._sync.forwards_without_rows(is_reduced=False):
                pass
        before.restore()
        if writes := explain_writes(recorded):
            raise RuntimeError(f"a loss whose rows depend on each other takes two forwards: {writes}")
        random.setstate(python)
        self._sync.forget_forwards()

    def at_once(self, outputs: PerReplica, shards: Sequence[Shard]) -> list[LossSum]:
        """Returns the losses of the only micro-batch of an update."""
        parts = self.loss.collect(outputs, shards)
        self.differentiate()
        return self.loss.hand_back_parts(parts)

    def differentiate(self) -> None:
        """Computes the derivatives of the loss of all ranks, after all of them have run their forwards."""
        self._agree("")
        # what follows the agreement of the ranks must not fail on one of them
        with retrying_allocations(self._devices if self._is_auto else ()), self._precision.autocast(self._devices):
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
