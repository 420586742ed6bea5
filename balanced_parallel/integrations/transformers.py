"""``BalancedTrainer``: the Trainer of transformers, with the loss and the gradients of the whole
batch.

A window is all rows of one update, of all micro-batches, devices and ranks. Trainer gets batches,
clips, updates, logs and saves. The rows of a window are an update of the engine
(:class:`balanced_parallel.training.update.Forwards`)::

    get_batch_samples   the micro-batches of the window
    training_step       of Trainer, whose compute_loss adds the rows to the update. The real
                        compute_loss runs in the forward of a Task, on each device
    prediction_step     of Trainer, in the forward of a Task. Outputs are in the order of the rows

The sums that a loss is computed of are noted in the forward (loss/inside.py).
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    unwrap_peft_model,
)
from transformers.trainer_pt_utils import nested_concat

from .. import DataParallelCriterion, DataParallelModel, PerReplica, Precision, Rows, Whole
from ..batch.rows import move_leaves, take
from ..loss.inside import ForwardNotes
from ..loss.names import UnknownMeanError
from ..runtime.collectives import gather_objects, gather_rows
from ..runtime.devices import DeviceLike, resolve_devices
from ..strategies.ddp import DistributedModel
from ..training.passes import begin_update
from ..training.update import Attempt, Forwards, Reduced

Inputs = dict[str, Any]  # the arguments of a model, with the rows of a batch
_SAMPLES = "_samples"  # the samples of a batch whose tensors have not one row for each
# The modules and the accelerator of the replica whose forward runs, by the ids of the trainer's.
_copies: ContextVar[Mapping[int, Any]] = ContextVar("_copies", default=MappingProxyType({}))


class Computed(NamedTuple):
    """The loss of some rows, and what else ``prediction_step`` returns."""

    loss: Tensor | None
    outputs: Sequence[Any] = ()


# A function of a trainer, a model and rows.
Computation = Callable[["BalancedTrainer", nn.Module, Inputs], Computed]


class RankTask(DistributedModel):
    """A :class:`Task` on each rank. TRL gathers metrics in its forward, and Trainer has seeded the
    ranks.
    """

    def __init__(self, task: "Task", devices: Sequence[torch.device]) -> None:
        super().__init__(task, devices[0], None)
        self.meets_ranks = True

    def _random_numbers(self) -> AbstractContextManager[None]:
        return nullcontext()


class Task(nn.ModuleDict):
    """The modules of a trainer. It computes the loss of the trainer with a replica of them."""

    def __init__(self, trainer: "BalancedTrainer", modules: Mapping[str, nn.Module]) -> None:
        super().__init__(modules)
        self.trainer = trainer
        self._originals = [*modules.values()]

    def train(self, mode: bool = True) -> "Task":
        """Sets the mode of the model. Others, such as one of reference, stay as they are."""
        self["model"].train(mode)
        return self

    def to(self, *places: Any, **settings: Any) -> "Task":
        """Moves the modules to the first of several devices. Trainer has placed those of one."""
        return super().to(*places, **settings) if len(self.trainer.devices) > 1 else self

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the model, such as ``generate``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "model" not in self:
                raise
            return getattr(self["model"], name)

    def forward(
        self, compute: Computation, rows: Inputs, counts: bool, numbers: Sequence[int] | None = None
    ) -> Computed:
        """Calls ``compute`` with rows. Those that a sampler repeats do not count.

        ``numbers`` are those of the samples to use, if they are not cut.
        """
        trainer, model = self.trainer, self["model"]
        # Forwards without a graph come before another one, and leave no trace, as repeated rows.
        if not counts or (compute is _loss_of_rows and not torch.is_grad_enabled()):
            trainer = trainer._apart()
        device = next(model.parameters()).device
        copies = dict(zip(map(id, self._originals), self.values(), strict=True))
        copies[id(trainer.accelerator)] = trainer._gathering(device, counts)
        token = _copies.set(copies)
        try:
            if isinstance(rows, Mapping):
                rows = dict(rows)
                samples = rows.pop(_SAMPLES, None)
                if counts and numbers not in (None, [*range(len(samples or ()))]):
                    samples = [samples[number] for number in numbers]
                    rows = {}
                if not rows:
                    rows = move_leaves(dict(trainer.data_collator(samples)), device)
            with trainer.compute_loss_context_manager():
                return compute(trainer, model, rows)
        finally:
            _copies.reset(token)


class BalancedTrainer(Trainer):
    """A ``transformers.Trainer`` whose loss and gradients are those of plain PyTorch with the whole
    batch on one device.

    In one process the model runs in a :class:`DataParallelModel`, under torchrun in the
    ``DistributedDataParallel`` of :func:`parallelize`, which needs no ``ddp_*`` arguments. With
    accumulation, the batch is all rows of an update. Rows that a sampler repeats do not count.
    ``eval_loss`` is that of all rows. Another subclass of ``Trainer`` comes second:
    ``class Exact(BalancedTrainer, SFTTrainer)``.

    Args:
        arguments, kwargs: those of ``transformers.Trainer``, or of the next class. ``args`` are
            copied.
        device_ids: devices of the replicas, as in :class:`DataParallelModel`. A batch has
            ``per_device_train_batch_size`` rows for each. ``None`` means the devices that Trainer
            would use: all GPUs in one process, or one device of each rank.

    Raises:
        ValueError: ``device_ids`` under torchrun; DeepSpeed, FSDP or a ``parallelism_config``;
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
        self._wrapped: list[nn.Module] = []  # The model that is in the forwards.
        self._forwards: Forwards
        self._work: Attempt | None = None  # A window in progress.
        self._last: Reduced | None = None  # The window before.
        self._evaluated: Any = None  # The loss of all batches of an evaluation.
        try:
            super().__init__(*arguments, **kwargs)
        finally:
            if self._gpus is not None:
                vars(self.args)["_n_gpu"] = self._gpus
        args: Any = copy.copy(self.__dict__["args"])
        self.args = args
        if self.is_model_parallel and device_ids is not None:
            raise ValueError(
                f"device_ids={device_ids!r} was given for a model that is on several devices, expected None"
            )
        # Quantized weights have no copies.
        is_whole = self.is_model_parallel or getattr(self.model, "is_quantized", False)
        named = device_ids or range(1 if is_whole else self._gpus or 1)
        self.devices = resolve_devices(named) if device_ids or named[1:] else [args.device]
        # Batch sizes are multiples of the first. TRL moves rows to the second. The third would
        # multiply the loss.
        vars(args).update(
            _n_gpu=len(named), _setup_devices=self.devices[0], average_tokens_across_devices=False
        )
        if device_ids:
            self.accelerator = self._gathering(self.devices[0], counts=True)
        self._train_batch_size = args.train_batch_size
        if hasattr(args, "generation_batch_size"):  # GRPO, RLOO
            args.generation_batch_size *= len(named)
        self._refuse(args)
        # other models compute means, which are counted
        self.model_accepts_loss_kwargs &= bool(args.use_liger_kernel)
        self._loss_shifts_labels |= (
            type(unwrap_peft_model(self.model)).__name__
            in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        )

    def _refuse(self, args: Any) -> None:
        if (
            self.is_deepspeed_enabled
            or self.is_fsdp_enabled
            or self.accelerator.parallelism_config
            or args.optim in ("lomo", "adalomo")  # It updates inside of the backward.
        ):
            raise ValueError(
                f"DeepSpeed, FSDP, a parallelism_config or LOMO is set (optim={args.optim!r}), expected none: use Trainer"
            )
        # The second keeps what one thread saves for the backward.
        for name in ("torch_compile", "activation_offloading"):
            if len(self.devices) > 1 and getattr(args, name, False):
                raise ValueError(
                    f"{name}=True with {len(self.devices)} devices in one process, expected one: start torchrun"
                )

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

    # Replicas share the trainer, since copies would lose the numbers that compute_loss adds to its
    # attributes, such as the tokens of TRL.
    def __getattribute__(self, name: str) -> Any:
        """Returns an attribute. A module is its copy in the replica that runs."""
        value = super().__getattribute__(name)
        return _copies.get().get(id(value), value)

    def get_train_dataloader(self) -> Any:
        """Returns a loader whose batches have their samples."""
        return self._keeping_samples(super().get_train_dataloader)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Returns a loader whose batches have their samples."""
        return self._keeping_samples(super().get_eval_dataloader, eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Returns a loader whose batches have their samples."""
        return self._keeping_samples(super().get_test_dataloader, test_dataset)

    @contextmanager
    def _having(self, **attributes: object) -> Iterator[None]:
        """Gives the trainer other attributes in the block."""
        before = {name: self.__dict__[name] for name in attributes if name in self.__dict__}
        self.__dict__.update(attributes)
        try:
            yield
        finally:
            for name in attributes:
                del self.__dict__[name]
            self.__dict__.update(before)

    def _gathering(self, device: torch.device, counts: bool) -> Any:
        """Returns an accelerator of a device, which gathers from ranks with different numbers of
        rows. TRL asks for both. Rows that are repeated are left out.
        """
        accelerator = copy.copy(self.accelerator)
        vars(accelerator).update(state=copy.copy(accelerator.state))
        vars(accelerator.state).update(device=device)
        if self.args.world_size == 1:
            return accelerator

        def gather(tensor: Tensor) -> Tensor:
            # Ranks have equal numbers of forwards: none may run again.
            self._forwards.model.note(ForwardNotes(may_stop=False), anew=True)
            rows = torch.atleast_1d(tensor)
            count = len(rows) if counts else 0
            sizes = gather_objects(count)
            return gather_rows(rows[:count], sizes, 0) if any(sizes) else rows

        vars(accelerator).update(gather=gather, gather_for_metrics=gather)
        return accelerator

    @property
    def _is_split(self) -> bool:
        steps = self.args.gradient_accumulation_steps if self.model.training else 1
        return bool(len(self.devices) * self.args.world_size * steps > 1)

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: object = None
    ) -> nn.Module:
        """Returns the model of all devices, in place of Trainer's."""
        over_ranks = training and self.args.world_size > 1
        if training:
            self._work = None  # A fit that has failed may have left one.
        if self._wrapped == [self.model]:
            self.model_wrapped: nn.Module = self._forwards.model
            if not (over_ranks and isinstance(self.model_wrapped, DataParallelModel)):
                return self.model_wrapped
        # The model, one of reference, and a loss.
        modules = {
            name: module
            for name, module in self.__dict__.items()
            if isinstance(module, nn.Module) and name != "model_wrapped"
        }
        if len(self.devices) == 1:  # It may be compiled.
            modules["model"] = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        kind: Any = RankTask if over_ranks else DataParallelModel
        wrapped = kind(Task(self, modules), self.devices)
        scaler = self.accelerator.scaler
        self._forwards = Forwards(
            wrapped,
            DataParallelCriterion(lambda computed: computed.loss),
            Precision("fp16" if scaler else "fp32", scaler),
        )
        wrapped.note(ForwardNotes(may_stop=False), anew=True)
        self._last = None
        self._wrapped = [self.model]
        self.model_wrapped = wrapped
        return self.model_wrapped

    def _prepare_input(self, data: object) -> object:
        # The engine has moved rows to their device.
        return data if _copies.get() else super()._prepare_input(data)

    def _keeping_samples(self, make: Callable[..., object], *arguments: object) -> object:
        collate = self.data_collator
        # A trainer may read attributes of its collator.
        keeping = functools.update_wrapper(
            functools.partial(_keep_samples, collate), collate, assigned=()
        )
        with self._having(data_collator=keeping):
            return make(*arguments)

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

    def _apart(self) -> "BalancedTrainer":
        """Returns a copy with containers of its own, so that metrics of a forward are lost with it."""
        trainer = copy.copy(self)
        trainer.__dict__.update(_copy_containers(self.__dict__), compute_loss=trainer._counted_loss)
        return trainer

    def _arguments(self, compute: Computation, inputs: Inputs, *, counts: bool) -> tuple[Any, ...]:
        """Returns the arguments of a :class:`Task`, which have the rows of a batch, or none if they
        do not count. They run then, so that other ranks do not wait.
        """
        count = _count(inputs)
        has_samples = _SAMPLES in inputs
        if count is None or not self._is_split:
            return compute, Whole(inputs), counts
        if not counts or (has_samples and len(self.devices) == 1):
            return compute, Whole(inputs), counts, Rows(range(count if counts else 0))
        return compute, {_SAMPLES: inputs[_SAMPLES]} if has_samples else inputs, counts

    def get_batch_samples(self, *arguments: object) -> tuple[list[Inputs], None]:
        """Returns the micro-batches of the next update. ``compute_loss`` counts the labels of its
        rows.
        """
        batches, _ = super().get_batch_samples(*arguments)
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
        is_last = self.args.world_size > 1 and state.end_of_dataloader and state.remainder > 0
        rows = _count(inputs)
        if not is_last or rows is None:
            return [(inputs, 1.0)]
        new = min(max(state.remainder - self.args.process_index * rows, 0), rows)
        pieces = ((range(new), 1.0), (range(new, rows), 0.0))
        return [
            (self._take(inputs, part), weight) if part else (inputs, None)
            for part, weight in pieces
        ]

    def training_step(self, *arguments: object, **settings: object) -> Any:
        """Runs forward and backward of a micro-batch.

        Returns zero, and after the last one the loss of the update.
        """
        self.loss_is_scaled_for_ga = True
        with self._having(compute_loss=self._add_rows):
            return super().training_step(*arguments, **settings)

    def _add_rows(self, model: nn.Module, inputs: Inputs, *_: object, **__: object) -> Any:
        """Takes the place of ``compute_loss`` in a training step. Runs forward and backward.

        The result has no graph, except that of a window of one forward.
        """
        counts = self._counts.pop(0) if self._counts else True
        # Rows of the next window follow, at the end of a data set without a length.
        is_last = not self._counts and self.accelerator.sync_gradients
        forwards = self._forwards
        if not self._is_split:
            rows = move_leaves(inputs, self.args.device)
            return forwards.model.module(_loss_of_rows, rows, counts).loss
        loss = torch.zeros((), device=self.args.device)
        work = self._work or begin_update(forwards, self._last)
        self._work = None
        with (
            _explain_errors(),
            # Means of a window are not divided by it.
            self._having(current_gradient_accumulation_steps=1),
            torch.autocast(self.args.device.type, enabled=False),
            forwards.updating(work),
        ):
            arguments = self._arguments(_loss_of_rows, inputs, counts=counts)
            work.add(forwards.batch(arguments, is_last=is_last))
            if is_last:
                self._last = work.finish()
                # A callback may have given the model other parameters.
                self._last.scale(forwards.model.parameters())
                loss = self._last.loss.to(loss.device)
            else:
                self._work = work
        return loss.requires_grad_()

    @torch.no_grad()
    def prediction_step(
        self, model: nn.Module, inputs: Inputs, *arguments: object, **settings: object
    ) -> tuple[Tensor | None, object, object]:
        """Runs a batch. Returns its loss, and outputs and labels in the order of its rows."""
        forwards = self._forwards
        if self._evaluated is None:
            self._evaluated = forwards.criterion.kind.loss(
                dataclasses.replace(forwards.copies, halves=None),
                self.devices[0],
                is_split=self._is_split,
            )

        def collect(calls: Any) -> list[Any]:  # It may have no labels.
            return [] if calls.outputs[0].loss is None else self._evaluated.collect(calls)

        def predict(trainer: "BalancedTrainer", model: nn.Module, rows: Inputs) -> Computed:
            results: Any = super().prediction_step(model, rows, *arguments, **settings)
            return Computed(results[0], results)

        parts = []
        results = list[Sequence[Any]]()
        for rows, weight in self._split(inputs):
            run = forwards.batch(self._arguments(predict, rows, counts=bool(weight)))
            shards = run.batch.split(forwards.model.devices, None)
            outputs: list[PerReplica] = []
            with self._having(compute_loss=self._counted_loss), _explain_errors():
                parts += forwards.run(shards, collect, outputs)
            if weight is not None:
                results += [computed.outputs for computed in outputs[0]]
        losses, logits, labels = zip(*results, strict=True)
        loss = None if losses[0] is None else _loss_of_parts(parts, losses[0])
        return loss, self._join(logits), self._join(labels)

    def _join(self, parts: Sequence[Any]) -> object:
        """Returns the outputs of all rows. Shorter ones are padded with -100, as in Trainer."""
        moved = move_leaves(parts, self.args.device)
        return None if parts[0] is None else functools.reduce(nested_concat, moved)

    def _counted_loss(
        self, model: nn.Module, rows: Inputs, return_outputs: bool = False, **_: object
    ) -> Any:
        """Calls ``compute_loss`` of the class, and tells it the number of labels in its rows."""
        if self._is_split and (
            "KL_input_ids" in rows or "aot" in str(getattr(self, "loss_types", ""))
        ):
            raise ValueError(
                "the loss of KTO has a mean over the rows of a forward inside, its estimate of the KL divergence, and AOT sorts "
                "the rows: expected another loss_type, as 'apo_zero_unpaired', or one device, without accumulation"
            )
        return type(self).compute_loss(
            self,
            model,
            rows,
            return_outputs=return_outputs,
            num_items_in_batch=self._count_items(rows),
        )

    def evaluation_loop(self, *arguments: object, **settings: object) -> Any:
        """Runs all batches, as Trainer does.

        Their loss is that of all rows, not the mean over batches.
        """
        self._evaluated = None
        output = super().evaluation_loop(*arguments, **settings)
        name = f"{settings.get('metric_key_prefix', 'eval')}_loss"
        if name in output.metrics and self._evaluated is not None:
            output.metrics[name] = self._evaluated.finish(
                torch.zeros((), device=self.args.device)
            ).item()
        return output


@contextmanager
def _explain_errors() -> Iterator[None]:
    """Surrounds losses of a trainer. Their errors say what a trainer expects."""
    try:
        yield
    except UnknownMeanError as error:
        raise ValueError(
            f"the trainer's loss does not add up over the rows: {error.what}, "
            "expected rows that do not depend on each other, and a function of torch's losses, of .mean(), or of sums over "
            "num_items_in_batch: for another loss, let an update be one forward, or use TrainStep, and "
            "DataParallelCriterion(..., whole=True)"
        ) from error


def _loss_of_rows(trainer: BalancedTrainer, model: nn.Module, rows: Inputs) -> Computed:
    """Returns the loss of some rows, which is told the number of their own labels."""
    # losses over the tokens of all generated completions
    if getattr(trainer, "loss_type", None) in ("dapo", "cispo", "vespo"):
        args = trainer.args
        steps = args.steps_per_generation
        if steps != args.gradient_accumulation_steps:
            raise ValueError(
                f"the loss divides by the tokens of steps_per_generation={steps}, and an update has gradient_accumulation_steps="
                f"{args.gradient_accumulation_steps}, expected equal numbers"
            )
        # The loss divides by the tokens of a window. These are those of the rows.
        tokens = (rows["completion_mask"] * rows.get("tool_mask", 1)).sum()
        rows["num_items_in_batch"] = tokens * steps * trainer.accelerator.num_processes
    return Computed(trainer._counted_loss(model, rows))


def _loss_of_parts(parts: Sequence[Any], otherwise: Tensor) -> Tensor:
    """Returns the loss of some shards. ``otherwise`` is that of rows that do not count."""
    counted = [part for part in parts if part.tensors]
    if not counted:
        return otherwise
    totals = [
        sum(part.tensors[place].to(otherwise.device) for part in counted)
        for place in counted[0].tensors
    ]
    loss: Tensor = counted[0].formula.compute(totals)
    return loss


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


def _copy_containers(value: Any) -> Any:
    """Returns a copy of nested mappings, and of lists and sets in them."""
    new = copy.copy(value) if isinstance(value, (dict, list, set)) else value
    if isinstance(new, dict):
        for key, entry in value.items():
            new[key] = _copy_containers(entry)
    return new
