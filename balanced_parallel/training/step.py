"""``TrainStep``: an effective batch in micro-batches that fit, and one exact update.

Dividing each micro-batch's loss by the number of micro-batches is exact only when all count the same number of terms. Here
gradients of sums are accumulated, with their weights, and divided once, so nothing has to be fetched ahead to be counted.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor, nn

from ..batch.microbatches import as_arguments, count_micro_batches, cut_batch, detach_outputs, join_outputs
from ..batch.nested import spread
from ..batch.per_replica import PerReplica
from ..batch.row_marks import Arguments
from ..batch.rows import count_rows
from ..batch.scattering import split_sizes
from ..loss.criterion import DataParallelCriterion
from ..loss.partial_sums import Terms
from ..loss.weighting import Weight
from ..replicas.model import DataParallelModel
from ..replicas.sync_batchnorm import meets_other_ranks
from ..runtime.collectives import max_over_ranks, sum_over_ranks, world_size
from ..runtime.precision import Precision
from .accumulation import Window, scale_gradients
from .arguments import RankModel, check_step
from .update import Optimizers, Schedulers, Update, each_optimizer, each_scheduler, trained_tensors

__all__: list[str] = []


class TrainStep:
    """Trains on one effective batch per call, in micro-batches, with the loss and the gradients of the whole batch.

    ``loss = step(inputs, targets)`` cuts the batch, runs forward and backward of each micro-batch, and updates once.
    ``step.add(inputs, targets)``, any number of times, and ``step.apply()`` are its two halves, for a loader that yields
    micro-batches; they may be ragged, and some may count nothing. Gradients stay in ``.grad`` until the next window begins.

    Under torchrun each rank passes its own rows, which may be fewer than another rank's, or none; every rank makes the same
    sequence of ``step(...)`` or ``apply()`` calls, and gradients are reduced once per update.

    A step that failed before its update can be repeated, with the result that it would have had. Under torchrun, a backward
    that fails while gradients are reduced raises on every rank.

    A window without a single counted target (on any rank) changes nothing: no update, no step of the scheduler or the
    scaler; its loss is nan, and a warning says so.

    Args:
        model: a :class:`DataParallelModel`, or the model of :func:`parallelize`.
        criterion: a :class:`DataParallelCriterion`.
        optimizer: over the model's parameters, or a list of optimizers over parts of them. They step together: with ``"fp16"``
            an overflow in the gradients of one skips all.
        micro_batch_size: rows per device at most in one forward; ``None`` runs the whole batch at once.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a :class:`Precision`: autocast in every replica, and with ``"fp16"`` one
            gradient scaler.
        max_grad_norm: clips the norm of the true gradient over all optimizers, as ``torch.nn.utils.clip_grad_norm_`` does.
        scheduler: stepped once after each update that was made; a list of schedulers likewise.

    Raises:
        TypeError: a model, a criterion, an optimizer or a scheduler of another kind.
        ValueError: a setting out of its range, or a parameter in two optimizers; at the call, inputs and targets whose rows do
            not fit.
    """

    def __init__(
        self,
        model: DataParallelModel | RankModel,
        criterion: DataParallelCriterion,
        optimizer: Optimizers,
        *,
        micro_batch_size: int | None = None,
        precision: str | Precision = "fp32",
        max_grad_norm: float | None = None,
        scheduler: Schedulers | None = None,
    ) -> None:
        check_step(model, criterion, micro_batch_size, max_grad_norm)
        each_scheduler(scheduler)
        self.model = model
        self.criterion = criterion
        self.optimizer = optimizer
        self.micro_batch_size = micro_batch_size
        self.precision = Precision(precision)
        self.max_grad_norm = max_grad_norm
        self.scheduler = scheduler
        self._ranks = None if isinstance(model, DataParallelModel) else model
        self._replicas = (
            [model.replicas.gradients, criterion.replicas.gradients]
            if isinstance(model, DataParallelModel)
            else [criterion.replicas.gradients]
        )
        self._trained = trained_tensors(cast(nn.Module, model), criterion)
        dtypes = {parameter.dtype for parameter in self._trained.values()}
        self._has_half = torch.float16 in dtypes
        self._dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self._meets_ranks = world_size() > 1 and meets_other_ranks(model.modules())
        self._window: Window | None = None
        self._next_update()
        self._last_weight = 0.0  # of the last window: the best guess for a window that is added bit by bit

    @overload
    def __call__(self, inputs: Any, targets: Any, *, return_outputs: Literal[False] = False) -> Tensor: ...

    @overload
    def __call__(self, inputs: Any, targets: Any, *, return_outputs: Literal[True]) -> tuple[Tensor, PerReplica]: ...

    def __call__(self, inputs: Any, targets: Any, *, return_outputs: bool = False) -> Tensor | tuple[Tensor, PerReplica]:
        """Trains on one effective batch (this rank's rows of it): ``add`` and ``apply`` in one.

        Args:
            inputs: a tensor or another structure for the model's one argument; a tuple is spread over its positional
                arguments, a mapping over its keyword arguments.
            targets: what follows the output in the criterion's arguments; a tuple is spread over them.
            return_outputs: returns the outputs too, as metrics need them.

        Returns:
            The loss of the effective batch over all replicas, micro-batches and ranks: a detached scalar. With
            ``return_outputs`` also the detached outputs of this rank's rows, in their order, where they were computed:
            one entry for each micro-batch and replica. 11 rows with ``micro_batch_size=2`` on three devices make entries of
            2, 2, 2, 2, 2 and 1 rows, and ``gather(outputs)`` the output of all 11. An empty batch makes none.
        """
        outputs: list[PerReplica] | None = [] if return_outputs else None
        self._accumulate(inputs, targets, reduce_last=True, outputs=outputs)
        loss = self._finish()
        return loss if outputs is None else (loss, join_outputs(outputs, self.model.out_dims))

    def add(self, inputs: Any, targets: Any) -> None:
        """Accumulates the gradients of some more rows; nothing is updated before :meth:`apply`."""
        self._accumulate(inputs, targets, reduce_last=False)

    def apply(self) -> Tensor:
        """Divides what was accumulated by its weight, clips, updates, and returns the loss of all that was added."""
        return self._finish()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_window": None}  # a copy has no gradients

    def _finish(self) -> Tensor:
        window = self._window or self._open_window()
        with self._dropping_on_failure():
            for replicas in self._replicas:
                replicas.reduce()
            if self._ranks is not None and not window.reduced:
                self._reduce_alone(window, self._ranks)
            total, weight = self._totals(window)
            weight = max(weight, self.criterion.minimum)
            self._window = None
            self._last_weight = weight
            if weight == 0:
                self._next_update().forget_gradients()
                warnings.warn("no target of this batch was counted: nothing is updated, and its loss is nan", stacklevel=3)
                return torch.full_like(window.total, torch.nan)
            divisor = weight if window.divides else 1.0
            self._update(window.reference * world_size() / divisor)  # the reducer divided by the number of ranks
            loss = total / divisor
            return loss if isinstance(loss, Tensor) else window.total.fill_(loss)

    def _accumulate(self, inputs: Any, targets: Any, *, reduce_last: bool, outputs: list[PerReplica] | None = None) -> None:
        window = self._window or self._open_window()
        micro_batches = self._cut(as_arguments(inputs), spread(targets))
        accumulating = len(micro_batches) - reduce_last
        with self._dropping_on_failure():
            losses = self._weigh_before(window, spread(targets), is_whole=reduce_last)
            run = functools.partial(self._run, window, losses, scales=self._scales(window), kept=outputs)
            # gradients stay where they are: with the replicas, with the rank
            with self.model.no_sync(), self.criterion.replicas.gradients.no_sync():
                for index, micro_batch in enumerate(micro_batches[:accumulating]):
                    run(*micro_batch, left=len(micro_batches) - index, reduce=False)
            for micro_batch in micro_batches[accumulating:]:
                run(*micro_batch, left=1, reduce=True)

    def _weigh_before(self, window: Window, targets: tuple[Any, ...], *, is_whole: bool) -> Callable[..., Terms]:
        """Returns how micro-batches compute their losses. What the targets alone say about divisors is counted here, once."""
        weight = self.criterion.weigh_targets(*targets)
        if weight is not None:
            window.weigh([weight])
            return self.criterion.sums
        divisors = self.criterion.divisors_of_targets(*targets) if is_whole else None
        if divisors is None:
            return self.criterion.terms
        window.divides = False  # each micro-batch divides its sums by what the whole batch counts
        total = sum_over_ranks(torch.tensor(divisors, dtype=torch.float64)).clamp(min=self.criterion.minimum)
        return functools.partial(self.criterion.divided_terms, total.tolist())

    def _open_window(self) -> Window:
        self._next_update().forget_gradients()
        nothing = torch.zeros((), dtype=self._dtype, device=self.model.devices[0])  # a rank without rows has the others' loss
        self._window = window = Window(nothing, divides=self.criterion.reduction != "sum")
        if self._ranks is not None:  # what all ranks know without a message: what the last one weighed
            window.settle(self._last_weight / world_size())
        return window

    @contextlib.contextmanager
    def _dropping_on_failure(self) -> Iterator[None]:
        """A window that failed halfway holds gradients of nobody knows which rows: the next call starts a new one."""
        try:
            yield
        except BaseException:
            self._window = None
            for replicas in self._replicas:
                replicas.drop()
            raise

    def _cut(self, arguments: Arguments, targets: tuple[Any, ...]) -> list[tuple[Arguments, tuple[Any, ...]]]:
        """This rank's micro-batches. None for a batch with no rows, unless other ranks wait in a layer for every rank."""
        arguments = self.model.mark(arguments)
        marked, target_dim = self.criterion.mark(targets, {}, self.model.out_dims)
        rows = count_rows(arguments, self.model.dim)
        if rows is None:
            return [(arguments, marked.inputs)]
        count = count_micro_batches(rows, self.micro_batch_size, self.model.split or len(self.model.devices))
        if self._meets_ranks:
            count = max_over_ranks(count)
        return cut_batch(arguments, marked.inputs, split_sizes(rows, count), (self.model.dim, target_dim))

    def _run(
        self,
        window: Window,
        losses: Callable[..., Terms],
        arguments: Arguments,
        targets: tuple[Any, ...],
        *,
        left: int,
        reduce: bool,
        scales: bool,
        kept: list[PerReplica] | None,
    ) -> None:
        """Forward and backward of one micro-batch, the ``left``-th from the end as far as is known."""
        with self.precision.autocast(self.model.devices):
            terms = losses(self._forward(arguments, kept), *targets)
            weight = window.count(terms)
            to_come = weight * (left - 1)
            if scales:
                self._settle_reference(window, to_come, reduce=reduce)
            elif self._ranks is None:
                window.foresee(to_come)
        if self._ranks is None or not reduce:
            self._backward(window, terms.sums)
        else:
            self._reduce([*terms.sums, *self._ranks.completion.roots()], window, self._ranks)

    def _forward(self, arguments: Arguments, kept: list[PerReplica] | None) -> PerReplica:
        outputs: PerReplica = self.model(*arguments.inputs, **arguments.kwargs)
        if kept is not None:
            kept.append(detach_outputs(outputs))
        return outputs

    def _reduce_alone(self, window: Window, ranks: RankModel) -> None:
        """Reduces what this rank has accumulated, if anything, with no rows left to run."""
        zero = ranks.forward_nothing()
        if self._scales(window):
            self._settle_reference(window, 0.0, reduce=True)
        self._reduce([zero], window, ranks)

    def _reduce(self, roots: list[Tensor], window: Window, ranks: RankModel) -> None:
        """The backward that sums over the ranks."""
        roots = [root for root in roots if root.requires_grad]
        with ranks.completion.reducing(window.total, window.weight):
            if roots:
                self._backward(window, roots)
        window.reduced = True

    def _backward(self, window: Window, roots: list[Tensor]) -> None:
        scaler = self.precision.scaler_on(self.model.devices[0])
        roots = [root for root in roots if root.requires_grad] or roots  # a replica may have used nothing that learns
        divided = None if window.reference == 1 else [torch.full_like(root, 1 / window.reference) for root in roots]
        torch.autograd.backward(roots if scaler is None else [scaler.scale(root) for root in roots], divided)
        window.has_gradients = True

    def _settle_reference(self, window: Window, to_come: Weight, reduce: bool) -> None:
        factor = window.expect(to_come, self._last_weight, settled=reduce)
        if factor != 1:
            scale_gradients(self._trained.values(), factor)
            for replicas in self._replicas:
                replicas.scale(factor)

    def _scales(self, window: Window) -> bool:
        """Whether gradients are divided while they accumulate."""
        kind = self.model.devices[0].type
        ambient = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        return (ambient or self.precision.name == "fp16" or self._has_half) and window.divides

    def _totals(self, window: Window) -> tuple[Tensor | float, float]:
        """The sum of all losses and of all weights, over all ranks."""
        return (window.total, float(window.weight)) if self._ranks is None else self._ranks.completion.take_totals()

    def _next_update(self) -> Update:
        return Update(each_optimizer(self.optimizer), self._trained)

    def _update(self, factor: float) -> None:
        """One step of the optimizers on the gradients times ``factor``, and of the schedulers if it was not skipped."""
        update, scaler = self._next_update(), self.precision.scaler
        with update.unscaled(scaler):
            update.multiply(factor, bucketed=self._ranks is not None)
            if self.max_grad_norm is not None:
                update.clip(self.max_grad_norm)
            has_stepped = update.take(scaler)
        for scheduler in each_scheduler(self.scheduler) if has_stepped else ():
            scheduler.step()
