"""``BalancedTrainer``: the Trainer of transformers, with the loss and the gradients of the whole
batch.

A window is all rows of one update, of all micro-batches, devices and ranks. Trainer gets batches,
clips, updates, logs and saves. The rows of a window are an update of the engine::

    get_batch_samples   the micro-batches of the window
    training_step       of Trainer, whose compute_loss hands the rows to an Accumulation
                        (training/update.py). It calls the real compute_loss on each device
    prediction_step     of Trainer, on each device. Outputs are in the order of the rows

Means in a loss are found as those in a criterion of a user (loss/means.py).
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    unwrap_peft_model,
)
from transformers.trainer_pt_utils import nested_concat

from ..batch.outputs import PerReplica
from ..batch.rows import (
    Arguments,
    Batch,
    MicroBatch,
    Rows,
    Shard,
    Whole,
    move_leaves,
    take,
)
from ..loss.copies import Calls, Checks, OwnCollectives
from ..loss.coupled import ShardStatistics
from ..loss.criterion import DataParallelCriterion
from ..loss.kinds import Kind
from ..loss.means import Additive, LossOfMeans, UnknownMeanError
from ..loss.sums import LossSum, Weight, run_backward
from ..replicas.model import DataParallelModel
from ..replicas.replicas import window
from ..runtime.collectives import gather_objects, gather_rows, rank, sum_numbers, world_size
from ..runtime.devices import DeviceLike, keep_random_state, resolve_devices
from ..runtime.values import Precision, forget_gradients
from ..strategies.ranks import GradientRecord, RankModel, RankReport, RankUpdate
from ..training.passes import TwoPasses
from ..training.settings import Settings
from ..training.snapshot import Snapshot
from ..training.sync import gradient_sync
from ..training.update import Accumulation, Attempt, BatchRun, Forwards, Limit

Inputs = dict[str, Any]  # the arguments of a model, with the rows of a batch
# A function of a trainer, a model and rows.
Function = Callable[[Any, nn.Module, Inputs], Tensor]
_SAMPLES = "_samples"  # the samples of a batch whose tensors have not one row for each


class _Running(NamedTuple):
    """A forward of a trainer."""

    # The modules of the replica that runs, by the ids of the trainer's.
    copies: Mapping[int, nn.Module]
    counts: bool  # False for rows that a sampler repeats.


_running: ContextVar[_Running | None] = ContextVar("_running", default=None)


class _Gathering:
    """An accelerator that gathers from ranks with different numbers of rows, which TRL asks for."""

    def __init__(self, accelerator: object, *, counts: bool) -> None:
        self._accelerator = accelerator
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the accelerator."""
        return getattr(self._accelerator, name)

    def gather(self, tensor: Tensor) -> Tensor:
        """Returns the rows of all ranks, without repeated ones."""
        rows = torch.atleast_1d(tensor)
        sizes = gather_objects(len(rows) if self._counts else 0)
        return gather_rows(rows[: sizes[rank()]], sizes, 0) if any(sizes) else rows

    gather_for_metrics = gather


class Task(nn.ModuleDict):
    """The modules of a trainer. The criterion computes the loss of the trainer with a replica of
    them.
    """

    def train(self, mode: bool = True) -> "Task":
        """Sets the mode of the model. Others, such as one of reference, stay as they are."""
        self["model"].train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the model, such as ``generate``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "model" not in self:
                raise
            return getattr(self["model"], name)

    def forward(self, *numbers: Tensor) -> nn.Module:
        """Returns itself. ``numbers`` are those of the rows."""
        return self


class _OneModel(RankModel):
    """The model of one device, as its trainer has wrapped it."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module = model
        self.devices = [device]
        self.split = None

    def _run_shards(self, shards: Sequence[Shard]) -> PerReplica:
        """Returns the model, which the criterion calls."""
        return PerReplica([self.module], [None])


class _TrainerSync(RankUpdate):
    """Gradients of one device, or of ranks, which ``DistributedDataParallel`` averages."""

    def __init__(self, model: RankModel, trained: Mapping[str, Tensor]) -> None:
        super().__init__(model, GradientRecord([*trained.values()]))
        self._model: Any = model.module

    def count_micro_batches(self, count: int) -> int:
        return 1

    def accumulating(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = getattr(self._model, "no_sync", nullcontext)()
        return context

    def forwards_without_rows(self, *, is_reduced: bool) -> Iterator[list[Tensor]]:
        return iter(())

    def backward(self, losses: Sequence[Tensor], divisor: Weight, local: LossSum | None) -> None:
        run_backward(losses, divisor)

    def agree(self, report: RankReport) -> RankReport:
        return sum_numbers(report)

    def finish(self, local: LossSum, settings: Callable[[], Settings]) -> LossSum:
        """Returns loss and weight over all ranks. Trainer has the same settings on all of them."""
        sums = self.agree(RankReport(*self.start(local)().tolist()))
        return LossSum(torch.full_like(local.total, sums.total), sums.weight)

    def discard(self, error: BaseException, divide: Callable[[], object] = bool) -> bool:
        """Leaves the gradients: Trainer drops them."""
        return False


class BalancedTrainer(Trainer):
    """A ``transformers.Trainer`` whose loss and gradients are those of plain PyTorch with the whole
    batch on one device.

    In one process the model runs in a :class:`DataParallelModel`, under torchrun in Trainer's
    ``DistributedDataParallel``. With accumulation, the batch is all rows of an update. Rows that a
    sampler repeats do not count. ``eval_loss`` is that of all rows. Another subclass of ``Trainer``
    comes second: ``class Exact(BalancedTrainer, SFTTrainer)``.

    Args:
        arguments, kwargs: those of ``transformers.Trainer``, or of the next class. ``args`` are
            copied.
        device_ids: devices of the replicas, as in :class:`DataParallelModel`. A batch has
            ``per_device_train_batch_size`` rows for each. ``None`` means the devices that Trainer
            would use: all GPUs in one process, or one device of each rank.

    Raises:
        ValueError: ``device_ids`` under torchrun; DeepSpeed or a ``parallelism_config``;
            ``torch_compile`` on several devices. At the first batch of a window in parts, a loss
            that is not a sum over rows: contrastive, or with that of a router.

    Example:
        >>> trainer = BalancedTrainer(model, args, train_dataset=rows)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(
        self, *arguments: object, device_ids: Sequence[DeviceLike] | None = None, **kwargs: object
    ) -> None:
        self._device_ids = device_ids
        self._gpus: int | None = None
        # True for each micro-batch to come in the window that is not repeated.
        self._counts: list[bool] = []
        self._work: Attempt | None = None  # a window in progress
        self._checks = Checks()
        self._kind: Kind | None = None  # Batches may show another kind than the first one.
        self._weight_before = 0.0
        self._evaluated: LossOfMeans | None = None  # all batches of an evaluation
        self.data_collator: Callable[..., Any]
        try:
            super().__init__(*arguments, **kwargs)
        finally:
            if self._gpus is not None:
                vars(self.args)["_n_gpu"] = self._gpus
        args: Any = copy.copy(vars(self)["args"])
        self.args = args
        if self.is_model_parallel and device_ids is not None:
            raise ValueError(
                f"device_ids={device_ids!r} was given for a model that is on several devices, expected None"
            )
        count = self._count_devices()
        # Batch sizes are multiples of the first. The second would multiply the loss.
        vars(args).update(_n_gpu=count, average_tokens_across_devices=False)
        self._train_batch_size = args.train_batch_size
        if hasattr(args, "generation_batch_size"):  # GRPO, RLOO
            args.generation_batch_size *= count
        self.devices = [args.device] if count < 2 else resolve_devices(device_ids or range(count))
        parallelism = self.is_deepspeed_enabled or getattr(
            self.accelerator, "parallelism_config", None
        )
        if parallelism or args.optim in ("lomo", "adalomo"):  # LOMO updates inside of the backward
            raise ValueError(
                f"DeepSpeed, a parallelism_config or LOMO is set (optim={args.optim!r}), expected none: use Trainer"
            )
        if args.torch_compile and len(self.devices) > 1:
            raise ValueError(
                f"torch_compile=True with {len(self.devices)} devices in one process, expected one: start torchrun"
            )
        # other models compute means, which are counted
        self.model_accepts_loss_kwargs &= bool(args.use_liger_kernel)
        self._loss_shifts_labels |= (
            type(unwrap_peft_model(self.model)).__name__
            in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        )

    def _count_devices(self) -> int:
        if self._device_ids is not None:
            return len(self._device_ids)
        # Quantized weights have no copies.
        is_whole = self.is_model_parallel or getattr(self.model, "is_quantized", False)
        return 1 if is_whole else self._gpus or 1

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator. Until the end of ``__init__``, ``args`` tell of one device, since
        other trainers refuse several, which they would give to ``nn.DataParallel``.
        """
        args, devices = self.args, self._device_ids
        if self._gpus is None:
            if devices is not None and args.world_size > 1:
                raise ValueError(
                    f"device_ids={devices!r} was given on {args.world_size} ranks, expected None: each has a device"
                )
            self._gpus = args.n_gpu
            args._n_gpu = min(args.n_gpu, 1)
        super().create_accelerator_and_postprocess()

    def __getattribute__(self, name: str) -> Any:
        """Returns an attribute. A module is its copy in the replica that runs, and the batches of a
        loader may have their samples.
        """
        value = super().__getattribute__(name)
        if name in _LOADERS:
            return functools.partial(self._keeping_samples, value)
        running = _running.get()
        if running is None:
            return value
        if name == "current_gradient_accumulation_steps":
            return 1  # The means of a window are not divided by it.
        if name == "accelerator" and world_size() > 1:
            return _Gathering(value, counts=running.counts)
        return running.copies.get(id(value), value)

    @property
    def _is_split(self) -> bool:
        steps = self.args.gradient_accumulation_steps if self.model.training else 1
        return len(self.devices) * world_size() * steps > 1

    def _modules(self) -> dict[str, nn.Module]:
        """Returns the modules of this trainer, such as the model, one of reference, and a loss."""
        return {
            name: module
            for name, module in vars(self).items()
            if isinstance(module, nn.Module) and name != "model_wrapped"
        }

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: object = None
    ) -> nn.Module:
        # one for training and evaluation
        if len(self.devices) == 1:
            wrapped: nn.Module = super()._wrap_model(model, training, dataloader)
            return wrapped
        if not isinstance(self.model_wrapped, DataParallelModel):
            modules = {
                name: self.accelerator.unwrap_model(module, keep_fp32_wrapper=False)
                for name, module in self._modules().items()
            }
            self._task = Task(modules)
            self.model_wrapped: nn.Module = DataParallelModel(self._task, self.devices)
        return self.model_wrapped

    def _prepare_input(self, data: object) -> object:
        # The engine has moved rows to their device.
        return data if _running.get() else super()._prepare_input(data)

    def _keeping_samples(self, make: Callable[..., object], *arguments: object) -> object:
        collate = self.data_collator
        # A trainer may read attributes of its collator.
        self.data_collator = functools.update_wrapper(
            functools.partial(_keep_samples, collate), collate, assigned=()
        )
        try:
            return make(*arguments)
        finally:
            self.data_collator = collate

    def _take(self, inputs: Inputs, rows: Sequence[int]) -> Inputs:
        """Returns some rows of a batch."""
        if _SAMPLES in inputs:
            samples = [inputs[_SAMPLES].entries[row] for row in rows]
            return _keep_samples(self.data_collator, samples)
        return take(inputs, rows)

    def _count_items(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """Returns the number of labels, if there are some."""
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor):
            return None
        shifted: Tensor = inputs.get("shift_labels", labels[..., int(self._loss_shifts_labels) :])
        return shifted.ne(-100).sum()

    def _clip_grad_norm(self, model: nn.Module) -> object:
        # Parameters of a loss have no part in it, as in Trainer.
        return super()._clip_grad_norm(self.model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: object = None) -> object:
        return super()._get_grad_norm(self.model, grad_norm)

    def _forwards(
        self, model: nn.Module, function: Function
    ) -> tuple[Forwards, DataParallelCriterion]:
        """Returns what runs a function on the rows of each device."""

        def compute(module: nn.Module, rows: Inputs, counts: bool) -> Tensor:
            copies: dict[int, nn.Module] = {}
            if isinstance(module, Task):
                copies = dict(zip(map(id, self._task.children()), module.children(), strict=True))
            module = _model_in(module)
            token = _running.set(_Running(copies, counts))
            try:
                if isinstance(rows, Mapping):
                    rows = dict(rows)
                    samples = rows.pop(_SAMPLES, None)
                    if not rows:
                        device = next(module.parameters()).device
                        rows = move_leaves(dict(self.data_collator(samples)), device)
                # The first of two forwards leaves no trace, and repeated rows do not.
                is_apart = not counts or (self.model.training and not torch.is_grad_enabled())
                with self.compute_loss_context_manager():
                    return function(self._apart() if is_apart else self, module, rows)
            finally:
                _running.reset(token)

        criterion = DataParallelCriterion(Additive(compute), self.devices)
        # Ranks wait for each other, also in rows that do not count.
        collectives = OwnCollectives(sums_rows=world_size() > 1)
        copies = dataclasses.replace(criterion.copies, halves=None, collectives=collectives)
        scaler = self.accelerator.scaler
        precision = Precision("fp32") if scaler is None else Precision("fp16", scaler)
        parallel = (
            model if isinstance(model, DataParallelModel) else _OneModel(model, self.devices[0])
        )
        return Forwards(parallel, copies, precision, keeps_order=False), criterion

    def _calls(
        self, model: nn.Module, function: Function, inputs: Inputs, *, counts: bool = True
    ) -> Calls:
        """Returns the calls of a function on the rows of each device."""
        forwards, _ = self._forwards(model, function)
        shards = self._batch(inputs, counts=counts).split(forwards.model.devices, None)
        return Calls(forwards.copies, forwards.model(MicroBatch(shards)), shards)

    def _apart(self) -> "BalancedTrainer":
        """Returns a copy with containers of its own, so that metrics of a forward are lost with it."""
        trainer = copy.copy(self)
        trainer.__dict__.update(
            {name: _copy_containers(value) for name, value in vars(self).items()}
        )
        return trainer

    def _batch(self, inputs: Inputs, *, counts: bool) -> Batch:
        """Returns rows, which are cut if there are several devices and each sample has one row.

        There are none if they do not count. They run then, so that other ranks do not wait.
        """
        rows: Any = Whole(inputs)
        count = _count(inputs) if counts else 0
        if count is None:
            return Batch(Arguments((), {}), Arguments((rows, counts), {}))
        if len(self.devices) > 1:
            rows = {_SAMPLES: inputs[_SAMPLES]} if _SAMPLES in inputs else inputs
        return Batch(Arguments((torch.arange(count),), {}), Arguments((rows, counts), {}))

    def get_batch_samples(
        self, epoch_iterator: Iterator[Inputs], num_batches: int, device: torch.device
    ) -> tuple[list[Inputs], None]:
        """Returns the micro-batches of the next update. ``compute_loss`` counts the labels of its
        rows.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._work = None
        if batches:
            batches[-1], weight = self._split(batches[-1])[0]
            # The last one does not count if all its rows are repeated.
            self._counts = [True] * (len(batches) - 1) + [bool(weight)]
        return batches, None

    def _split(self, inputs: Inputs) -> list[tuple[Inputs, float | None]]:
        """Returns the rows of a batch with weight 1, and those that a sampler has repeated with
        weight 0.

        All ranks have two pieces then, as their forwards may wait for each other. One that has
        nothing to add has the weight None.
        """
        state = self.accelerator.gradient_state
        is_last = world_size() > 1 and state.end_of_dataloader and state.remainder > 0
        rows = _count(inputs)
        if not is_last or rows is None:
            return [(inputs, 1.0)]
        new = min(max(state.remainder - rank() * rows, 0), rows)
        pieces = ((range(new), 1.0), (range(new, rows), 0.0))
        return [
            (self._take(inputs, part), weight) if part else (inputs, None)
            for part, weight in pieces
        ]

    def training_step(
        self, model: nn.Module, inputs: Inputs, num_items_in_batch: object = None
    ) -> Tensor:
        """Runs forward and backward of a micro-batch.

        Returns zero, and after the last one the loss of the update.
        """
        self.loss_is_scaled_for_ga = True
        self.__dict__["compute_loss"] = self._add_rows
        try:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        finally:
            self.__dict__.pop("compute_loss", None)

    def _add_rows(self, model: nn.Module, inputs: Inputs, *_: object, **__: object) -> Tensor:
        """Takes the place of ``compute_loss`` in a training step. Runs forward and backward.

        The result has no graph.
        """
        counts = self._counts.pop(0) if self._counts else True
        run = BatchRun(self._batch(inputs, counts=counts), is_whole=not self._counts)
        work = self._work
        self._work = None
        with (
            _explain_errors(),
            torch.autocast(self.args.device.type, enabled=False),
            window(model, in_step=True),
        ):
            if work is None:
                if self._is_split and self._checks.are_due(None):
                    self._apart()._compare_rows(inputs)
                work = self._begin(model)
            try:
                work.add(run)
                if run.is_whole:
                    return self._finish(work)
            except BaseException as error:
                work.sync.discard(error)
                raise
        self._work = work
        return torch.zeros((), device=self.args.device, requires_grad=True)

    def _begin(self, model: nn.Module) -> Attempt:
        """Returns an update of the engine."""
        forwards, criterion = self._forwards(model, _loss_of_rows)
        kind = self._kind or criterion.kind
        trained = self._trained()
        sync = (
            _TrainerSync(forwards.model, trained)
            if isinstance(forwards.model, _OneModel)
            else gradient_sync(model, criterion).open()
        )
        accumulation = Accumulation(
            forwards, trained, sync, kind, Limit("rows", None), self._weight_before
        )
        if kind.passes == 1:
            return accumulation
        before = Snapshot([model], self.devices)
        return TwoPasses(accumulation, before, is_auto=False, may_split=self._is_split)

    def _trained(self) -> dict[str, Tensor]:
        modules = nn.ModuleDict(self._modules())
        return {name: tensor for name, tensor in modules.named_parameters() if tensor.requires_grad}

    def _finish(self, work: Attempt) -> Tensor:
        """Returns the loss of a window, whose gradients are those of the parameters."""
        reduced = work.finish(_no_settings)
        parameters = [*self._trained().values()]
        reduced.sync.multiply(parameters, reduced.factor)
        if not reduced.weight:
            forget_gradients(parameters)  # no label was counted
        self._kind = reduced.kind
        self._weight_before = reduced.weight
        return reduced.loss.to(self.args.device).requires_grad_()

    @torch.no_grad()
    def _compare_rows(self, inputs: Inputs) -> None:
        """Compares the means of a few rows with those of each row.

        Raises:
            ValueError: they do not add up.
        """
        count = _count(inputs)
        if count is None:
            return  # Packed rows are one.
        if "KL_input_ids" in inputs:
            raise ValueError(
                "the loss of KTO has a mean over the rows of a forward inside, its estimate of the KL divergence: expected "
                "loss_type='apo_zero_unpaired', or one device, without accumulation"
            )
        is_training = self.model.training
        self.model.eval()
        statistics = []
        with keep_random_state():
            for rows in ([0], [0], [count - 1], [0, 0, count - 1]):
                calls = self._calls(self.model, _loss_of_rows, self._take(inputs, rows))
                means = LossOfMeans(calls.copies, self.devices[0])
                statistics += means.collect(calls)
        self.model.train(is_training)
        *parts, whole = [part.tensors for part in statistics]
        means.compare_sums([whole, *parts])

    @torch.no_grad()
    def prediction_step(
        self, model: nn.Module, inputs: Inputs, *arguments: object, **settings: object
    ) -> tuple[Tensor | None, object, object]:
        """Runs a batch. Returns its loss, and outputs and labels in the order of its rows."""
        step = super().prediction_step
        results: dict[int, Sequence[Any]] = {}

        def predict(trainer: BalancedTrainer, replica: nn.Module, rows: Inputs) -> Tensor:
            self.__dict__["compute_loss"] = trainer._counted_loss
            result = results[id(replica)] = step(replica, rows, *arguments, **settings)
            loss: Tensor = torch.zeros(()) if result[0] is None else result[0]
            return loss

        rows_of_results = list[Sequence[Any]]()
        statistics = list[ShardStatistics]()
        for rows, weight in self._split(inputs):
            calls = self._calls(model, predict, rows, counts=bool(weight))
            means = LossOfMeans(calls.copies, self.devices[0], is_split=self._is_split)
            self._evaluated = self._evaluated or means
            with _explain_errors():
                statistics += self._evaluated.collect(calls)
            if weight is not None:
                rows_of_results += [results[id(_model_in(module))] for module in calls.outputs]
        losses, logits, labels = zip(*rows_of_results, strict=True)
        loss = None if losses[0] is None else _loss_of(statistics, losses[0])
        return loss, self._join(logits), self._join(labels)

    def _join(self, parts: Sequence[Any]) -> object:
        """Returns the outputs of all rows. Shorter ones are padded with -100, as in Trainer."""
        moved = move_leaves([*parts], self.args.device)
        return None if parts[0] is None else functools.reduce(nested_concat, moved)

    def _counted_loss(
        self, model: nn.Module, rows: Inputs, return_outputs: bool = False, **_: object
    ) -> Any:
        """Calls ``compute_loss`` of the class, and tells it the number of labels in its rows."""
        count = self._count_items(rows)
        return type(self).compute_loss(
            self, model, rows, return_outputs=return_outputs, num_items_in_batch=count
        )

    def evaluation_loop(self, *arguments: object, **settings: object) -> Any:
        """Runs all batches, as Trainer does.

        Their loss is that of all rows, not the mean over batches.
        """
        self._evaluated = None
        output = super().evaluation_loop(*arguments, **settings)
        name = f"{settings.get('metric_key_prefix', 'eval')}_loss"
        if name in output.metrics and self._evaluated is not None:
            loss = self._evaluated.finish(torch.zeros((), device=self.args.device))
            output.metrics[name] = loss.item()
        self.__dict__.pop("compute_loss", None)
        return output


@contextmanager
def _explain_errors() -> Iterator[None]:
    """Surrounds losses of a trainer. Their errors say what a trainer expects."""
    try:
        yield
    except UnknownMeanError as error:
        raise ValueError(
            f"the trainer's loss does not add up over the rows: {error.what}, {_EXPECTED}"
        ) from error


def _loss_of_rows(trainer: BalancedTrainer, model: nn.Module, rows: Inputs) -> Tensor:
    """Returns the loss of some rows, which is told the number of their own labels."""
    is_of_generation = getattr(trainer, "loss_type", None) in _OF_GENERATION
    if is_of_generation:
        args: Any = trainer.args
        steps = args.steps_per_generation
        if steps != args.gradient_accumulation_steps:
            raise ValueError(
                f"the loss divides by the tokens of steps_per_generation={steps}, and an update has gradient_accumulation_steps="
                f"{args.gradient_accumulation_steps}, expected equal numbers"
            )
        # The loss becomes a sum.
        number = steps * trainer.accelerator.num_processes
        rows["num_items_in_batch"] = torch.tensor(float(number), device=args.device)
    loss: Tensor = trainer._counted_loss(model, rows)
    if is_of_generation:
        loss = loss / (rows["completion_mask"] * rows.get("tool_mask", 1)).sum()
    return loss


def _loss_of(parts: Sequence[ShardStatistics], otherwise: Tensor) -> Tensor:
    """Returns the loss of some shards. ``otherwise`` is that of rows that do not count."""
    totals: dict[Any, Tensor] = {}
    parts = [part for part in parts if part.tensors]
    if not parts:
        return otherwise
    for part in parts:
        for place, tensor in part.tensors.items():
            totals[place] = totals.get(place, 0.0) + tensor.to(otherwise.device)
    loss: Tensor = parts[0].structure.compute([*totals.values()], ())
    return loss


def _model_in(module: nn.Module) -> nn.Module:
    return module["model"] if isinstance(module, Task) else module


def _keep_samples(collate: Callable[..., Inputs], samples: Sequence[object]) -> Inputs:
    """Returns a batch, with its samples if these do not have one row each: pairs, packed rows."""
    batch = collate(samples)
    if isinstance(batch, dict):
        for name, value in batch.items():
            # boxes and labels of each image
            if type(value) is list and [type(entry) for entry in value] == [dict] * len(samples):
                batch[name] = Rows(value)
        if _count(batch) != len(samples):
            batch[_SAMPLES] = Rows(samples)
    return batch


def _count(inputs: object) -> int | None:
    """Returns the number of samples, or of rows, if all tensors have the same."""
    values = inputs if isinstance(inputs, Mapping) else {}
    if _SAMPLES in values:
        return len(values[_SAMPLES].entries)
    sizes = {len(value) for value in values.values() if isinstance(value, Tensor) and value.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def _copy_containers(value: object) -> object:
    """Returns a copy of nested mappings, and of lists and sets in them."""
    if isinstance(value, dict):
        new = copy.copy(value)
        new.update({key: _copy_containers(entry) for key, entry in value.items()})
        return new
    return copy.copy(value) if isinstance(value, (list, set)) else value


def _no_settings() -> Any:
    """Ranks do not compare settings: Trainer has the same on all of them."""


_OF_GENERATION = ("dapo", "cispo", "vespo")  # losses over the tokens of all generated completions
_LOADERS = ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader")
_EXPECTED = (
    "expected rows that do not depend on each other, and a function of torch's losses, of .mean(), or of sums over "
    "num_items_in_batch: for another loss, let an update be one forward, or use TrainStep, and "
    "DataParallelCriterion(..., whole=True)"
)
