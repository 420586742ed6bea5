"""``TrainStep``: an effective batch in micro-batches that fit, and one exact update."""

import warnings
from contextlib import nullcontext
from typing import Any, Literal, overload

from torch import Tensor

from ..batch.cost_cuts import Combine
from ..batch.microbatches import join_outputs
from ..batch.nested import spread
from ..batch.per_replica import PerReplica
from ..loss.batch_losses import losses_of_batch
from ..loss.criterion import DataParallelCriterion
from ..loss.weighting import Weight
from ..runtime.precision import Precision
from .arguments import check_arguments
from .cost_options import Collate, Cost, CostOptions, make_cuts
from .gradient_sync import gradient_sync
from .gradients import trained_tensors
from .micro_batches import Batch, Model, run_forward
from .padded_batches import Trim
from .recovery import recovering
from .step_state import StepState
from .two_passes import TwoPasses
from .update import Optimizers, Schedulers, each_scheduler
from .window import Window

__all__: list[str] = []


class TrainStep(StepState):
    """Trains on one effective batch per call, in micro-batches, with the loss and the gradients of the whole batch.

    ``loss = step(inputs, targets)`` cuts the batch, runs forward and backward of each micro-batch, and updates once.
    ``step.add(inputs, targets)`` and ``step.apply()`` are its two halves, for a loader that yields micro-batches. A batch without
    a counted target changes nothing: its loss is nan, with a warning. A step that failed before its update can be repeated.

    A loss whose rows depend on each other (``whole=True``, :class:`AdditiveLoss`) takes two forwards for each of several
    micro-batches, and ``add`` keeps its rows until ``apply``.

    Under torchrun each rank passes its own rows, or none. Ranks compare their settings, and make the same sequence of
    ``step(...)`` or ``apply()`` calls. Gradients are reduced once per update, shards (FSDP) in every micro-batch. A failure of
    DDP raises on every rank.

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
        cost: cuts the batch by the cost of its rows, so all devices carry the same: ``cost(inputs)``, or of each sample.
        collate: makes ``(inputs, targets)`` of any list of samples. A batch is such a list then: ``step(samples)``.
        trim: dimension that is cut to the largest cost in a shard, or a mapping to it from the names of arguments.
        combine: cost of a shard, from the costs of its rows; ``None`` is rows x longest, the size of a padded shard.
        micro_batch_cost: cost per device at most in one forward, in place of ``micro_batch_size``.

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

    def __init__(
        self,
        model: Model,
        criterion: DataParallelCriterion,
        optimizer: Optimizers,
        *,
        micro_batch_size: int | Literal["auto"] | None = None,
        precision: str | Precision = "fp32",
        max_grad_norm: float | None = None,
        scheduler: Schedulers | None = None,
        cost: Cost | None = None,
        collate: Collate | None = None,
        trim: Trim | None = None,
        combine: Combine | None = None,
        micro_batch_cost: float | None = None,
    ) -> None:
        self._sync = gradient_sync(model, criterion)
        check_arguments(criterion, micro_batch_size, max_grad_norm, scheduler)
        options = CostOptions(cost, collate, trim, combine, micro_batch_cost)
        self._cuts = make_cuts(model, criterion, self._sync, options, micro_batch_size)
        self.model, self.criterion, self.optimizer, self.scheduler = model, criterion, optimizer, scheduler
        self.max_grad_norm = max_grad_norm
        self.precision, self._trained = Precision(precision), trained_tensors(model, criterion)
        self._window = Window(self._sync)
        limit = micro_batch_size if micro_batch_cost is None else micro_batch_cost
        self._attempts = recovering(model, criterion, self._cuts, self._sync, limit)
        if criterion.is_coupled:
            self._attempts = TwoPasses(
                model, criterion, self.precision, self._cuts, self._sync, self._window, self._adding, self._attempts
            )
        self._check_optimizers()

    @overload
    def __call__(self, inputs: Any, targets: Any = (), *, return_outputs: Literal[False] = False) -> Tensor: ...
    @overload
    def __call__(self, inputs: Any, targets: Any = (), *, return_outputs: Literal[True]) -> tuple[Tensor, PerReplica]: ...
    def __call__(self, inputs: Any, targets: Any = (), *, return_outputs: bool = False) -> Tensor | tuple[Tensor, PerReplica]:
        """Trains on one effective batch, or on this rank's rows of it. Returns its loss, a detached scalar.

        Args:
            inputs: of the model; a tuple fills its positional arguments, a mapping its keyword arguments; or samples.
            targets: arguments of the criterion after the output; a tuple fills several, ``()`` none. ``collate`` makes them.
            return_outputs: returns the detached outputs of this rank's rows too, one entry for each micro-batch and replica.
                11 rows with ``micro_batch_size=2`` on three devices make entries of 2, 2, 2, 2, 2 and 1 rows.
        """
        self._compare_settings()
        outputs: list[PerReplica] = []
        self._attempts.accumulate(self._accumulate, Batch(inputs, spread(targets), True, outputs if return_outputs else None))
        return (self._apply(), join_outputs(outputs, self.model.out_dims)) if return_outputs else self._apply()

    def add(self, inputs: Any, targets: Any = ()) -> None:
        """Accumulates the gradients of some more rows; nothing is updated before :meth:`apply`.

        An ``add`` that fails drops all rows since the last update, with a note on its error.
        """
        self._compare_settings()
        self._attempts.accumulate(self._accumulate, Batch(inputs, spread(targets), is_whole=False, outputs=None))

    def apply(self) -> Tensor:
        """Updates with the gradients of all rows that were added, and returns their loss."""
        self._compare_settings()
        return self._apply()

    def _accumulate(self, batch: Batch) -> None:
        with self._adding() as accumulation:
            micro_batches, targets = self._cuts.cut(batch, self._attempts.limit)
            losses = batch.losses or losses_of_batch(self.criterion, targets, is_whole=batch.is_whole)
            accumulation.begin_batch(losses)
            for micro_batch in micro_batches:
                last = batch.is_whole and micro_batch.followers == 0
                with nullcontext() if last else self._sync.accumulating():
                    sums = run_forward(self.model, self.precision, micro_batch, losses, batch.outputs)
                    accumulation.backward(sums, micro_batch.followers, last=last)

    def _apply(self) -> Tensor:
        loss, weight, factor = self._attempts.finish(self._accumulate, self._finish)
        update = self._update()
        with self._window.ending(weight):
            if weight == 0:
                update.forget_gradients()
                warnings.warn("no target of this batch was counted: nothing is updated, and its loss is nan", stacklevel=3)
                return loss
            with self._telling_failures(), self._attempts.retrying():
                update.run(self._sync, factor, self.precision.scaler, self.max_grad_norm)
            for scheduler in each_scheduler(self.scheduler) if update.has_stepped else ():
                scheduler.step()
            self.grad_norm = update.grad_norm
            return loss

    def _finish(self) -> tuple[Tensor, float, Weight]:
        with self._adding() as accumulation:
            return accumulation.finish(self.criterion.minimum, self._settings())
