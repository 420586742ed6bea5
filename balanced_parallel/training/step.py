"""``TrainStep``: an effective batch in micro-batches that fit, and one exact update::

    for shards in batch.plan(...):                 micro-batches, each a shard per device
        outputs = model(MicroBatch(shards))        forward of each shard, on its device
        losses = criterion(outputs, shards)        a sum and a weight of each
        backward                                   of the sums; the last one reduces all gradients
    update                                         gradients / weight of everything, clipped

Out of memory with ``"auto"`` puts everything back and goes through the same batches with a smaller
plan. A loss whose rows depend on each other goes through the plan twice.
"""

import functools
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, overload

from torch import Tensor, nn

from ..batch.outputs import PerReplica, join_outputs
from ..batch.rows import Batch, Cut, ParallelModel
from ..loss.criterion import DataParallelCriterion
from ..loss.entries import LoggedMeans, merge_logged
from ..loss.kinds import Kind
from ..loss.names import ChangedLossError
from ..loss.validation import SEVERAL
from ..replicas.batchnorm import meets_others
from ..runtime import collectives
from ..runtime.devices import NO_BLOCK
from ..runtime.torch_private import (
    backward_hooks_of,
    hooks_of,
    is_profiled,
    profiled,
    versions,
    without_hooks,
)
from ..runtime.values import (
    Precision,
    PrecisionName,
    SaysInstead,
    check_cost,
    check_type,
    naming_arguments,
    setting,
)
from .optimizers import (
    Optimizers,
    ParameterUpdate,
    Schedulers,
    check_optimizers,
    each_optimizer,
    each_scheduler,
    step_schedulers,
)
from .passes import TwoPasses
from .recovery import Recovery, retrying_allocations
from .settings import LastUpdate, Settings, TrainedObjects, name_of
from .sync import UpdateSync, gradient_sync
from .update import Arithmetic, Attempt, BatchRun, Forwards, Limit, Update, Work

if TYPE_CHECKING:
    from ..state.state import TrainedState

Surround = Callable[[], AbstractContextManager[object]]


def _check_norm(name: str, norm: object) -> None:
    is_positive = isinstance(norm, (int, float)) and norm > 0
    if norm is True or not (norm is None or is_positive):
        raise ValueError(f"{name}={norm!r}, expected a positive number, or None for no limit")


def _check_surround(name: str, surround: object) -> None:
    is_block = isinstance(surround, AbstractContextManager)  # It would run once.
    if is_block or not (surround is None or callable(surround)):
        raise TypeError(
            f"{name} is a {type(surround).__name__}, expected a function that returns a block for each part of an update, "
            "such as savings.offload_activations without a call"
        )


class TrainStep(SaysInstead):
    """Trains on one effective batch per call, in micro-batches, with the loss and the gradients of
    the whole batch.

    ``loss = step(inputs, targets)`` cuts the batch, runs forward and backward of each micro-batch,
    and updates once. ``step.add(inputs, targets)`` and ``step.apply()`` are its two halves, for a
    loader that yields micro-batches. A batch without a counted target changes nothing: its loss is
    nan, with a warning. A step that failed before its update can be repeated.

    A loss whose rows depend on each other (``whole=True``, :class:`AdditiveLoss`) takes two
    forwards for each of several micro-batches, and ``add`` keeps its rows until ``apply``. A loss
    that an autograd function adds in the backward counts once per shard: :func:`verify` finds it.

    Under torchrun each rank passes its own rows, or none. Ranks compare their settings, and make
    the same sequence of ``step(...)`` or ``apply()`` calls. Gradients are reduced once per update.
    Shards (FSDP) are reduced in every micro-batch where whole gradients do not fit. A failure of
    one rank raises on every rank, and the step can be repeated, but not one inside of a block of
    FSDP2: the others wait for it.

    Args:
        model: a :class:`DataParallelModel`, or the model of :func:`parallelize`.
        criterion: a :class:`DataParallelCriterion`.
        optimizer: one or a list. They step together: with ``"fp16"`` an overflow in the gradients
            of one skips all.
        micro_batch_size: rows per device at most in one forward; ``None`` runs the whole batch at
            once. ``"auto"`` begins with that, and halves the number after each
            ``torch.OutOfMemoryError``. The same effective batch runs again then.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a :class:`Precision`, for every replica.
        max_grad_norm: clips the norm of the true gradient over all optimizers, as
            ``torch.nn.utils.clip_grad_norm_`` does. ``step.grad_norm`` is that of the last update
            before it was clipped, a tensor.
        skip_above: makes no update, and steps no scheduler, if the norm of the true gradient is
            larger, or nan. ``step.grad_norm`` is that norm, and tells. The host waits for it.
        scheduler: one or a list, stepped once after each update that was made.
        cut: a :class:`ByCost`, which cuts batches by the cost of their rows, so that all devices
            carry about the same.
        reproducible: ``True`` draws random numbers, as of dropout, by row: with any devices, ranks
            and micro-batches they are those of one device with the whole batch. The seed of an
            update is drawn from the CPU's generator, of the first rank. ``"bits"`` also computes
            rows in groups of ``micro_batch_size``, and sums their gradients exactly: losses and
            parameters have the same bits on any number of devices and of ranks of DDP.
        surround: returns a block, in which each ``step(...)``, ``add`` and ``apply`` runs:
            ``surround=savings.offload_activations``.

    Raises:
        TypeError: a model, a criterion, an optimizer or a scheduler of another kind.
        ValueError: a setting out of its range, a parameter in two optimizers, or inputs and targets
            whose rows do not fit.

    Example:
        >>> net = torch.nn.Linear(4, 3)
        >>> model, criterion = DataParallelModel(net, ["cpu"] * 2), DataParallelCriterion(torch.nn.CrossEntropyLoss())
        >>> step = TrainStep(model, criterion, torch.optim.SGD(net.parameters(), lr=0.1), micro_batch_size=2)
        >>> step(torch.zeros(7, 4), torch.tensor([0, 1, 2, 0, 1, -100, -100])).shape  # the mean over 5 of 7 rows
        torch.Size([])
    """

    instead: ClassVar[Mapping[str, str]] = {
        "backward": "step(inputs, targets) runs the backward, and updates",
        "eval": "call model.eval()",
        "parameters": "call model.parameters()",
        "step": "step(inputs, targets) updates",
        "to": "move the module before it is wrapped",
        "train": "call model.train()",
        "zero_grad": "leave it out, since each update begins without gradients",
    }
    model: ParallelModel = setting()
    criterion: DataParallelCriterion = setting()
    optimizer: Optimizers = setting()
    scheduler: Schedulers | None = setting()
    precision: Precision = setting()
    cut: Cut | None = setting()
    reproducible: bool | Literal["bits"] = setting()
    max_grad_norm: float | None = setting(_check_norm)
    skip_above: float | None = setting(_check_norm)
    surround: Surround | None = setting(_check_surround)

    @naming_arguments
    def __init__(
        self,
        model: nn.Module,
        criterion: DataParallelCriterion,
        optimizer: Optimizers,
        *,
        micro_batch_size: int | Literal["auto"] | None = None,
        precision: PrecisionName | Precision = "fp32",
        max_grad_norm: float | None = None,
        skip_above: float | None = None,
        scheduler: Schedulers | None = None,
        cut: Cut | None = None,
        reproducible: bool | Literal["bits"] = False,
        surround: Surround | None = None,
    ) -> None:
        _check_arguments(criterion, micro_batch_size, cut, reproducible)
        self._strategy = gradient_sync(model, criterion)
        self.model = cast(ParallelModel, model)
        # State of an optimizer is loaded to where its parameters are.
        criterion.to(self.model.devices[0])
        self.reproducible = reproducible
        arithmetic = Arithmetic
        if reproducible:
            from ..reproducible.exact import ARITHMETIC

            arithmetic = ARITHMETIC[reproducible]
        self._arithmetic = arithmetic(self.model, criterion, cut)
        self._arithmetic.check(each_optimizer(optimizer), micro_batch_size)
        self.criterion = criterion
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.max_grad_norm = max_grad_norm
        self.skip_above = skip_above
        self.precision = Precision(precision)
        self.cut = cut
        self.surround = surround
        self.grad_norm: Tensor | None = None
        self._is_auto = micro_batch_size == "auto"
        rows = micro_batch_size if isinstance(micro_batch_size, int) else None
        self._limit = (
            Limit("rows", rows) if cut is None or rows is not None else Limit("cost", cut.limit)
        )
        self._has_ranks = collectives.world_size() > 1
        self._draws_as_rank = self._has_ranks and not self._arithmetic.number_rows
        has_sums = criterion.copies.collectives.sums_rows
        if self._is_auto and self._has_ranks and (has_sums or meets_others(model)):
            raise ValueError(
                "micro_batch_size='auto' with batch norm over all ranks or SumOverRows, where others wait for a rank that runs "
                "out of memory, expected a number, as memory.fit finds it"
            )
        self._open_sync = self._arithmetic.opener(self._strategy)
        self._forwards = Forwards(
            self.model,
            criterion,
            self.precision,
            self._limit,
            keeps_order=cut is not None,
            prepare=self._arithmetic.prepare(),
        )
        self._trained = self._forwards.trained
        # Batches may show another kind.
        self._kind = self._first_kind()
        self._reduction = getattr(criterion.module, "reduction", None)
        self._has_compared = False  # the settings of the ranks
        self._weight_before = 0.0  # The weight of the last update, over everything.
        self._last = LastUpdate()
        self._updates = 0
        self._loaded = 0  # Updates before the state that was loaded.
        # the first sample of an earlier batch, for a rank that has none
        self._example: Sequence[object] = ()
        self._logged: Sequence[LoggedMeans] = ()  # The values beside the last loss.
        self._update: Update | None = None  # An update in progress.
        check_optimizers(
            ParameterUpdate(each_optimizer(optimizer), self._trained), each_scheduler(scheduler)
        )

    def __repr__(self) -> str:
        """Returns a line for the model, the criterion and the optimizers, and one for each setting."""
        devices = ", ".join(map(str, self.model.devices))
        settings = {
            "model": f"{type(self.model).__name__} of {type(self.model.module).__name__} on {devices}",
            "criterion": " ".join(repr(self.criterion).split()),
            "optimizer": ", ".join(type(each).__name__ for each in each_optimizer(self.optimizer)),
            "micro_batch_size": "auto" if self._is_auto else self.micro_batch_size,
            "precision": self.precision.name,
            "max_grad_norm": self.max_grad_norm,
            "skip_above": self.skip_above,
            "cut": self.cut and type(self.cut).__name__,
            "reproducible": self.reproducible,
            "surround": name_of(self.surround),
        }
        lines = [f"  {name}: {value}" for name, value in settings.items() if value]
        return "\n".join(["TrainStep", *lines])

    @overload
    def __call__(
        self, inputs: Any, targets: Any = (), *, return_outputs: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def __call__(
        self, inputs: Any, targets: Any = (), *, return_outputs: Literal[True]
    ) -> tuple[Tensor, PerReplica]: ...
    @naming_arguments
    def __call__(
        self, inputs: Any, targets: Any = (), *, return_outputs: bool = False
    ) -> Tensor | tuple[Tensor, PerReplica]:
        """Trains on one effective batch, or on this rank's rows of it.

        Returns its loss, a detached scalar.

        Args:
            inputs: of the model; a tuple fills its positional arguments, a mapping its keyword
                arguments; or samples.
            targets: arguments of the criterion after the output; a tuple fills several, ``()``
                none.
            return_outputs: returns the detached outputs of this rank's rows too, one entry for each
                micro-batch and replica. 11 rows with ``micro_batch_size=2`` on three devices make
                entries of 2, 2, 2, 2, 2 and 1 rows.
        """
        outputs: list[PerReplica] = []
        is_only = self._update is None
        try:
            with self._updating(is_last=True) as (update, hooks):
                collected = outputs if return_outputs else None
                run = BatchRun(self._open(inputs, targets), True, collected)
                self._forwards.begin(run)
                update.add(run)
                loss = self._apply(update, hooks)
        except ChangedLossError:
            # Ranks would have to agree that they run the update again.
            if self._has_ranks or not is_only:
                raise
            return self(inputs, targets, return_outputs=return_outputs)  # type: ignore[call-overload,no-any-return]
        return (loss, join_outputs(outputs, self.model.out_dims)) if return_outputs else loss

    @naming_arguments
    def add(self, inputs: Any, targets: Any = ()) -> None:
        """Accumulates the gradients of some more rows; nothing is updated before :meth:`apply`.

        An ``add`` that fails drops all rows since the last update, with a note on its error.
        """
        is_only = self._update is None
        try:
            with self._updating(is_last=False) as (update, _):
                run = BatchRun(self._open(inputs, targets), False)
                self._forwards.begin(run)
                update.add(run)
                update.end_part()
        except ChangedLossError:
            if self._has_ranks or not is_only:
                raise
            self.add(inputs, targets)

    @naming_arguments
    def apply(self) -> Tensor:
        """Updates with the gradients of all rows that were added, and returns their loss."""
        with self._updating(is_last=True) as (update, hooks):
            return self._apply(update, hooks)

    def metrics(self) -> dict[str, float]:
        """Returns the values that the criterion returned beside the loss, for all rows of the last
        update, by the names of their entries.

        A criterion returns ``{"loss": loss, "accuracy": accuracy}``, or a tuple, whose entries have
        numbers for names. An entry ``loss`` is the loss. Without one, entries with a gradient are
        losses, which are added. All others are values to log. Those are means over the rows, as a
        loss is, or numbers. The host waits for the devices. Under torchrun every rank must call
        this.

        Raises:
            ValueError: the value of the whole batch is unknown, as of a mean that is not known.
        """
        return merge_logged(self._logged)

    def _open(self, inputs: Any, targets: Any) -> Batch:
        if self.cut is None:
            return Batch(*self._forwards.mark(inputs, targets))
        batch = self.cut.open(
            inputs,
            targets,
            self._forwards.mark,
            unit=self._limit.unit,
            is_strict=not self._is_auto,
        )
        self._example = batch.take_example(self._example)
        if not batch.has_example and collectives.world_size() > 1 and meets_others(self.model):
            raise RuntimeError(
                "this rank had no sample in its first batch, expected one: others wait for its batch norm or sum over all rows"
            )
        return batch

    @contextmanager
    def _updating(self, *, is_last: bool) -> Iterator[tuple[Update, ExitStack]]:
        """Surrounds a part of an update, whose last one makes it.

        Hooks of parameters are off until the second result is closed.

        If it fails, all rows since the last update are dropped: nobody knows which rows the
        gradients are of.
        """
        if not self._has_compared:
            self._compare(is_last=is_last)
        numbers = (
            self._strategy.random_numbers(is_last=is_last) if self._draws_as_rank else NO_BLOCK
        )
        hooks = ExitStack()
        for tensor in self._trained.values():
            if any(hooks_of(tensor)):
                hooks.enter_context(without_hooks([tensor]))
        surround = self.surround or nullcontext
        around = self._arithmetic.surround()
        with hooks, numbers, around:
            update = self._update or self._begin()
            self._update = None
            try:
                # An error of surround() is told to the other ranks, too.
                with self._forwards.updating(update), surround():
                    if update.has_parts:
                        update.optimizers.check_gradients()
                    yield update, hooks
            except BaseException as error:
                if self._has_ranks:
                    collectives.explain_timeout(error)
                elif isinstance(error, ChangedLossError):
                    self.criterion.forget()
                    self._kind = self._first_kind()
                if update.has_parted:  # The other ranks learn of it in the next reduction.
                    failure = f"failed with {type(error).__name__}: {error}"
                    self._last = self._last._replace(failure=failure)
                raise
            if not is_last:
                self._update = update

    def _compare(self, *, is_last: bool) -> None:
        """Compares the settings of the ranks, before the first update."""
        try:
            if self._has_ranks:
                self._settings().compare()
        except BaseException as error:
            collectives.tell_failure(error)
            raise
        if self._is_auto or self._forwards.may_split or not is_last:
            _warn_of_hooks(self.model)
        self._has_compared = True

    def _begin(self) -> Update:
        """Returns a new update. The work on its batches is chosen from the settings."""
        reduction = getattr(self.criterion.module, "reduction", None)
        if reduction != self._reduction:
            self._reduction = reduction
            self._kind = self._first_kind()
        optimizers = ParameterUpdate(
            each_optimizer(self.optimizer),
            self._trained,
            self.skip_above,
            self._arithmetic.norm,
            self._arithmetic.clip,
        )
        attempt: Callable[..., Attempt] = functools.partial(self._attempt, optimizers)
        open_work: Callable[[], Work] = attempt
        if self._is_auto:
            open_work = functools.partial(
                Recovery, attempt, self._strategy, self._forwards, self._limit
            )
        if (number_rows := self._arithmetic.number_rows) is None:
            return Update(open_work(), optimizers)
        rows = number_rows(self._arithmetic, self._forwards, self._kind, open_work, self._limit)
        return Update(rows, optimizers)

    def _first_kind(self) -> Kind:
        return self._arithmetic.kind_of(self.criterion.follow_reduction())

    def _attempt(self, optimizers: ParameterUpdate, sync: UpdateSync | None = None) -> Attempt:
        """Returns the work of one attempt at an update, with ``sync`` or a new synchronisation."""
        sync = sync or self._open_sync()
        optimizers.forget_gradients()
        accumulation = self._arithmetic.accumulation(
            self._forwards, sync, self._kind, self._weight_before
        )
        if self._kind.passes == 1:
            return accumulation
        return TwoPasses(accumulation, is_auto=self._is_auto)

    def _apply(self, update: Update, hooks: ExitStack) -> Tensor:
        reduced = update.finish(self._settings)
        hooks.close()
        self._logged = reduced.logged
        self._kind = reduced.kind
        self._weight_before = reduced.weight
        optimizers = update.optimizers
        if reduced.weight == 0:
            optimizers.forget_gradients()
            cause = (
                "no target of this batch was counted"
                if update.has_rows
                else "no rows were added before apply()"
            )
            warnings.warn(f"{cause}: nothing is updated, and its loss is nan", stacklevel=4)
            return reduced.loss
        try:
            with (
                profiled("update") if is_profiled() else NO_BLOCK,
                retrying_allocations(self.model.devices) if self._is_auto else NO_BLOCK,
            ):
                norm = self.max_grad_norm
                if self.skip_above is not None:
                    norm = norm or math.inf  # It is computed.
                optimizers.run(reduced.sync, reduced.factor, self.precision.scaler, norm)
        except BaseException as error:
            error.add_note(
                "This was the optimizer's step, which may have changed some parameters and not others: go on from a checkpoint. "
                "If memory ran out, BalancedOptimizer spreads its state over the devices; smaller micro-batches do not help"
            )
            raise
        self.grad_norm = optimizers.grad_norm
        self._updates += 1
        if self._has_ranks:
            states = [optimizer.state for optimizer in optimizers.optimizers]
            self._last = LastUpdate("", states, versions([*self._trained.values()]))
        if self.scheduler is not None and optimizers.has_stepped:
            step_schedulers(each_scheduler(self.scheduler))
        return reduced.loss

    def _settings(self) -> Settings:
        arguments: dict[str, Hashable] = {
            "precision": self.precision.name,
            "max_grad_norm": self.max_grad_norm,
            "skip_above": self.skip_above,
            "micro_batch_size='auto'": self._is_auto,
            "unit of the micro-batches": self._limit.unit,
            "number of updates of the loaded state": self._loaded,
            "reproducible": self.reproducible,
            **self._arithmetic.facts(self._limit),
        }
        return Settings(self._objects(), arguments, self._last)

    @property
    def micro_batch_size(self) -> int | None:
        """Rows per device at most in one forward. With ``"auto"``, the number settled on so far."""
        limit = self._limit
        return int(limit.value) if limit.unit == "rows" and limit.value is not None else None

    @micro_batch_size.setter
    def micro_batch_size(self, rows: int | None) -> None:
        _check_micro_batch_size(rows, "or None for the whole batch")
        self._arithmetic.check((), rows)
        self._limit.set("rows", rows)

    @property
    def micro_batch_cost(self) -> float | None:
        """Cost per device at most in one forward, for :class:`ByCost`.

        With ``"auto"``, the cost settled on so far.
        """
        return self._limit.value if self._limit.unit == "cost" else None

    @micro_batch_cost.setter
    def micro_batch_cost(self, cost: float | None) -> None:
        check_cost("micro_batch_cost", cost)
        self._limit.set("cost", cost)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state between two updates, for :class:`Checkpoints`.

        Under torchrun every rank must call this.

        The names are those of the module, with any number of devices or ranks. Tensors are not
        copied.

        Raises:
            RuntimeError: rows were added and not applied.
        """
        self._refuse_added("state_dict()")
        return {
            **self.trained_state().save(),
            "weight_before": self._weight_before,
            "updates": self._updates,
            "limit": {self._limit.unit: self._limit.value},
            "bits": self._arithmetic.facts(self._limit),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes a state, which any number of devices or ranks may have saved.

        With another number, accelerators get new seeds, all different, and the random numbers of
        Python and numpy stay.

        Raises:
            ValueError: optimizers or schedulers of another number or class or with other
                parameters, or not a whole state.
            RuntimeError: the module has other parameters, or rows were added and not applied.
        """
        self._refuse_added("load_state_dict()")
        state = self.trained_state()
        state.check(state_dict)
        state.load(state_dict)
        saved = state_dict.get("bits")
        facts = self._arithmetic.facts(self._limit)
        if facts and saved != facts:
            warnings.warn(
                f"reproducible='bits' goes on with {facts}, but the state was saved with {saved}, expected the same: "
                "from here on the bits are those of another run",
                stacklevel=2,
            )
        self._weight_before = state_dict["weight_before"]
        self._last = self._last._replace(failure="")
        # Ranks compare it, since shards have no checksums.
        self._loaded = self._updates = state_dict.get("updates", 0)
        if self._is_auto:  # a number given by hand stays, and rows are not a cost
            self._limit.set(self._limit.unit, state_dict["limit"].get(self._limit.unit))

    def _refuse_added(self, call: str) -> None:
        """Raises ``RuntimeError`` for rows that are not in an update yet."""
        if self._update is not None:
            raise RuntimeError(
                f"rows were added that are not in an update yet, expected apply() before {call}"
            )

    def digest(self) -> str:
        """Returns a digest of the parameters of model and criterion: names, dtypes, shapes and bits.

        It is that of a checkpoint of this step without shards. Two runs with one digest have the same parameters.
        Under torchrun every rank must call this.
        """
        return self.trained_state().digest()

    def _objects(self) -> TrainedObjects:
        optimizers = each_optimizer(self.optimizer)
        schedulers = each_scheduler(self.scheduler)
        return TrainedObjects(
            self.model, self.criterion, optimizers, schedulers, self.precision, self._trained
        )

    def trained_state(self) -> "TrainedState":
        """Returns the objects that are trained, as the state of :class:`Checkpoints`."""
        from ..state.state import TrainedState

        return TrainedState(*self._objects())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_update": None}  # a copy has no gradients


def _warn_of_hooks(model: ParallelModel) -> None:
    """Warns of hooks of modules' backwards, which get a part of the batch."""
    names = [name for name, module in model.named_modules() if any(backward_hooks_of(module))]
    if names:
        warnings.warn(
            f"{names[0] or 'the model'} has a hook of its backward, which gets gradients of one micro-batch, replica or rank, "
            "expected a hook that changes nothing, or one of a parameter, called once per update (docs/limits.md)",
            stacklevel=7,
        )


def _check_arguments(
    criterion: object, micro_batch_size: object, cut: Any, reproducible: Any
) -> None:
    """Raises ``TypeError`` for a criterion of another kind, ``ValueError`` for settings out of
    their range.
    """
    if not isinstance(criterion, DataParallelCriterion):
        more = SEVERAL if isinstance(criterion, (list, tuple, dict)) else ""
        raise TypeError(
            f"the criterion is a {type(criterion).__name__}, expected a DataParallelCriterion: wrap it in one{more}"
        )
    if micro_batch_size != "auto":
        _check_micro_batch_size(micro_batch_size, "None or 'auto'")
    if not (isinstance(reproducible, bool) or reproducible == "bits"):
        raise ValueError(f"reproducible={reproducible!r}, expected True, False or 'bits'")
    check_type("cut", cut, Cut | None, "ByCost(...), or None for equal rows")
    if cut is not None and cut.limit is not None and micro_batch_size is not None:
        raise ValueError(
            f"micro_batch_size={micro_batch_size!r} and ByCost(limit=...) were given, expected one of them"
        )


def _check_micro_batch_size(rows: Any, otherwise: str) -> None:
    """Raises ``ValueError`` unless ``rows`` is a positive integer or None.

    ``otherwise`` names what else is possible.
    """
    if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 1):
        raise ValueError(
            f"micro_batch_size={rows!r}, expected a positive number of rows per device, {otherwise}"
        )
