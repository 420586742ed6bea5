"""One update in progress: its batches in micro-batches, and the sums of their losses and gradients.

Gradients are those of a sum of losses. They are divided by a prediction of the total weight, the
divisor, as they are made. It is chosen once, before the first backward of an update, and is the
same on all ranks. The rest is one factor before the update. With float16 the divisor is a power of
two, so that a division rounds nothing, and gradients are near their final size.

A weight on a device starts its way to the host before the backward of its micro-batch, and is read
after the last one. So the host waits for no backward.

What is special about an update surrounds its :class:`Accumulation`, as :class:`Work` that does some
of it in another way::

    NumberedRows         gives the shards of each batch random numbers that follow their rows
      Recovery           runs all batches again in smaller micro-batches, after an out of memory
        TwoPasses        keeps all batches, for a loss whose rows depend on each other
          Accumulation   runs each batch; an ExactAccumulation, groups of rows that any layout has
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..batch.containers import describe
from ..batch.marks import Arguments
from ..batch.outputs import PerReplica, detach_outputs
from ..batch.rows import (
    Batch,
    Cut,
    MicroBatch,
    ParallelModel,
    Shard,
    as_arguments,
    copy_views,
    spread,
)
from ..loss.copies import Calls
from ..loss.criterion import DataParallelCriterion
from ..loss.entries import LoggedMeans
from ..loss.kinds import Kind
from ..loss.names import SumName, compare_names
from ..loss.sums import LossSum, Weight, add_up
from ..replicas.replicas import window
from ..runtime.collectives import ElsewhereFailure, tell_failure, telling, world_size
from ..runtime.devices import NO_BLOCK, move, start_copy
from ..runtime.torch_private import is_compiled, is_profiled, profiled
from ..runtime.values import Precision, PrecisionName, forget_gradients, scaled
from .forward_state import ForwardState
from .optimizers import ParameterUpdate
from .settings import Settings, Unchecked
from .snapshot import Snapshot
from .sync import GradientSync, UpdateSync

Compute = Callable[[Calls], list[LossSum]]


class BatchRun(NamedTuple):
    """A batch that the caller passes, and how it runs. :meth:`Forwards.batch` makes it."""

    batch: Batch
    is_whole: bool  # an effective batch: its last backward reduces all gradients
    outputs: list[PerReplica] | None = None  # receives the detached outputs of its micro-batches
    surround: Callable[[Shard], Shard] | None = None  # gives shards a context


class Reduced(NamedTuple):
    """An update whose gradients are reduced: the result of :meth:`Accumulation.finish`.

    The gradients have another divisor, until :meth:`scale` is called. The next update needs the
    kind of the loss and the weight, so give it to :func:`begin_update`.
    """

    loss: Tensor  # over everything
    weight: float  # The weight of everything; 0 if nothing was counted.
    factor: Weight  # makes the gradients those of the loss
    sync: UpdateSync  # This synchronisation has reduced them.
    kind: Kind  # The next update has a loss of this kind.
    logged: Sequence[LoggedMeans]  # The values beside the loss, of each part of this rank.

    def scale(self, parameters: Iterable[Tensor]) -> None:
        """Makes the gradients of parameters those of the loss. All ranks call this.

        There are none if no target was counted.

        Raises:
            ValueError: the gradient of a parameter was not reduced: it is neither in the model nor
                in the criterion.
        """
        tensors = [*parameters]
        self.sync.multiply(tensors, self.factor)
        if not self.weight:
            forget_gradients(tensors)


@dataclass
class Limit:
    """The largest micro-batch of a device, in rows or in cost. ``value`` is None without a limit."""

    unit: str
    value: float | None

    def set(self, unit: str, value: float | None) -> None:
        """Sets the limit. Raises ``ValueError`` for another unit."""
        if unit != self.unit:
            raise ValueError(
                f"micro-batches are limited by {self.unit}, expected a limit of that, not of {unit}"
            )
        self.value = value


class Work(Protocol):
    """The batches of an update, which run when they are added, or later."""

    def add(self, run: BatchRun) -> None:
        """Runs a batch, or keeps it."""

    def finish(self, settings: Callable[[], Settings]) -> Reduced:
        """Runs what was kept, and reduces all gradients. All ranks call this.

        ``settings`` returns those of this rank, which the ranks compare.
        """

    def discard(self, error: BaseException) -> bool:
        """Drops all gradients, after an error. Other ranks are told.

        Returns True if they have agreed to update.
        """
        return False


class Attempt(Work, Protocol):
    """Work whose gradients one synchronisation brings together."""

    sync: UpdateSync

    def finish(self, settings: Callable[[], Settings] = Unchecked) -> Reduced:
        """Runs what was kept, and reduces all gradients. All ranks call this."""
        self.run_kept()
        return self.reduce(settings)

    def run_kept(self) -> None:
        """Runs what was kept, the first part of :meth:`finish`. All ranks call this."""

    def reduce(self, settings: Callable[[], Settings]) -> Reduced:
        """Reduces all gradients, the second part of :meth:`finish`. All ranks call this."""


class Forwards:
    """Runs a model and a criterion on the shards of a micro-batch, in all updates of a step.

    It is what a step of your own begins with (docs/internals.md)::

        forwards = Forwards(model, criterion)                  once
        work = begin_update(forwards, last)                    an update: an Accumulation
        with forwards.updating(work):
            work.add(forwards.batch(inputs, targets))          forward and backward
            reduced = work.finish()                            all ranks: Reduced
            reduced.scale(model.parameters())                  the gradients of the whole batch

    Args:
        model: a :class:`DataParallelModel`, or the model of :func:`parallelize`.
        criterion: a :class:`DataParallelCriterion`.
        precision: as in :class:`TrainStep`.
        limit: rows per device at most in one forward, or a :class:`Limit`; ``None`` runs each batch
            at once.
        keeps_order: notes the order of rows in the outputs that are collected.
        prepare: gives shards memory of their own before a forward, if that is needed.

    ``trained`` are the parameters of both by name, each once, and the buffers that require a
    gradient.

    Raises:
        ValueError: another precision.

    Example:
        >>> net = nn.Linear(4, 3)
        >>> model = DataParallelModel(net, ["cpu"] * 2)
        >>> forwards = Forwards(model, DataParallelCriterion(nn.MSELoss()))
        >>> [*forwards.trained]
        ['model.weight', 'model.bias']
    """

    def __init__(
        self,
        model: ParallelModel,
        criterion: DataParallelCriterion,
        precision: PrecisionName | Precision = "fp32",
        limit: "int | Limit | None" = None,
        *,
        keeps_order: bool = False,
        prepare: Callable[[Shard], Shard] | None = None,
    ) -> None:
        self.model = model
        self.criterion = criterion
        self.copies = criterion.copies.without_notes()
        self.precision = precision if isinstance(precision, Precision) else Precision(precision)
        self.precision.scaler_on(model.devices[0])  # makes the scaler of fp16
        self.limit = limit if isinstance(limit, Limit) else Limit("rows", limit)
        self.trained = _trained_tensors(model, criterion)
        self._keeps_order = keeps_order
        self._prepare = prepare
        state = ForwardState(model.module, criterion.module)
        self.state = None if state.is_empty else state
        devices = [*model.devices, *(criterion.devices or ())]
        # Copies the state that forwards change.
        self.snapshot = functools.partial(Snapshot, [model, criterion], devices)

    @property
    def may_split(self) -> bool:
        """True if a single batch may run in several forwards."""
        devices = len(self.model.devices) * world_size()
        return self.limit.value is not None or devices > 1

    def mark(self, inputs: Any, targets: Any) -> tuple[Arguments, Arguments, tuple[int, int]]:
        """Returns inputs and targets as arguments, and the dimensions of the rows in what is not
        marked.
        """
        arguments = Arguments(spread(targets), {})
        dim = self.criterion.dim_of_targets(arguments, self.model.out_dims)
        return as_arguments(inputs), arguments, (self.model.dim, dim)

    def batch(self, inputs: Any, targets: Any = (), *, is_last: bool = True) -> BatchRun:
        """Returns a batch, or this rank's rows of it, for :meth:`Accumulation.add`.

        Args:
            inputs: of the model, with rows or none; a tuple fills its positional arguments, a
                mapping its keyword arguments.
            targets: arguments of the criterion after the output; a tuple fills several, ``()``
                none.
            is_last: no batch follows in this update, so that its last backward reduces the
                gradients.

        Raises:
            ValueError: the rows of inputs and targets do not fit.
        """
        run = BatchRun(Batch(*self.mark(inputs, targets)), is_last)
        self.begin(run)
        return run

    def undo(self) -> None:
        """Puts back what the forwards of an update that has failed have advanced, and forgets its
        rows.
        """
        if self.state is not None:
            self.state.undo()
        if self.copies.halves is not None:
            self.copies.halves.postpone([])

    def begin(self, run: BatchRun) -> None:
        """Begins a batch. All ranks call this for their last one.

        If the criterion communicates with other ranks, each of them has to call it once.
        """
        calls = self.copies.collectives
        if calls.is_used and not run.is_whole:
            calls.refuse()
        if calls.asks and run.is_whole:
            model = self.model
            calls.agree(len([*run.batch.plan(model.devices, model.split, self.limit.value, int)]))
        if not run.batch.targets.inputs:
            self.criterion.kind.begin_step(self.model, run.batch)

    @contextlib.contextmanager
    def updating(self, work: Work) -> Iterator[None]:
        """Surrounds a part of an update. An error in it drops all gradients, and is told to the
        other ranks.
        """
        with window(self.model, self.criterion, in_step=True):
            try:
                yield
            except BaseException as error:
                with telling(error):
                    work.discard(error)
                self.undo()
                forget_gradients([*self.trained.values()])
                raise

    def run(
        self, shards: Sequence[Shard], compute: Compute, collected: list[PerReplica] | None = None
    ) -> list[LossSum]:
        """Runs one forward. Returns a loss for each shard. ``collected`` receives the outputs."""
        if self._prepare is not None:
            shards = [self._prepare(shard) for shard in shards]
        state = self.state if self.state and self.state.is_open else None
        around = NO_BLOCK if state is None else state.begin_forward()
        try:
            with self.precision.autocast(self.model.devices):
                with around:
                    outputs = self.model(MicroBatch(shards))
                if collected is not None:
                    collected.append(detach_outputs(outputs, self._order_of(shards)))
                losses = compute(Calls(self.copies, outputs, shards))
                if state is not None and any(outputs.sizes):
                    state.end_forward()
                return losses
        except (TypeError, AttributeError, RuntimeError) as error:
            _explain(error, shards[0])
            raise

    def _order_of(self, shards: Sequence[Shard]) -> list[int] | None:
        """Returns the rows of outputs that are not in the order of the batch."""
        if not self._keeps_order:
            return None
        return [row for shard in shards for row in shard.rows or ()]


class Accumulation(Attempt):
    """Sums of losses and gradients over the micro-batches of an update, on one rank.

    :func:`begin_update` makes it. Gradients stay in ``.grad`` of the parameters, or with the
    replicas, until :meth:`finish`.

    Args:
        forwards: those of the step.
        sync: the synchronisation of this update.
        kind: that of the loss.
        weight_before: that of the last update, over everything, or 0.
    """

    # The only micro-batch of an update has no first pass, for a loss of two.
    takes_one_pass: ClassVar[bool] = True

    def __init__(
        self,
        forwards: Forwards,
        sync: UpdateSync,
        kind: Kind,
        weight_before: float,
    ) -> None:
        device = self._device = forwards.model.devices[0]
        present = {tensor.dtype for tensor in forwards.trained.values()}
        dtypes = {dtype.to_real() for dtype in present}
        self._dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.forwards = forwards
        self.sync = sync
        self.kind = kind
        self._weight: Weight = 0.0
        self._weight_on_host: Weight | Callable[[], Tensor] = 0.0
        self._is_reduced = False  # over replicas and ranks: nothing can be added
        self._has_plan = False  # Ranks have agreed on the number of micro-batches.
        self._has_kind = False  # Ranks have agreed on the kind of the loss.
        self._is_mean = kind.is_mean
        self._scaler = forwards.precision.scaler
        autocasts = (
            torch.is_autocast_enabled(device.type)
            and torch.get_autocast_dtype(device.type) == torch.float16
        )
        self._in_float16 = self._scaler is not None or torch.float16 in dtypes or autocasts
        self._weight_before = weight_before
        self._divisor: Weight | None = None  # All gradients of this update are divided by it.
        self._logged: list[LoggedMeans] = []
        # The sums of the losses have these names, if a criterion is a function of sums.
        self._names: list[SumName] = []
        if forwards.state is not None:
            forwards.state.reset()

    @functools.cached_property
    def _total(self) -> Tensor:
        """The sum of all losses.

        It is allocated where an out of memory is kept for another attempt.
        """
        return torch.zeros((), dtype=self._dtype, device=self._device)

    def add(self, run: BatchRun) -> None:
        """Runs forward and backward of each micro-batch."""
        plan = self.plan(run)  # the targets to count are known after it
        kind = self.kind.of_batch(run.batch.counted_targets, is_whole=run.is_whole)
        is_only = run.is_whole and len(plan) == 1 and not self._has_kind
        compute = kind.sums_of_only if is_only else kind.sums
        self._has_kind = True
        self._add_weight(kind.weight)
        self._is_mean = self._is_mean and kind.is_mean
        self.run(run, plan, compute)

    def run(self, run: BatchRun, plan: list[list[Shard]], compute: Compute) -> None:
        """Runs forward and backward of each micro-batch of a plan, with the losses that ``compute``
        returns.
        """
        before, last = (plan[:-1], plan[-1:]) if run.is_whole else (plan, [])
        if before and self.forwards.state is not None:
            self.forwards.state.open()
        with self.sync.accumulating():
            for number, shards in enumerate(before, start=1):
                # No variable keeps the losses, and their graph, during the next forward.
                with profiled("micro-batch") if is_profiled() else NO_BLOCK:
                    self._backward(
                        self.forwards.run(shards, compute, run.outputs),
                        len(plan) - number,
                        is_last=False,
                    )
        for shards in last:
            with profiled("micro-batch") if is_profiled() else NO_BLOCK:
                self._backward(self.forwards.run(shards, compute, run.outputs), 0, is_last=True)

    def run_again(self, run: BatchRun, learned: Kind, hand_back: Compute) -> None:
        """Runs a batch in the second of two passes. The first one has shown the kind ``learned``."""
        self.run(run, self.plan(run), hand_back)

    def plan(self, run: BatchRun) -> list[list[Shard]]:
        """Returns the shards of each micro-batch. Ranks may have to agree on their number."""
        model = self.forwards.model
        plan = list(
            run.batch.plan(
                model.devices, model.split, self.forwards.limit.value, self.sync.count_micro_batches
            )
        )
        self._has_plan = True
        return (
            plan if run.surround is None else [list(map(run.surround, shards)) for shards in plan]
        )

    def run_kept(self) -> None:
        """Does nothing: all batches have run."""

    def finish(self, settings: Callable[[], Settings] = Unchecked) -> Reduced:
        """Reduces what is not reduced yet. All ranks call this.

        ``settings`` returns what ranks compare: nothing if it is left out.
        """
        for zeros in self.sync.forwards_without_rows(is_reduced=self._is_reduced):
            self._backward([LossSum(zero, 0.0) for zero in zeros], 0, is_last=True)
        if self.forwards.state is not None:
            self.forwards.state.finish()
        terms: dict[SumName, Any] = dict.fromkeys(self._names)
        whole = self.sync.finish(LossSum(self._total, self._weight, terms), settings)
        if self.forwards.state is not None:
            self.forwards.state.reset()  # Nothing stays in memory.
        kind = self.kind.learned(self.forwards.copies)
        counted = self._weight_on_host if whole.weight is self._weight else whole.weight
        weight = max(float(counted() if callable(counted) else counted or 0.0), kind.least)
        true_divisor = weight if self._is_mean and weight else 1.0
        loss = whole.total / true_divisor if weight else torch.full_like(whole.total, torch.nan)
        factor = (1.0 if self._divisor is None else self._divisor) / true_divisor
        return Reduced(loss.to(self._dtype), weight, factor, self.sync, kind, self._logged)

    reduce = finish  # nothing was kept

    def discard(self, error: BaseException) -> bool:
        """Drops the gradients of this rank. Others may wait for its part in the kind of the loss."""
        calls_ask = self.forwards.copies.collectives.asks
        if self._has_kind or not (self.kind.asks or calls_ask):
            return self.sync.discard(error, self._divide)
        if self._has_plan or calls_ask:
            tell_failure(error)
        else:  # Others may wait for the number of its micro-batches.
            self.sync.tell(error, has_begun=False)
        return self.sync.discard(ElsewhereFailure(), self._divide)

    def _divide(self) -> None:
        """Takes part in the choice of the divisor, unless it is chosen."""
        if self._divisor is None and self._is_mean:
            self.sync.divisor(0.0, self._weight_before, self._in_float16)

    def _backward(self, losses: Sequence[LossSum], followers: int, *, is_last: bool) -> None:
        """Counts the losses of a micro-batch, one for each replica, and runs its backward.

        The last one reduces all gradients.

        ``followers`` is the number of micro-batches of the same batch that follow, and probably
        weigh as much.
        """
        weights = []
        roots = []
        for term in losses:
            # a sum counts, but is not divided
            weights.append(1.0 if term.weight is None else term.weight)
            roots.append(term.total if self._scaler is None else scaled(term.total, self._scaler))
            self._total = self._total + move(term.total.detach(), self._device)
            if term.logged:
                self._logged.append(term.logged)
        weight = _sum(weights, self._device)
        if isinstance(weight, Tensor) or weight:
            self._add_weight(weight)
        if self._divisor is None:
            expected = _sum([self._weight, weight * followers], self._device)
            self._divisor = (
                self.sync.divisor(expected, self._weight_before, self._in_float16)
                if self._is_mean
                else 1.0
            )
        self.sync.backward(
            roots, self._divisor, LossSum(self._total, self._weight) if is_last else None
        )
        self._is_reduced = is_last
        for names in [[*term.terms] for term in losses if term.terms]:
            self._names = self._names or names
            compare_names(self._names, names)  # An error earlier would miss the backward of FSDP2.

    def _add_weight(self, weight: Weight) -> None:
        """Adds a weight. A sum on a device starts its way to the host."""
        self._weight = _sum([self._weight, weight], self._device)
        self._weight_on_host = (
            start_copy(self._weight) if isinstance(self._weight, Tensor) else self._weight
        )


@dataclass(frozen=True)
class Arithmetic:
    """A way to add up the losses and the gradients of an update: here in floating point, in the
    order in which they are made.

    Args:
        model, criterion, cut: those of the step.
    """

    model: ParallelModel
    criterion: DataParallelCriterion
    cut: Cut | None
    # The class that runs the batches of an update.
    accumulation: ClassVar[type[Accumulation]] = Accumulation
    # Returns the norm of gradients.
    norm: ClassVar[Callable[..., Tensor]] = staticmethod(torch.nn.utils.get_total_norm)
    # Clips the gradients of parameters to a largest norm, from their norm.
    clip: ClassVar[Callable[..., None]] = staticmethod(torch.nn.utils.clip_grads_with_norm_)
    # Makes a block around each part of an update.
    surround: ClassVar[Callable[..., AbstractContextManager[None]]] = contextlib.nullcontext
    # Returns the work on the batches of an update, whose rows get numbers, if they do.
    number_rows: ClassVar[Callable[..., Work] | None] = None

    def check(self, optimizers: Sequence[torch.optim.Optimizer], micro_batch_size: object) -> None:
        """Raises ``ValueError`` for settings of a step with which it is not possible."""

    def kind_of(self, kind: Kind) -> Kind:
        """Returns the kind of a loss with sums of this arithmetic."""
        return kind

    def opener(self, strategy: GradientSync) -> Callable[[], UpdateSync]:
        """Returns the function that opens the synchronisation of an update."""
        return strategy.open

    def prepare(self) -> Callable[[Shard], Shard] | None:
        """Returns the function that gives shards memory of their own, if that is needed."""
        if not any(map(is_compiled, self.model.modules())):
            return None
        # Compiled code has graphs of its own for views, and for each kind of offset.
        return lambda shard: shard._replace(inputs=copy_views(shard.inputs, shard.device))

    def facts(self, limit: Limit) -> dict[str, Hashable]:
        """Returns what the sums depend on, beside the state and the batch. The ranks compare it."""
        return {}


@dataclass
class Update(Work):
    """One update in progress, from its first rows to the step of the optimizers."""

    work: Work | None  # None after it has finished: optimizers may need its memory
    optimizers: ParameterUpdate
    sync: UpdateSync | None = None  # The synchronisation of work which has finished.
    has_rows: bool = False  # batches were added
    has_parts: bool = False  # Parts of it have ended.
    has_parted: bool = False  # It has failed here, and other ranks have made it.

    def add(self, run: BatchRun) -> None:
        """Adds a batch."""
        assert self.work is not None
        try:
            self.work.add(run)
        except torch.OutOfMemoryError as error:
            error.add_note(
                "expected less memory at a time: TrainStep(..., micro_batch_size='auto') runs a batch again in smaller pieces"
            )
            raise
        self.has_rows = True

    def end_part(self) -> None:
        """Ends a part that others follow. Its gradients must stay until then."""
        self.has_parts = True
        self.optimizers.note_gradients()

    def finish(self, settings: Callable[[], Settings]) -> Reduced:
        """Reduces all gradients. All ranks call this."""
        assert self.work is not None
        reduced = self.work.finish(settings)
        self.work = None
        self.sync = reduced.sync
        return reduced

    def discard(self, error: BaseException) -> bool:
        """Drops all gradients, so that nobody takes them for another loss's.

        Returns True if other ranks have made the update.
        """
        if self.has_parts and self.work is not None:
            error.add_note(
                "the rows that were added since the last update are dropped: add them again before apply()"
            )
        failed = self.work or self.sync
        try:
            self.has_parted = failed.discard(error) if failed else False
        finally:
            self.optimizers.forget_gradients()
        return self.has_parted


def _trained_tensors(model: nn.Module, criterion: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters of both by name, each once, and the buffers that require a gradient."""
    both = nn.ModuleDict({"model": model, "criterion": criterion})
    learning = [(name, buffer) for name, buffer in both.named_buffers() if buffer.requires_grad]
    return {
        name.replace(".module", "", 1): tensor
        for name, tensor in (*both.named_parameters(), *learning)
    }


def _sum(weights: Sequence[Weight], device: torch.device) -> Weight:
    """Returns the sum of weights. It is a number if all are on the host, and no device is read."""
    on_host = 0.0
    on_devices = []
    for weight in weights:
        if isinstance(weight, Tensor) and not weight.is_cpu:
            on_devices.append(weight)
        else:
            on_host += float(weight)
    if not on_devices:
        return on_host
    return add_up([*on_devices, on_host] if on_host else on_devices, device)


def _explain(error: Exception, shard: Shard) -> None:
    """Adds a note to an error if targets may be among the inputs: none were given, or a mapping has
    keys that forward refuses.
    """
    inputs, names = shard.inputs
    is_misplaced = isinstance(error, TypeError) if names else not shard.targets.inputs
    if is_misplaced and not isinstance(error, torch.OutOfMemoryError):
        description = describe(names or inputs if len(inputs) != 1 else inputs[0])
        error.add_note(
            f"the inputs of this shard are {description}. If targets are among them, expected step(inputs, targets), or "
            "verify(model, criterion, inputs, targets): write step(*batch) for a pair, step({'x': batch['x']}, batch['y']) for a "
            "mapping. A step computes loss and backward itself"
        )
