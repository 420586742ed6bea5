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
    ParallelModel,
    Rows,
    Shard,
    Whole,
    move_leaves,
    take,
)
from ..loss.copies import Calls, OwnCollectives, ShardLoss
from ..loss.coupled import ShardStatistics
from ..loss.criterion import DataParallelCriterion
from ..loss.kinds import Kind
from ..loss.means import Additive, LossOfMeans, UnknownMeanError, find_means
from ..loss.sums import LossSum, Weight, add_up, power_of_two, run_backward
from ..replicas.model import DataParallelModel
from ..replicas.replicas import window
from ..runtime.collectives import (
    gather_objects,
    gather_rows,
    max_over_ranks,
    rank,
    sum_over_ranks,
    world_size,
)
from ..runtime.devices import DeviceLike, keep_random_state, resolve_devices
from ..runtime.torch_private import CHILDREN, foreach_multiply_
from ..runtime.values import Precision, forget_gradients
from ..training.passes import TwoPasses
from ..training.settings import Settings
from ..training.snapshot import Snapshot
from ..training.sync import UpdateSync, gradient_sync
from ..training.update import Accumulation, Attempt, BatchRun, Forwards, Limit

Inputs = dict[str, Any]  # the arguments of a model, with the rows of a batch
Function = Callable[
    [Any, nn.Module, Inputs], Tensor
]  # Its arguments are a trainer, a model and rows.
_SAMPLES = "_samples"  # the samples of a batch whose tensors have not one row for each


class _Running(NamedTuple):
    """A forward of a trainer."""

    copies: Mapping[
        int, nn.Module
    ]  # The modules of the replica that runs, by the ids of the trainer's.
    counts: bool  # Its rows are not repeated ones.


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


class Task(nn.Module):
    """The modules of a trainer. The criterion computes the loss of the trainer with a replica of
    them.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def train(self, mode: bool = True) -> "Task":
        """Sets the mode of the model. Others, such as one of reference, stay as they are."""
        self.get_submodule("model").train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the model, such as ``generate``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = vars(self).get(CHILDREN, {}).get("model")
            if model is None:
                raise
            return getattr(model, name)

    def forward(self, *numbers: Tensor) -> nn.Module:
        """Returns itself. ``numbers`` are those of the rows."""
        return self


class _OneModel(ParallelModel):
    """The model of one device, as its trainer has wrapped it."""

    def __init__(
        self, model: nn.Module, device: torch.device, compute: Callable[..., object]
    ) -> None:
        super().__init__()
        self.module = model
        self.devices = [device]
        self.split = None
        self._compute = compute

    def _run_shards(self, shards: Sequence[Shard]) -> PerReplica:
        """Returns the model. For rows that do not count, the loss leads to its parameters: other
        ranks wait for their gradients.
        """
        (shard,) = shards
        rows = shard.targets.inputs[0].value
        output = self.module if shard.target_rows else self._compute(self.module, rows, False)
        return PerReplica([output], [None])


class _TrainerSync(UpdateSync):
    """Gradients of one device, or of ranks, which ``DistributedDataParallel`` averages."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model: Any = model
        self._device = device

    def count_micro_batches(self, count: int) -> int:
        return count

    def divisor(self, expected: Weight, before: float, in_float16: bool) -> Weight:
        first = 0.0 if before else float(sum_over_ranks(add_up([expected], self._device).double()))
        return float(power_of_two(before or first)) / world_size()

    def accumulating(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = (
            self._model.no_sync() if world_size() > 1 else nullcontext()
        )
        return context

    def forwards_without_rows(self, *, is_reduced: bool) -> Iterator[list[Tensor]]:
        return iter(())

    def backward(self, losses: Sequence[Tensor], divisor: Weight, local: LossSum | None) -> None:
        run_backward(losses, divisor)

    def finish(self, local: LossSum, settings: Callable[[], Settings]) -> LossSum:
        weight = add_up([local.weight or 0.0], self._device).double()
        total, weight = sum_over_ranks(torch.stack([local.total.double(), weight])).unbind()
        return LossSum(total, weight)

    def multiply(self, tensors: Sequence[Tensor], factor: Weight) -> None:
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        foreach_multiply_(gradients, factor * world_size())

    def smallest(self, number: float) -> float:
        return -max_over_ranks(-number)

    def abandon(self) -> None:
        """Returns None: no rank can be told."""

    def discard(self, error: BaseException) -> None:
        """Leaves the gradients: Trainer drops them."""


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
        self._device_count: int | None = None
        self._weights: list[float] = []  # The weights of the micro-batches to come in the window.
        self._work: Attempt | None = None  # a window in progress
        self._window = 0  # a number
        self._kind: Kind | None = None  # Batches may show another kind than the first one.
        self._weight_before = 0.0
        self._evaluated: LossOfMeans | None = None  # all batches of an evaluation
        self.data_collator: Callable[..., Any]
        try:
            super().__init__(*arguments, **kwargs)
        finally:
            if self._device_count is not None:
                vars(self.args)["_n_gpu"] = self._gpus
        args: Any = copy.copy(vars(self)["args"])
        self.args = args
        if self.is_model_parallel and device_ids is not None:
            raise ValueError(
                f"device_ids={device_ids!r} was given for a model that is on several devices, expected None"
            )
        count = 1 if self.is_model_parallel else self._device_count or 1
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

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator. Until the end of ``__init__``, ``args`` tell of one device, since
        other trainers refuse several, which they would give to ``nn.DataParallel``.
        """
        args, devices = self.args, self._device_ids
        if self._device_count is None:
            if devices is not None and args.world_size > 1:
                raise ValueError(
                    f"device_ids={devices!r} was given on {args.world_size} ranks, expected None: each has a device"
                )
            self._gpus = args.n_gpu
            # Quantized weights have no copies.
            count = 1 if getattr(self.model, "is_quantized", False) else args.n_gpu
            self._device_count = count if devices is None else len(resolve_devices(devices))
            args._n_gpu = min(args.n_gpu, 1)
        super().create_accelerator_and_postprocess()

    def __getattribute__(self, name: str) -> Any:
        """Returns an attribute. A module is its copy in the replica that runs."""
        value = super().__getattribute__(name)
        running = _running.get()
        if running is None:
            return value
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
            self.model_wrapped: nn.Module = DataParallelModel(
                self._task, self.devices, refresh="recorded"
            )
        return self.model_wrapped

    def _prepare_input(self, data: object) -> object:
        # a replica has its rows
        running = _running.get()
        return data if running and running.copies else super()._prepare_input(data)

    def get_train_dataloader(self) -> object:
        """Returns the loader of Trainer, whose batches may have their samples."""
        return self._keeping_samples(super().get_train_dataloader)

    def get_eval_dataloader(self, *arguments: object) -> object:
        """Returns the loader of Trainer, whose batches may have their samples."""
        return self._keeping_samples(super().get_eval_dataloader, *arguments)

    def get_test_dataloader(self, *arguments: object) -> object:
        """Returns the loader of Trainer, whose batches may have their samples."""
        return self._keeping_samples(super().get_test_dataloader, *arguments)

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
        device = next(self.model.parameters()).device
        if _SAMPLES in inputs:
            return self._collate([inputs[_SAMPLES].entries[row] for row in rows], device)
        part: Inputs = move_leaves(take(inputs, rows), device)
        return part

    def _collate(self, samples: Sequence[object], device: torch.device) -> Inputs:
        return {**move_leaves(dict(self.data_collator(samples)), device), _SAMPLES: Rows(samples)}

    def _count_items(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """Returns the number of labels, if there are some."""
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor):
            return None
        shifted = inputs.get("shift_labels")
        if not isinstance(shifted, Tensor):
            shifted = labels[..., int(self._loss_shifts_labels) :]
        return shifted.ne(-100).sum()

    def _clip_grad_norm(self, model: nn.Module) -> object:
        # Parameters of a loss have no part in it, as in Trainer.
        return super()._clip_grad_norm(self.model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: object = None) -> object:
        return super()._get_grad_norm(self.model, grad_norm)

    def _forwards(
        self, model: nn.Module, function: Function, *, counts: bool = True
    ) -> tuple[Forwards, DataParallelCriterion]:
        """Returns what runs a function on the rows of each device."""

        def compute(module: nn.Module, rows: Inputs, counts: bool = counts) -> Tensor:
            copies: dict[int, nn.Module] = {}
            if isinstance(module, Task):
                copies = dict(zip(map(id, self._task.children()), module.children(), strict=True))
                module = module.get_submodule("model")
            token = _running.set(_Running(copies, counts))
            try:
                if isinstance(rows, Mapping):
                    rows = dict(rows)
                    samples = rows.pop(_SAMPLES, None)
                    if samples is not None and not rows:
                        rows = self._collate(samples, next(module.parameters()).device)
                        del rows[_SAMPLES]
                # The first of two forwards leaves no trace, and repeated rows do not.
                is_apart = not counts or (self.model.training and not torch.is_grad_enabled())
                with self.compute_loss_context_manager():
                    return function(self._apart() if is_apart else self, module, rows)
            finally:
                _running.reset(token)

        criterion = DataParallelCriterion(Additive(compute), self.devices)
        copies = dataclasses.replace(criterion.copies, halves=None, collectives=OwnCollectives())
        scaler = self.accelerator.scaler
        precision = Precision("fp32") if scaler is None else Precision("fp16", scaler)
        parallel = (
            model
            if isinstance(model, DataParallelModel)
            else _OneModel(model, self.devices[0], compute)
        )
        return Forwards(
            parallel, copies, precision, keeps_order=False, is_compiled=False
        ), criterion

    def _apart(self) -> "BalancedTrainer":
        """Returns a copy with containers of its own, so that metrics of a forward are lost with it."""
        trainer = copy.copy(self)
        trainer.__dict__.update({name: _copied(value) for name, value in vars(self).items()})
        return trainer

    def _batch(self, inputs: object) -> Batch:
        """Returns rows, which are cut if there are several devices and each sample has one row."""
        count = _count(inputs)
        if len(self.devices) == 1 or count is None:
            return Batch(Arguments((), {}), Arguments((Whole(inputs),), {}))
        assert isinstance(inputs, Mapping)
        rows = {_SAMPLES: inputs[_SAMPLES]} if _SAMPLES in inputs else inputs
        return Batch(Arguments((torch.arange(count),), {}), Arguments((rows,), {}))

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
            # The last one has weight 0 if all its rows are repeated.
            self._weights = [1.0] * (len(batches) - 1) + [weight or 0.0]
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
        if new in (0, rows):
            pieces = [(inputs, 1.0), (inputs, None)]
            return pieces if new else [(inputs, None), (inputs, 0.0)]
        return [(self._take(inputs, range(new)), 1.0), (self._take(inputs, range(new, rows)), 0.0)]

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
        del self.__dict__["compute_loss"]
        weight = self._weights.pop(0) if self._weights else 1.0
        is_last = not self._weights
        steps = getattr(self, "current_gradient_accumulation_steps", 1)
        # The means of a window are not divided by it.
        self.current_gradient_accumulation_steps = 1
        run = BatchRun(self._batch(inputs), is_last, surround=None if weight else _without_rows)
        try:
            with (
                _explained(),
                torch.autocast(self.args.device.type, enabled=False),
                window(model, in_step=True),
            ):
                if self._work is None:
                    self._window += 1
                    if self._is_split and not self._window & (self._window - 1):
                        self._check(inputs)
                    self._work = self._begin(model)
                self._work.add(run)
                loss = (
                    self._finish(self._work)
                    if is_last
                    else torch.zeros((), device=self.args.device)
                )
        except BaseException as error:
            if self._work is not None:
                self._work.discard(error)
            self._work = None
            raise
        finally:
            self.current_gradient_accumulation_steps = steps
        return loss.requires_grad_()

    def _begin(self, model: nn.Module) -> Attempt:
        """Returns an update of the engine."""
        forwards, criterion = self._forwards(model, _loss_of_rows)
        kind = self._kind = self._kind or criterion.kind
        sync = (
            gradient_sync(model, criterion).open()
            if isinstance(model, DataParallelModel)
            else _TrainerSync(model, self.devices[0])
        )
        accumulation = Accumulation(
            forwards, self._trained(), sync, kind, Limit("rows", None), self._weight_before
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
        self._work = None
        return reduced.loss.to(self.args.device)

    def _check(self, inputs: Inputs) -> None:
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
        parameter = next(self.model.parameters())
        is_half = self.accelerator.mixed_precision != "no" or parameter.dtype.itemsize < 4
        is_training = self.model.training
        self.model.eval()
        with torch.no_grad(), keep_random_state():
            *parts, whole = [
                self._means(self._take(inputs, rows), len(rows))
                for rows in ([0], [0], [count - 1], [0, 0, count - 1])
            ]
        self.model.train(is_training)
        for name, mean in whole.items():
            others = [part.get(name, torch.full_like(mean, torch.nan)) for part in parts]
            apart = functools.reduce(torch.add, others)
            if not ((apart - mean).abs() <= (0.02 if is_half else 1e-3) * mean.abs()).all():
                raise ValueError(
                    f"sum and count of {name} are {mean.tolist()} for a few rows, and {apart.tolist()} added up row by row: the "
                    f"rows depend on each other. {_EXPECTED}"
                )

    def _means(self, rows: Inputs, count: int) -> dict[str, Tensor]:
        """Returns the sum and the count of each mean in the loss of some rows."""
        apart = self._apart()
        forwards, _ = self._forwards(self.model, lambda _, *rest: _loss_of_rows(apart, *rest))
        shard = ShardLoss(forwards.copies.criterion, count, self.model, (rows,), {})
        return {
            f"{name.text} ({name.number})": torch.stack(
                [
                    torch.as_tensor(number).to(self.args.device, torch.float)
                    for number in (
                        term.value,
                        term.weight,
                        *[bound * count for _, bound in term.bounds],
                    )
                ]
            )
            for name, term in find_means(shard, is_split=True)[1].items()
        }

    @torch.no_grad()
    def prediction_step(
        self, model: nn.Module, inputs: Inputs, *arguments: object, **settings: object
    ) -> tuple[Tensor | None, object, object]:
        """Runs a batch. Returns its loss, and outputs and labels in the order of its rows."""
        step = super().prediction_step
        results: dict[int, Sequence[Any]] = {}

        def predict(trainer: object, replica: nn.Module, rows: Inputs) -> Tensor:
            self.__dict__["compute_loss"] = self._counted_loss
            result = results[id(replica)] = step(replica, rows, *arguments, **settings)
            loss: Tensor = torch.zeros(()) if result[0] is None else result[0]
            return loss

        rows_of_results = list[Sequence[Any]]()
        totals: dict[Any, Tensor] = {}
        for rows, weight in self._split(inputs):
            forwards, _ = self._forwards(model, predict, counts=bool(weight))
            (shards,) = self._batch(rows).plan(forwards.model.devices, None, None, int)
            calls = Calls(forwards.copies, forwards.model(MicroBatch(shards)), shards)
            means, whole = (
                LossOfMeans(forwards.copies, self.devices[0], is_split=self._is_split)
                for _ in range(2)
            )
            whole = self._evaluated = self._evaluated or whole
            with _explained():
                parts = (whole if weight else means).collect(calls)
            if weight is not None:
                _add_totals(totals, parts, self.args.device)
                rows_of_results += [results[id(_model_in(module))] for module in calls.outputs]
        losses, logits, labels = zip(*rows_of_results, strict=True)
        loss = None if losses[0] is None else _sum_of_means(totals)
        return loss, self._join(logits), self._join(labels)

    def _join(self, parts: Sequence[Any]) -> object:
        """Returns the outputs of all rows. Shorter ones are padded with -100, as in Trainer."""
        moved = move_leaves([*parts], self.args.device)
        return None if parts[0] is None else functools.reduce(nested_concat, moved)

    def _counted_loss(
        self, model: nn.Module, rows: Inputs, return_outputs: bool = False, **_: object
    ) -> object:
        """Calls ``compute_loss`` in an evaluation, with the number of labels as in training."""
        running = _running.get()
        trainer = self._apart() if running and not running.counts else self
        count = self._count_items(rows)
        return type(self).compute_loss(
            trainer, model, rows, return_outputs=return_outputs, num_items_in_batch=count
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
        self._evaluated = None
        self.__dict__.pop("compute_loss", None)
        return output


@contextmanager
def _explained() -> Iterator[None]:
    """Surrounds losses of a trainer. Their errors say what a trainer expects."""
    try:
        yield
    except UnknownMeanError as error:
        raise ValueError(
            f"the loss of the trainer does not add up over the rows of an update: {str(error).split('. ')[0]}. {_EXPECTED}"
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
    loss: Tensor = type(trainer).compute_loss(
        trainer, model, rows, num_items_in_batch=trainer._count_items(rows)
    )
    if is_of_generation:
        loss = loss / (rows["completion_mask"] * rows.get("tool_mask", 1)).sum()
    return loss


def _add_totals(
    totals: dict[Any, Tensor], parts: Sequence[ShardStatistics], device: torch.device
) -> None:
    for part in parts:
        for place, tensor in part.tensors.items():
            totals[place] = totals.get(place, 0.0) + tensor.to(device)


def _sum_of_means(totals: Mapping[Any, Tensor]) -> Tensor:
    means = [
        total / totals[name, "count"] for (name, kind), total in totals.items() if kind == "total"
    ]
    return functools.reduce(torch.add, means)


def _model_in(module: nn.Module) -> nn.Module:
    return module.get_submodule("model") if isinstance(module, Task) else module


def _keep_samples(collate: Callable[..., object], samples: Sequence[object]) -> object:
    """Returns a batch, with its samples if these do not have one row each: pairs, packed rows."""
    batch = collate(samples)
    if isinstance(batch, dict) and _count(batch) != len(samples):
        batch[_SAMPLES] = Rows(samples)
    return batch


def _count(inputs: object) -> int | None:
    """Returns the number of samples, or of rows, if all tensors have the same."""
    values = inputs if isinstance(inputs, Mapping) else {}
    if _SAMPLES in values:
        return len(values[_SAMPLES].entries)
    sizes = {len(value) for value in values.values() if isinstance(value, Tensor) and value.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def _copied(value: object) -> object:
    """Returns a copy of nested mappings, and of lists and sets in them."""
    if isinstance(value, dict):
        new = copy.copy(value)
        new.update({key: _copied(entry) for key, entry in value.items()})
        return new
    return copy.copy(value) if isinstance(value, (list, set)) else value


def _without_rows(shard: Shard) -> Shard:
    return shard._replace(target_rows=0)


def _no_settings() -> Any:
    """Ranks do not compare settings: Trainer has the same on all of them."""


_OF_GENERATION = ("dapo", "cispo", "vespo")  # losses over the tokens of all generated completions
_EXPECTED = (
    "Expected a sum of means of torch's losses, of .mean(), or of sums over num_items_in_batch. For other losses, let an update "
    "be one forward, or use TrainStep, and DataParallelCriterion(..., whole=True)"
)
