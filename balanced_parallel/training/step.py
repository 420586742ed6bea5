"""``TrainStep``: an effective batch in micro-batches that fit, and one exact update.

    for shards in batch.plan(...):                 micro-batches, each a shard per device
        outputs = model(MicroBatch(shards))        forward of each shard, on its device
        losses = criterion(outputs, shards)        a sum and a weight of each
        backward                                   of the sums; the last one reduces all gradients
    update                                         gradients / weight of everything, clipped; all optimizers step

Out of memory with ``"auto"`` puts everything back and goes through the same batches with a smaller plan. A loss whose rows depend
on each other goes through the plan twice.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, cast, overload

import torch
from torch import Tensor, nn

from ..batch.by_cost import check_limit
from ..batch.containers import describe
from ..batch.outputs import PerReplica, detach_outputs, join_outputs
from ..batch.rows import Arguments, Batch, Cut, MicroBatch, Shard, as_arguments, copy_views, spread
from ..loss.criterion import BatchLosses, DataParallelCriterion, couple, losses_of_batch
from ..loss.sums import LossSum, Weight
from ..replicas.batchnorm import meets_other_ranks
from ..replicas.replicas import window
from ..runtime import collectives
from ..runtime.torch_private import hooks_of, is_compiled, versions, without_hooks
from ..runtime.values import Precision, naming_arguments
from .accumulation import Accumulation, gradient_sync
from .recovery import Recovery, Snapshot, TwoPasses, retrying_allocations
from .reproducible import RandomByRow
from .settings import Settings
from .state import TrainedState
from .update import (
    Optimizers,
    Schedulers,
    Update,
    check_arguments,
    check_micro_batch_size,
    check_optimizers,
    each_optimizer,
    each_scheduler,
    step_schedulers,
    trained_tensors,
    warn_of_hooks,
)


class BatchRun(NamedTuple):
    """A batch that the caller passes, and how it runs."""

    batch: Batch
    is_whole: bool  # an effective batch: its last backward reduces all gradients
    outputs: list[PerReplica] | None = None  # receives the detached outputs of its micro-batches
    surround: Callable[[Shard], Shard] | None = None  # gives shards a context


class TrainStep:
    """Trains on one effective batch per call, in micro-batches, with the loss and the gradients of the whole batch.

    ``loss = step(inputs, targets)`` cuts the batch, runs forward and backward of each micro-batch, and updates once.
    ``step.add(inputs, targets)`` and ``step.apply()`` are its two halves, for a loader that yields micro-batches. A batch without
    a counted target changes nothing: its loss is nan, with a warning. A step that failed before its update can be repeated.

    A loss whose rows depend on each other (``whole=True``, :class:`AdditiveLoss`) takes two forwards for each of several
    micro-batches, and ``add`` keeps its rows until ``apply``.

    Under torchrun each rank passes its own rows, or none. Ranks compare their settings, and make the same sequence of
    ``step(...)`` or ``apply()`` calls. Gradients are reduced once per update. Shards (FSDP) are reduced in every
    micro-batch where whole gradients do not fit. A failure of DDP raises on every rank.

    Args:
        model: a :class:`DataParallelModel`, or the model of :func:`parallelize`.
        criterion: a :class:`DataParallelCriterion`.
        optimizer: one or a list. They step together: with ``"fp16"`` an overflow in the gradients of one skips all.
        micro_batch_size: rows per device at most in one forward; ``None`` runs the whole batch at once. ``"auto"`` begins with
            that, and halves the number after each ``torch.OutOfMemoryError``. The same effective batch runs again then.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a :class:`Precision`, for every replica.
        max_grad_norm: clips the norm of the true gradient over all optimizers, as ``torch.nn.utils.clip_grad_norm_`` does.
            ``step.grad_norm`` is that of the last update before it was clipped, a tensor.
        scheduler: one or a list, stepped once after each update that was made.
        cut: a :class:`ByCost`, which cuts batches by the cost of their rows, so that all devices carry about the same.
        reproducible: draws random numbers, as of dropout, by row: with any devices, ranks and micro-batches they are those of
            one device with the whole batch. The seed of an update is drawn from the CPU's generator, of the first rank.

    Raises:
        TypeError: a model, a criterion, an optimizer or a scheduler of another kind.
        ValueError: a setting out of its range, a parameter in two optimizers, or inputs and targets whose rows do not fit.

    Example:
        >>> net = torch.nn.Linear(4, 3)
        >>> model, criterion = DataParallelModel(net, ["cpu"] * 2), DataParallelCriterion(torch.nn.CrossEntropyLoss())
        >>> step = TrainStep(model, criterion, torch.optim.SGD(net.parameters(), lr=0.1), micro_batch_size=2)
        >>> step(torch.zeros(7, 4), torch.tensor([0, 1, 2, 0, 1, -100, -100])).shape  # the mean over 5 of 7 rows
        torch.Size([])
    """

    @naming_arguments
    def __init__(
        self,
        model: nn.Module,
        criterion: DataParallelCriterion,
        optimizer: Optimizers,
        *,
        micro_batch_size: int | Literal["auto"] | None = None,
        precision: str | Precision = "fp32",
        max_grad_norm: float | None = None,
        scheduler: Schedulers | None = None,
        cut: Cut | None = None,
        reproducible: bool = False,
    ) -> None:
        self._sync = gradient_sync(model, criterion)
        check_arguments(criterion, micro_batch_size, max_grad_norm, cut)
        self.model = cast(Any, model)
        self.criterion, self.optimizer, self.scheduler = criterion, optimizer, scheduler
        self.max_grad_norm, self.precision, self.cut = max_grad_norm, Precision(precision), cut
        self.grad_norm: Tensor | None = None
        self._trained = trained_tensors(model, criterion)
        self._unit = "rows" if cut is None or isinstance(micro_batch_size, int) else "cost"
        self._is_auto = micro_batch_size == "auto"
        self._limit: float | None = micro_batch_size if isinstance(micro_batch_size, int) else cut.limit if cut else None
        self._example: Sequence[object] = ()  # The first sample of an earlier batch, for a rank that has none.
        self._before = Snapshot([model, criterion], [*self.model.devices, *(criterion.devices or ())])  # of a first pass
        self._recovery = Recovery(model, criterion, self._sync) if self._is_auto else None
        self._is_compiled = any(map(is_compiled, model.modules()))
        self._by_row = RandomByRow(model, self._sync, self._before) if reproducible else None
        self._sums: Accumulation | None = None  # of the micro-batches since the last update
        self._runs: list[BatchRun] = []  # since the last update, where they may run again
        self._weight_before = 0.0  # of the last update, over everything
        self._has_compared = False  # the settings of the ranks
        self._has_ranks = collectives.world_size() > 1
        self._states: list[Any] = []  # of the optimizers, and versions of the parameters, after the last update of the ranks
        self._versions: list[int] = []
        self._failure = ""  # of the last update of the optimizers, which the other ranks learn of
        self._update = Update(each_optimizer(optimizer), self._trained)  # that began last
        check_optimizers(self._update, each_scheduler(scheduler))

    @overload
    def __call__(self, inputs: Any, targets: Any = (), *, return_outputs: Literal[False] = False) -> Tensor: ...
    @overload
    def __call__(self, inputs: Any, targets: Any = (), *, return_outputs: Literal[True]) -> tuple[Tensor, PerReplica]: ...
    def __call__(self, inputs: Any, targets: Any = (), *, return_outputs: bool = False) -> Tensor | tuple[Tensor, PerReplica]:
        """Trains on one effective batch, or on this rank's rows of it. Returns its loss, a detached scalar.

        Args:
            inputs: of the model; a tuple fills its positional arguments, a mapping its keyword arguments; or samples.
            targets: arguments of the criterion after the output; a tuple fills several, ``()`` none.
            return_outputs: returns the detached outputs of this rank's rows too, one entry for each micro-batch and replica.
                11 rows with ``micro_batch_size=2`` on three devices make entries of 2, 2, 2, 2, 2 and 1 rows.
        """
        outputs: list[PerReplica] = []
        with self._updating(is_last=True) as hooks:
            self._add(BatchRun(self._open(inputs, targets), True, outputs if return_outputs else None))
            loss = self._apply(hooks)
        return (loss, join_outputs(outputs, self.model.out_dims)) if return_outputs else loss

    def add(self, inputs: Any, targets: Any = ()) -> None:
        """Accumulates the gradients of some more rows; nothing is updated before :meth:`apply`.

        An ``add`` that fails drops all rows since the last update, with a note on its error.
        """
        with self._updating(is_last=False):
            self._add(BatchRun(self._open(inputs, targets), False))
            if self._sums is not None:
                self._sums.gradients = self._update.note_gradients()

    def apply(self) -> Tensor:
        """Updates with the gradients of all rows that were added, and returns their loss."""
        with self._updating(is_last=True) as hooks:
            return self._apply(hooks)

    def _open(self, inputs: Any, targets: Any) -> Batch:
        if self.cut is None:
            return Batch(*self._mark(inputs, spread(targets)))
        forward, is_strict = self.model.module.forward, not self._is_auto
        batch = self.cut.open(inputs, spread(targets), self._mark, forward, unit=self._unit, is_strict=is_strict)
        self._example = batch.take_example(self._example)
        if not batch.has_example and collectives.world_size() > 1 and meets_other_ranks(self.model.modules()):
            raise RuntimeError("this rank had no sample in its first batch, expected one: others wait for its batch norm")
        return batch

    def _mark(self, inputs: Any, targets: tuple[Any, ...]) -> tuple[Arguments, Arguments, tuple[int, int]]:
        """Returns inputs and targets with marks, and the dimensions of the rows in what is not marked."""
        marked, dim = self.criterion.mark(targets, {}, self.model.out_dims)
        return self.model.mark(as_arguments(inputs)), marked, (self.model.dim, dim)

    def _plan(self, run: BatchRun) -> list[list[Shard]]:
        """Returns the shards of each micro-batch."""
        plan = list(run.batch.plan(self.model.devices, self.model.split, self._limit, self._sync.count_micro_batches))
        return plan if run.surround is None else [list(map(run.surround, shards)) for shards in plan]

    def _add(self, run: BatchRun) -> None:
        """Runs rows, or keeps them for the update if their loss depends on all rows."""
        communication = self.criterion.collectives
        if communication.is_used and not run.is_whole:
            communication.refuse()
        if communication.asks and run.is_whole:
            communication.agree(len([*run.batch.plan(self.model.devices, self.model.split, self._limit, int)]))
        if self._by_row is not None:
            compute = self.criterion.loss_sums if not self.criterion.is_coupled else lambda outputs, shards: []
            run = run._replace(surround=self._by_row.begin(run.batch, lambda shards: self._forward(shards, compute, None)))
        if self._recovery is not None:
            self._recovery.begin(run.batch)
        if self._recovery is not None or self.criterion.is_coupled:
            self._runs.append(run)
        if not self.criterion.is_coupled:
            self._try(self._run, run)

    def _try(self, work: Callable[..., Any], *arguments: Any, is_local: bool = True) -> Any:
        """Calls ``work``, unless the update has failed. Keeps an out of memory for :meth:`_reduce`, which runs all rows again.

        ``is_local`` is False for a failure that all ranks raise.
        """
        if self._recovery is None:
            return work(*arguments)
        if self._recovery.has_failed and is_local:
            return None
        try:
            return work(*arguments)
        except torch.OutOfMemoryError as error:
            self._recovery.keep(error, is_local=is_local)
            self._drop(error)
            return None

    def _run(self, run: BatchRun, losses: BatchLosses | None = None) -> None:
        """Runs forward and backward of each micro-batch."""
        plan, sums = self._plan(run), self._begin()
        losses = losses or losses_of_batch(self.criterion, run.batch.counted_targets, is_whole=run.is_whole)
        if run.batch.pads:
            run.batch.check_weight(self.criterion.weigh_targets)
        sums.begin_batch(losses)
        before, last = (plan[:-1], plan[-1:]) if run.is_whole else (plan, [])
        with self._sync.accumulating():
            for number, shards in enumerate(before, start=1):
                sums.backward(self._forward(shards, losses.compute, run.outputs), len(plan) - number, last=False)
        for shards in last:
            sums.backward(self._forward(shards, losses.compute, run.outputs), 0, last=True)

    def _forward(self, shards: list[Shard], compute: Callable[..., Any], collected: list[PerReplica] | None) -> list[LossSum]:
        """Runs the model and the criterion. Returns a loss for each shard."""
        if self._is_compiled:  # it has graphs of its own for views, and for each kind of offset
            shards = [shard._replace(inputs=copy_views(shard.inputs, shard.device)) for shard in shards]
        try:
            with self.precision.autocast(self.model.devices):
                outputs = self.model(MicroBatch(shards))
                if collected is not None:
                    order = [row for shard in shards for row in shard.rows or ()] if self.cut else None
                    collected.append(detach_outputs(outputs, order))
                losses: list[LossSum] = compute(outputs, shards)
                return losses
        except (TypeError, AttributeError, RuntimeError) as error:
            _explain(error, shards[0])
            raise

    def _begin(self) -> Accumulation:
        """Returns the sums since the last update. The first call after an update clears all gradients."""
        if self._sums is None:
            self._update = Update(each_optimizer(self.optimizer), self._trained)
            self._update.forget_gradients()
            self._sums = Accumulation(
                self._sync,
                self._trained,
                self.model.devices[0],
                self.precision,
                self._weight_before,
                is_mean=self.criterion.reduction != "sum" and not self.criterion.is_coupled,
            )
        return self._sums

    def _apply(self, hooks: ExitStack) -> Tensor:
        cause = "no target of this batch was counted" if self._sums or self._runs else "no rows were added before apply()"
        loss, weight, factor = self._reduce()
        hooks.close()
        if self._by_row is not None:
            self._by_row.end()
        update, self._sums, self._runs, self._weight_before = self._update, None, [], weight
        if weight == 0:
            update.forget_gradients()
            warnings.warn(f"{cause}: nothing is updated, and its loss is nan", stacklevel=3)
            return loss
        try:
            with retrying_allocations(self.model.devices if self._is_auto else ()):
                update.run(self._sync, factor, self.precision.scaler, self.max_grad_norm)
        except BaseException as error:
            self._failure = f"failed with {type(error).__name__}: {error}"  # the others learn of it in the next reduction
            error.add_note(
                "This was the optimizer's step, which may have changed some parameters and not others: go on from a checkpoint. "
                "If memory ran out, BalancedOptimizer spreads its state over the devices; smaller micro-batches do not help"
            )
            raise
        self._failure, self.grad_norm = "", update.grad_norm
        if self._has_ranks:
            self._states = [optimizer.state for optimizer in update.optimizers]
            self._versions = versions([*self._trained.values()])
        if self.scheduler is not None and update.has_stepped:
            step_schedulers(each_scheduler(self.scheduler))
        return loss

    def _reduce(self) -> tuple[Tensor, float, Weight]:
        """Reduces all gradients. Returns the loss over everything, its weight, and the factor of the gradients.

        If memory was too small on any rank, all rows run again in smaller micro-batches.
        """
        recovery = self._recovery
        if recovery is not None:
            recovery.begin()  # a rank without rows has not called add
        while True:
            if self.criterion.is_coupled:
                self._try(self._run_coupled)
            if recovery is None:
                return self._finish()
            if not recovery.has_failed or self._sync.abandon():
                with retrying_allocations(self.model.devices):  # after the agreement of the ranks, none of them must fail
                    result: tuple[Tensor, float, Weight] = self._try(self._finish, is_local=False)
            if not recovery.has_failed:
                recovery.end(self._unit, self._limit)
                return result
            shares = self.model.split or len(self.model.devices)
            self._limit = recovery.restart([run.batch.largest(shares, self._limit) for run in self._runs])
            for run in self._runs:
                if run.outputs is not None:
                    run.outputs.clear()
                if not self.criterion.is_coupled:
                    self._try(self._run, run)

    def _finish(self) -> tuple[Tensor, float, Weight]:
        return self._begin().finish(self.criterion.least, self._settings)

    def _run_coupled(self) -> None:
        """Runs all rows for a loss that depends on all of them: in two passes, or in one if there is one micro-batch."""
        loss, batches = couple(self.criterion, self.model.devices[0]), [run.batch for run in self._runs]
        passes = TwoPasses(loss, self._sync, self.precision, self.model.devices, is_auto=self._is_auto)
        with passes.telling_ranks():
            is_single = len(batches) == 1 and self._runs[0].is_whole and len(self._plan(self._runs[0])) == 1
            loss.is_split = self._may_split or not is_single
            if passes.takes_one(is_single):
                self._run(self._runs[0], BatchLosses(passes.at_once))
                return
            self._begin()
            with passes.undone(batches, self._before):
                for shards in itertools.chain.from_iterable(map(self._plan, self._runs)):
                    self._forward(shards, loss.collect, None)
            passes.differentiate()
        for run in self._runs:
            self._run(run, BatchLosses(loss.hand_back))

    @contextmanager
    def _updating(self, *, is_last: bool) -> Iterator[ExitStack]:
        """Surrounds a part of an update, whose last one makes it. Hooks of parameters are off until the result is closed.

        If it fails, all rows since the last update are dropped: nobody knows which rows the gradients are of.
        """
        if not self._has_compared:
            self._check_first(is_whole=is_last)
        had_rows = self._sums is not None or bool(self._runs)
        numbers = self._sync.random_numbers(is_last=is_last) if self._by_row is None else nullcontext()
        hooked = [tensor for tensor in self._trained.values() if any(hooks_of(tensor))]
        hooks = without_hooks(hooked) if hooked else ExitStack()
        with hooks, window(self.model, self.criterion), collectives.naming_ranks(), numbers:
            try:
                if self._sums is not None:
                    self._update.check_gradients(self._sums.gradients)
                yield hooks
            except BaseException as error:
                if had_rows and (self._sums is not None or self._runs):
                    error.add_note("the rows that were added since the last update are dropped: add them again before apply()")
                self._drop(error)
                self._update.forget_gradients()  # nobody takes them for those of another loss
                self._runs = []
                if self._by_row is not None:
                    self._by_row.end(has_failed=True)
                if self._recovery is not None:
                    self._recovery.forget()
                raise

    def _check_first(self, *, is_whole: bool) -> None:
        """Compares the ranks, and warns of hooks, before the first update."""
        if self._has_ranks:
            self._settings().compare()
        if self._may_split or not is_whole:
            warn_of_hooks(self.model)
        self._has_compared = True

    def _drop(self, error: BaseException) -> None:
        self._sums = None
        self._sync.discard(out_of_memory=isinstance(error, torch.OutOfMemoryError))

    @property
    def _may_split(self) -> bool:
        """A single batch may run in several forwards."""
        return self._is_auto or self._limit is not None or len(self.model.devices) * collectives.world_size() > 1

    def _settings(self) -> Settings:
        optimizers = each_optimizer(self.optimizer)
        return Settings(
            model=self.model,
            criterion=self.criterion,
            trained=self._trained,
            optimizers=optimizers,
            schedulers=each_scheduler(self.scheduler),
            precision=self.precision.name,
            max_grad_norm=self.max_grad_norm,
            is_auto=self._is_auto,
            unit=self._unit,
            reproducible=self._by_row is not None,
            failure=self._failure,
            has_loaded=any(optimizer.state is not before for optimizer, before in zip(optimizers, self._states, strict=False)),
            has_written=versions([*self._trained.values()]) != self._versions,
        )

    @property
    def micro_batch_size(self) -> int | None:
        """Rows per device at most in one forward. With ``"auto"``, the number settled on so far."""
        return int(self._limit) if self._unit == "rows" and self._limit is not None else None

    @micro_batch_size.setter
    def micro_batch_size(self, rows: int | None) -> None:
        check_micro_batch_size(rows, "or None for the whole batch")
        self._set_limit("rows", rows)

    @property
    def micro_batch_cost(self) -> float | None:
        """Cost per device at most in one forward, for :class:`ByCost`. With ``"auto"``, the cost settled on so far."""
        return self._limit if self._unit == "cost" else None

    @micro_batch_cost.setter
    def micro_batch_cost(self, cost: float | None) -> None:
        check_limit("micro_batch_cost", cost)
        self._set_limit("cost", cost)

    def _set_limit(self, unit: str, limit: float | None) -> None:
        if unit != self._unit:
            raise ValueError(f"micro-batches are limited by {self._unit}, expected a limit of that, not of {unit}")
        self._limit = limit

    def state_dict(self) -> dict[str, Any]:
        """Returns the state between two updates, for :class:`Checkpoints`. Under torchrun every rank must call this.

        The names are those of the module, with any number of devices or ranks. Tensors are not copied.

        Raises:
            RuntimeError: rows were added and not applied.
        """
        if self._sums is not None or self._runs:
            raise RuntimeError("rows were added that are not in an update yet, expected apply() before state_dict()")
        return {**self._state().save(), "weight_before": self._weight_before, "limit": {self._unit: self._limit}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes a state, which any number of devices or ranks may have saved.

        With another number, accelerators get new seeds, all different, and the random numbers of Python and numpy stay.

        Raises:
            ValueError: optimizers or schedulers of another number or class or with other parameters, or not a whole state.
            RuntimeError: the module has other parameters.
        """
        self.check_state_dict(state_dict)
        self._state().load(state_dict)
        self._weight_before, self._failure = state_dict["weight_before"], ""
        if self._is_auto:  # a number given by hand stays, and rows are not a cost
            self._limit = state_dict["limit"].get(self._unit)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises the errors of :meth:`load_state_dict`, without changing anything."""
        self._state().check(state_dict, {"weight_before", "limit"})

    def load_target(self, path: tuple[str, ...], size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Returns memory for a saved tensor, laid out as its parameter if that is sharded over ranks; otherwise None."""
        return self._state().load_target(path, size, dtype)

    def _state(self) -> TrainedState:
        optimizers, schedulers = each_optimizer(self.optimizer), each_scheduler(self.scheduler)
        return TrainedState(self.model, self.criterion, optimizers, schedulers, self.precision, self._trained)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sums": None, "_runs": []}  # a copy has no gradients


def _explain(error: Exception, shard: Shard) -> None:
    """Adds a note to an error if targets may be among the inputs: none were given, or a mapping has keys that forward refuses."""
    inputs, names = shard.inputs
    is_misplaced = isinstance(error, TypeError) if names else not shard.targets.inputs
    if is_misplaced and not isinstance(error, torch.OutOfMemoryError):
        description = describe(names or inputs if len(inputs) != 1 else inputs[0])
        error.add_note(
            f"the inputs of this shard are {description}. If targets are among them, expected step(inputs, targets): write "
            "step(*batch) for a pair, step({'x': batch['x']}, batch['y']) for a mapping. A step computes loss and backward itself"
        )
