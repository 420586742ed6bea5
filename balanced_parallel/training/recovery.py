"""Running out of memory: everything is put back, and the same effective batch runs again in smaller micro-batches.

    rank 0   forward | backward | out of memory      abandon | put back | forward | backward | ...
    rank 1   forward | backward | forward | backward  finish | put back | forward | backward | ...

All ranks learn of it in the all-reduce of their losses. Nothing is updated before.

State that a failed attempt changes, and that is put back: random numbers, buffers, and a first update.

Operators that are run again after an allocation of theirs has failed.
"""

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..batch import containers
from ..batch.rows import Rows, Whole, without_mark
from ..loss.criterion import DataParallelCriterion
from ..replicas.batchnorm import meets_other_ranks
from ..runtime import torch_private
from ..runtime.collectives import rank, world_size
from ..runtime.devices import accelerators
from ..runtime.random_numbers import RandomState
from ..runtime.torch_private import TorchDispatchMode, buffers_of, versions
from .accumulation import Batch, Model
from .cost_batches import Cuts
from .strategy import GradientSync

__all__: list[str] = []


T = TypeVar("T")
Run = Callable[[Batch], None]
_log = logging.getLogger(__name__)
_NO_LIMIT = 2**62


def nothing() -> None:
    """Does nothing."""


class ElsewhereOutOfMemory(torch.OutOfMemoryError):
    """Another rank is out of memory."""


class Attempts(Protocol):
    """Runs the parts of an update: batches, the reduction, the optimizers' step.

    Attributes:
        limit: rows per device at most in one forward, or their cost; None for the whole share.
        run_again: a batch may run several times.
    """

    limit: float | None
    run_again: bool

    def accumulate(self, run: Run, batch: Batch) -> None:
        """Calls ``run(batch)``."""

    def finish(self, run: Run, finish: Callable[[], T], before: Callable[[], None] = nothing) -> T:
        """Returns the result of ``finish()``, after the last batch and ``before()``."""

    def retrying(self) -> AbstractContextManager[Any]:
        """Surrounds the optimizers' step."""


class OneAttempt:
    """Runs everything once. An error is the caller's."""

    run_again = False

    def __init__(self, limit: float | None) -> None:
        self.limit = limit

    def accumulate(self, run: Run, batch: Batch) -> None:
        """Calls ``run(batch)``."""
        run(batch)

    def finish(self, run: Run, finish: Callable[[], T], before: Callable[[], None] = nothing) -> T:
        """Returns the result of ``finish()``."""
        before()
        return finish()

    def retrying(self) -> AbstractContextManager[Any]:
        """Does nothing."""
        return contextlib.nullcontext()


def recovering(
    model: Model,
    criterion: DataParallelCriterion,
    cuts: Cuts,
    sync: GradientSync,
    limit: float | Literal["auto"] | None,
) -> Attempts:
    """Returns the way to run updates, with recovery from running out of memory for ``"auto"``."""
    return Recovery(model, criterion, cuts, sync) if limit == "auto" else OneAttempt(limit)


class Recovery:
    """Runs an effective batch again in smaller micro-batches after ``torch.OutOfMemoryError``, on any replica or rank.

    Random numbers and buffers are those of before, so the result is that of smaller micro-batches from the start.

    Args:
        model, criterion: with the buffers and random numbers that are put back.
        cuts: of the batches.
        sync: of the gradients. Ranks agree through it.

    Raises:
        ValueError: layers of the model wait for other ranks in their forward.
    """

    run_again = True

    def __init__(self, model: Any, criterion: DataParallelCriterion, cuts: Cuts, sync: GradientSync) -> None:
        if world_size() > 1 and meets_other_ranks(model.modules()):
            raise ValueError(
                "micro_batch_size='auto' with batch norm over all ranks: after an out of memory in the forward of one rank, the "
                "others would wait for it; give micro_batch_size a number, as memory.fit finds it"
            )
        self.limit: float | None = None
        self._sync = sync
        self._cuts = cuts
        self._has_accelerators = any(device.type != "cpu" for device in model.devices)
        self._before = Snapshot([model, criterion], [*model.devices, *(criterion.devices or ())])
        self._has_begun = False
        self._batches: list[Batch] = []  # of the present update
        self._originals = Originals()
        self._tried: list[float] = []
        self._failed = self._is_mine = False
        self._reason = ""

    def accumulate(self, run: Run, batch: Batch) -> None:
        """Calls ``run(batch)``. After a failure, batches only wait for :meth:`finish`."""
        with self._forgetting_on_failure():
            self._begin()
            self._batches.append(batch)
            self._originals.add(batch)
            if not self._failed:
                self._is_mine = self._attempt(lambda: run(batch))

    def finish(self, run: Run, finish: Callable[[], T], before: Callable[[], None] = nothing) -> T:
        """Returns the result of ``finish()``, which raises on all ranks if memory was too small on one.

        Raises:
            torch.OutOfMemoryError: one row per device does not fit. Nothing has changed.
        """
        with self._forgetting_on_failure():
            self._begin()  # a rank without rows has not called accumulate
            results: list[T] = []
            while not results:
                if not self._failed:
                    self._is_mine = self._attempt(before)
                if not self._failed or self._sync.abandon():
                    with self.retrying():  # what follows the agreement of the ranks must not fail on one of them
                        self._attempt(lambda: results.append(finish()))
                if self._failed:
                    self._restart(run)
            self._report()
        self._forget()
        return results[0]

    def _begin(self) -> None:
        if not self._has_begun:
            self._sync.begin()
            with RetriedAllocations():
                self._before.take()
            self._has_begun = True

    def _attempt(self, work: Callable[[], None]) -> bool:
        """Calls ``work``, and keeps nothing of it if memory is too small. Returns True if that is this rank's own failure."""
        try:
            work()
        except torch.OutOfMemoryError as error:
            self._failed = True
            if isinstance(error, ElsewhereOutOfMemory):
                return False
            self._reason = self._reason or str(error)
            return True
        return False

    def _restart(self, run: Run) -> None:
        """Puts everything back, and runs all batches again in smaller micro-batches."""
        largest, half = max((self._cuts.largest(batch, self.limit) for batch in self._batches), default=(0, 0))
        writes = self._originals.explain_writes()
        smaller = self._sync.smallest(0 if writes else half if self._is_mine else _NO_LIMIT)
        if smaller == _NO_LIMIT:  # no forward or backward has failed, but the reduction behind them
            smaller = -self._sync.smallest(-half)  # of the largest, since others may have no rows
        self._before.restore()
        release_memory()
        if not smaller:
            if writes:
                raise torch.OutOfMemoryError(f"{writes}, or give a micro_batch_size that fits: {self._reason}")
            raise torch.OutOfMemoryError(
                f"one row per device does not fit: {self._reason}. memory.fit(step, inputs, targets) names the largest holders "
                "of memory, and the saving that helps most"
            )
        self._tried.append(largest)
        self.limit, self._failed, self._is_mine, self._reason = smaller, False, False, ""
        self._sync.begin()
        for batch in self._batches:
            if batch.outputs is not None:
                batch.outputs.clear()
            if not self._failed:
                self._is_mine = self._attempt(lambda batch=batch: run(batch))  # type: ignore[misc]

    def _report(self) -> None:
        if self._tried and rank() == 0:
            tried = ", then ".join(f"{limit:g}" for limit in self._tried)
            _log.warning(
                "out of memory with %s %s per device in one forward: from now on at most %s",
                tried,
                "rows" if self._cuts.unit == "rows" else "of cost",
                self.limit,
            )

    def _forget(self) -> None:
        self._has_begun, self._failed, self._is_mine = False, False, False
        self._batches, self._originals, self._tried, self._reason = [], Originals(), [], ""

    @contextlib.contextmanager
    def _forgetting_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._forget()
            raise

    def retrying(self) -> AbstractContextManager[Any]:
        """Runs an operator of the block once more if its allocation fails, after the cached memory was given back."""
        return RetriedAllocations() if self._has_accelerators else contextlib.nullcontext()

    def __getstate__(self) -> dict[str, Any]:
        fresh = {"_has_begun": False, "_batches": [], "_originals": Originals(), "_tried": [], "_failed": False}
        return {**self.__dict__, **fresh}  # a copy has no gradients


class Snapshot:
    """Copies of what the forwards of an update change: buffers, and the random numbers of the CPU and of the devices.

    Batch norm's statistics are buffers. The copies are made again in the same memory for each update.

    Args:
        modules: whose buffers are copied.
        devices: of the replicas.
    """

    def __init__(self, modules: Iterable[nn.Module], devices: Sequence[torch.device]) -> None:
        self._modules = list(modules)
        self._devices = list(devices)
        self._buffers: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []  # of each module, and a copy
        self._copies: list[Tensor] = []
        self._kinds: list[tuple[Any, ...]] = []
        self._random: RandomState | None = None

    def __reduce__(self) -> Any:  # a copy has nothing to put back
        return Snapshot, (self._modules, self._devices)

    def take(self) -> None:
        """Copies the present state."""
        self._random = RandomState(self._devices)
        parts = [buffers_of(part) for module in self._modules for part in module.modules()]
        self._buffers = [(part, part.copy()) for part in parts]
        buffers = self._tensors()
        kinds = [(buffer.shape, buffer.dtype, buffer.device) for buffer in buffers]
        with torch.no_grad():
            if kinds == self._kinds:
                torch_private.foreach_copy_(self._copies, buffers)
            else:
                self._kinds, self._copies = [], [buffer.clone() for buffer in buffers]  # a clone may run out of memory
                self._kinds = kinds

    def restore(self) -> None:
        """Puts the state back. Buffers that a forward has replaced are the former tensors again, those it has added are gone."""
        if self._random is not None:
            self._random.restore()
        for part, before in self._buffers:
            part.clear()
            part.update(before)
        with torch.no_grad():
            torch_private.foreach_copy_(self._tensors(), self._copies)

    def _tensors(self) -> list[Tensor]:
        return [buffer for _, before in self._buffers for buffer in before.values() if buffer is not None]


class Originals:
    """Version counters of the tensors of batches. A batch that was changed in place cannot run again."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []

    def add(self, batch: Batch) -> None:
        """Records a batch, before its first forward."""
        tensors = _tensors_in([batch.inputs, batch.targets])
        self._tensors += tensors
        self._versions += versions(tensors)

    def explain_writes(self) -> str:
        """Describes a tensor that was changed in place, and a way to avoid it. Returns an empty text if there is none."""
        for tensor, now, before in zip(self._tensors, versions(self._tensors), self._versions, strict=True):
            if now != before:
                return (
                    f"a tensor of the batch ({tensor.dtype}, shape {tuple(tensor.shape)}) was changed in place since it was "
                    "passed, but has to run again, expected the same values: change a copy (tensor.clone()) in the forward"
                )
        return ""


def _tensors_in(node: Any) -> list[Tensor]:
    """Returns all tensors in nested containers. Fast, since a batch may be a list of many samples."""
    pending, tensors = [node], []
    while pending:
        node = pending.pop()
        if isinstance(node, Tensor):
            tensors.append(node)
        elif isinstance(node, (list, tuple)):
            pending.extend(node)
        elif isinstance(node, (Whole, Rows)):
            pending.append(without_mark(node))
        elif not containers.is_plain(node) and (container := containers.open_container(node)) is not None:
            pending.extend(container.children)
    return tensors


class RetriedAllocations(TorchDispatchMode):
    """Runs an operator once more if it raises ``torch.OutOfMemoryError``, after the cached memory was given back.

    An optimizer's step that ends in the middle has changed some parameters and not others. So the operator that has failed is
    repeated, and the step goes on. An operator allocates its results before it writes to its arguments.
    """

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs one operator."""
        try:
            return function(*args, **(kwargs or {}))
        except torch.OutOfMemoryError:
            pass  # the traceback is released before memory is
        release_memory()
        return function(*args, **(kwargs or {}))


def release_memory() -> None:
    """Collects garbage and gives cached memory back to the devices.

    After an error, autograd's threads of the other devices still run their present operator, and then free what they hold.
    Nothing tells when, so the memory in use is read until it stays the same.
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
