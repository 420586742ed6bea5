"""``BalancedTrainer``: the Trainer of transformers, with the loss and the gradients of the whole batch.

A window is all rows of one update, of all micro-batches, devices and ranks. Each backward runs on sums, and what they are divided
by is summed too, so nothing is averaged::

    get_batch_samples       the rows of the window, and a preliminary divisor
    training_step           the sums of each shard over that, on its device; one backward from their total
                            after the last backward: gradients x preliminary divisor / count of the window
    prediction_step         the same for evaluation; outputs are gathered in the order of the rows

The loss is the model's, label smoothing, ``compute_loss_func``, or a ``compute_loss`` of a subclass. A :class:`Head` says what it
is made of. A few rows of the first batch tell.
"""

import contextlib
import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import unwrap_peft_model

from ..batch.outputs import join
from ..batch.rows import Whole, move_leaves
from ..loss.means import sum_of_loss
from ..loss.rules import RULES, arguments_of, divisor, reduction_in
from ..loss.sums import add_up
from ..replicas.model import DataParallelModel
from ..runtime.collectives import gather_objects, rank, sum_over_ranks, world_size
from ..runtime.devices import DeviceLike, keep_random_state, resolve_devices

Inputs = Mapping[str, Any]


class LossSums(TorchFunctionMode):
    """Computes each mean of torch's losses in its block as a sum over a divisor, and records the result and its own divisor.

    Args:
        divisors: one for each mean in the order of their calls; a number for all; or ``None`` for means as they are.
    """

    def __init__(self, divisors: Sequence[float] | float | None) -> None:
        super().__init__()
        self.is_active = divisors is not None
        self.divisors = iter(divisors) if isinstance(divisors, Sequence) else itertools.repeat(divisors)
        self.sums: list[Tensor] = []
        self.counts: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_active or function not in RULES:
            return function(*args, **kwargs)
        arguments = arguments_of(function, *args, **kwargs)
        if reduction_in(arguments) not in ("mean", "batchmean"):
            return function(**arguments)
        count = divisor(RULES[function], function, arguments)
        share = next(self.divisors, None) or 1.0  # more means than divisors are refused
        value = sum_of_loss(function, arguments, count) / share
        self.counts.append(count)
        self.sums.append(value)
        return value


class Head(NamedTuple):
    """Parts of a loss: a sum over ``num_items_in_batch``, means of torch, and a sum that is not divided."""

    factors: tuple[float, ...]  # of the first sum, 0 or 1, and of each mean
    has_rest: bool

    @property
    def is_mean(self) -> bool:
        """Returns True if the loss is one mean: gradients can be divided by its count after the last backward."""
        return len(self.factors) == 2 and not self.factors[0] and not self.has_rest

    def divide(self, terms: Tensor) -> Tensor:
        """Returns the loss from its sums, and what they are divided by."""
        sums, counts = terms[:, [bool(factor) for factor in self.factors]]
        loss: Tensor = (sums / counts).sum()
        return loss


class Task(nn.Module):
    """Calls a function of the model and the rows of a shard. Its replicas do so on their devices."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[nn.Module, Inputs], Any], inputs: Inputs) -> Any:
        """Returns ``function(model, inputs)``."""
        return function(self.model, inputs)


class BalancedTrainer(Trainer):
    """A ``transformers.Trainer`` whose loss and gradients are those of plain PyTorch with the whole batch on one device.

    In one process it wraps the model in a :class:`DataParallelModel`, where Trainer uses ``nn.DataParallel``. Under torchrun the
    model is Trainer's ``DistributedDataParallel``. With accumulation too, the loss of an update is that of all its rows at once.
    Rows that a sampler repeats on the last ranks do not count. ``eval_loss`` is the loss of all rows.

    Args:
        model, arguments, settings: those of ``transformers.Trainer``.
        args: the ``TrainingArguments``, which are copied.
        device_ids: devices of the replicas, as in :class:`DataParallelModel`. A batch has ``per_device_train_batch_size``
            rows for each. ``None`` means the devices that Trainer would use: all GPUs in one process, or one device of each rank.

    Raises:
        ValueError: ``device_ids`` under torchrun; DeepSpeed or a ``parallelism_config``; ``torch_compile`` on several devices. At
            the first batch of a window in parts, a loss that is not a sum over rows: contrastive, or with that of a router.

    Example:
        >>> trainer = BalancedTrainer(model, args, train_dataset=rows)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *arguments: Any,
        device_ids: Sequence[DeviceLike] | None = None,
        **settings: Any,
    ) -> None:
        args = copy.copy(TrainingArguments("tmp_trainer") if args is None else args)
        if device_ids is not None and args.world_size > 1:
            raise ValueError(
                f"device_ids={device_ids!r} was given with {args.world_size} ranks, expected None: each has a device"
            )
        devices = [] if device_ids is None else resolve_devices(device_ids)
        if devices:
            args.n_gpu  # noqa: B018 - reads the devices, and would do so again
            args._n_gpu = len(devices)  # its batch sizes are multiples of it
        args.average_tokens_across_devices = False  # would multiply the loss
        super().__init__(model, args, *arguments, **settings)
        if getattr(self.model, "is_quantized", False) and not devices:
            args._n_gpu = 1  # its weights have no copies
        count = max(args.n_gpu, 1)  # 1 if the model's layers are on several devices
        self.devices = devices or [torch.device(args.device.type, place) if count > 1 else args.device for place in range(count)]
        if self.is_deepspeed_enabled or getattr(self.accelerator, "parallelism_config", None) is not None:
            raise ValueError("DeepSpeed or a parallelism_config was given, expected neither: transformers.Trainer has them")
        if args.optim in ("lomo", "adalomo"):
            raise ValueError(f"optim={args.optim!r} updates inside of the backward, expected another: a window has several")
        if args.torch_compile and len(self.devices) > 1:
            raise ValueError(f"torch_compile=True with {len(self.devices)} devices in one process, expected one: start torchrun")
        self._parallel: DataParallelModel | None = None
        self._head: Head | None = None  # None: unknown
        self._has_any_loss = False  # a window is one forward
        self._divisors: list[float] = []  # of the rows that run now: num_items_in_batch, and that of each mean
        self._is_empty = False  # nothing in the window counts
        self._backwards = 0  # that are left in it
        self._losses: list[Tensor] = []  # of its micro-batches
        self._counts: list[Tensor] = []  # of the mean in each of them
        self._repeated: Any = None  # a batch whose rows another rank has
        self._evaluated: list[Tensor] = []  # the sums of each batch, and their divisors

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Returns the model with its replicas, the same ones for training and evaluation."""
        if isinstance(model, DataParallelModel):
            return model
        if len(self.devices) == 1:
            wrapped: nn.Module = super()._wrap_model(model, training, dataloader)
            return wrapped
        if self._parallel is None or self._parallel.module.model is not model:
            precision = self.accelerator.mixed_precision
            self._parallel = DataParallelModel(Task(model), self.devices, precision=None if precision == "no" else precision)
        return self._parallel

    def _prepare_input(self, data: Any) -> Any:
        return super()._prepare_input(data) if len(self.devices) == 1 else data  # replicas move their rows

    def _run(
        self, model: nn.Module, inputs: Inputs, head: Head | None, function: Callable[[nn.Module, Inputs], Any]
    ) -> tuple[Sequence[Any], list[Tensor], list[Tensor]]:
        """Runs each shard on its device. Returns the results, and the sum and the count of each mean over all shards."""
        divisors = head and self._divisors[1:]

        def run(replica: nn.Module, rows: Inputs) -> tuple[Any, list[Tensor], list[Tensor]]:
            with LossSums(divisors) as means:
                return function(replica, dict(rows)), means.sums, means.counts

        shards = model(Whole(run), dict(inputs)) if isinstance(model, DataParallelModel) else [run(model, inputs)]
        results, *columns = zip(*shards, strict=True)
        if head is not None and {len(counts) for counts in columns[1]} != {len(head.factors) - 1}:
            raise ValueError(
                f"the loss computes {max(map(len, columns[1]))} means, and {len(head.factors) - 1} of the first rows, expected "
                "the same means of all rows: compute them always, also of nothing"
            )
        sums, counts = ([add_up(parts, self.args.device) for parts in zip(*column, strict=True)] for column in columns)
        return results, sums, counts

    def _find_head(self, batches: Sequence[Inputs]) -> Head | None:
        """Returns the parts of the loss, if they are known. The first call runs the model on a few rows."""
        if self._head is None and not self._has_any_loss:
            self.model.eval()  # training_step undoes it
            try:
                with self.accelerator.autocast():
                    head = next(filter(None, map(self._read_head, batches)), None)
            except ValueError:
                if len(self.devices) * world_size() * self.args.gradient_accumulation_steps > 1:
                    raise
                head, self._has_any_loss = None, True
            self._head = next(filter(None, gather_objects(head)), None)
        return self._head

    def _read_head(self, inputs: Inputs) -> Head | None:
        """Returns the parts of the loss of a few rows, or None if it is zero: they have no labels."""
        rows = count_rows(inputs)
        is_packed = any(isinstance(value, Tensor) and value.dim() and len(value) != rows for value in inputs.values())
        sample = take_rows(inputs, [0] if is_packed else [0, 0, -1])
        sample = move_leaves(sample, next(self.model.parameters()).device)
        size = count_rows(sample)

        def run(rows: Inputs, divisor: float, items: float) -> tuple[Tensor, list[Tensor]]:
            self._divisors = [items]
            with LossSums(divisor) as means:
                loss = self.compute_loss(self.model, dict(rows), num_items_in_batch=self._get_num_items_in_batch([rows]))
            return loss, means.sums

        values = []
        for divisors in ((math.inf, math.inf), (math.inf, size), (size, size)):
            with torch.no_grad():
                apart = sum(float(run(take_rows(sample, [row]), *divisors)[0]) for row in range(size))
                values.append(whole := float(run(sample, *divisors)[0]))
            if not abs(apart - whole) <= 0.02 * abs(whole):
                raise ValueError(
                    f"the loss of a few rows is {whole:.4g}, and those of each add up to {apart:.4g}: a part of it is no sum or "
                    "mean over them, such as that of a router (output_router_logits=True), or its rows depend on each other. "
                    "Expected means of torch's losses, or sums over num_items_in_batch, as compute_loss_func can have them. "
                    "DataParallelCriterion(..., whole=True) and TrainStep compute other losses"
                )
        loss, means = run(sample, size, size)
        factors = torch.autograd.grad(loss, means, allow_unused=True, materialize_grads=True) if means else ()
        has_items = values[1] != values[0]
        return Head((float(has_items), *map(float, factors)), values[0] != 0) if means or values[2] else None

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any = None) -> Tensor | None:
        is_changed = type(self).compute_loss is not Trainer.compute_loss or self.args.use_liger_kernel
        is_told = is_changed or self.compute_loss_func is not None or self.label_smoother is not None
        return torch.tensor(self._divisors[0]) if is_told and batch_samples and "labels" in batch_samples[0] else None

    def _count(self, inputs: Inputs, head: Head | None) -> Tensor:
        """Returns the size of the labels, their ``num_items_in_batch``, and the count of each mean if there are several."""
        sizes = [inputs[name].numel() for name in self.label_names if isinstance(inputs.get(name), Tensor)]
        numbers = [sum(sizes) or count_rows(inputs), 1]
        if head and head.factors[0]:
            is_causal = self._loss_shifts_labels or type(unwrap_peft_model(self.model)).__name__ in CAUSAL.values()
            labels = inputs.get("shift_labels", inputs["labels"][..., int(is_causal) :])
            ignored = getattr(getattr(self.model, "config", None), "semantic_loss_ignore_index", -100)
            numbers[1] = int(labels.ne(ignored).sum())
        if head and len(head.factors) > 1 and not head.is_mean:
            self.model.eval()
            self._divisors = [1.0] * len(head.factors)
            function = functools.partial(self.compute_loss, num_items_in_batch=self._get_num_items_in_batch([inputs]))
            model = self._wrap_model(self.model_wrapped)
            with torch.no_grad(), keep_random_state():
                numbers += map(float, self._run(model, self._prepare_inputs(inputs), head, function)[2])
        return torch.tensor(numbers, dtype=torch.float64) * (inputs is not self._repeated)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Returns the micro-batches of the next update, and what their loss divides by if it is told."""
        self._divisors = [1.0]
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches:
            batches[-1] = self._leave_out_repeated(batches[-1])
            head = self._find_head(batches)
            counts = sum_over_ranks(torch.stack([self._count(batch, head) for batch in batches]).sum(0)).tolist()
            divisors = [counts[1], counts[0]] if head and head.is_mean else counts[1:]
            self._divisors, self._is_empty = [divisor or 1.0 for divisor in divisors], not all(divisors)
            self._losses, self._counts, self._backwards = [], [], len(batches)
        return batches, self._get_num_items_in_batch(batches)

    def _leave_out_repeated(self, inputs: Inputs) -> Inputs:
        """Returns the rows of a rank's last batch without those that were added to give all ranks the same number."""
        state = self.accelerator.gradient_state
        rows = count_rows(inputs)
        if world_size() == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return inputs
        new = min(max(state.remainder - rank() * rows, 0), rows)
        inputs = take_rows(inputs, slice(max(new, 1)))
        self._repeated = self._repeated if new else inputs
        return inputs

    def training_step(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Any = None) -> Tensor:
        """Runs forward and backward of a micro-batch. Returns zero, and after the last one the loss of the update."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        is_repeated, inputs = inputs is self._repeated, self._prepare_inputs(inputs)
        self._backwards -= 1
        is_deferred = isinstance(model, DataParallelModel) and self._backwards
        with cast(Any, model).no_sync() if is_deferred else contextlib.nullcontext():
            function = functools.partial(self.compute_loss, num_items_in_batch=num_items_in_batch)
            losses, _, counts = self._run(model, inputs, self._head, function)
            loss = add_up(losses, self.args.device) * (0.0 if is_repeated else world_size())  # DDP averages over the ranks
            self.accelerator.backward(loss)
        self._losses.append(loss.detach())
        self._counts += [] if is_repeated else counts
        steps = self.args.torch_empty_cache_steps
        if steps and self.state.global_step % steps == 0 and torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        return torch.zeros_like(self._losses[0]) if self._backwards else self._finish()

    def _finish(self) -> Tensor:
        """Returns the loss of a window. Its gradients are divided by the count of a mean that only the forwards tell."""
        loss = add_up(self._losses, self.args.device)
        if self._head is not None and self._head.is_mean:
            count = sum_over_ranks(add_up([0, *self._counts], self.args.device)).to(loss.dtype)
            factor = self._divisors[1] / count.where(count != 0, 1.0)  # on the device: the host does not wait
            loss = (loss * factor).where(count != 0, math.nan)
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor.to(parameter.grad.device))
        return torch.full_like(loss, math.nan) if self._is_empty else loss  # as a mean of nothing

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Runs a batch. Returns its loss, and outputs and labels in the order of its rows."""
        predict = functools.partial(self._predict, super().prediction_step, model)
        names = self.label_names
        if not (names or self.can_return_loss) or any(inputs.get(name) is None for name in names):
            return predict(None, inputs, prediction_loss_only, ignore_keys)
        new, head = self._leave_out_repeated(inputs), self._find_head([inputs])
        result = predict(head, inputs, prediction_loss_only, ignore_keys)
        if new is not inputs and self._evaluated:  # the loss is that of fewer rows than those with outputs
            self._evaluated.pop()
            predict(head, new, True, ignore_keys)
        return result

    def _predict(
        self, step: Callable[..., Any], model: nn.Module, head: Head | None, inputs: Inputs, *settings: Any
    ) -> tuple[Any, Any, Any]:
        size, items = self._count(inputs, head and head._replace(factors=head.factors[:1])).tolist()
        self._divisors = [size or 1.0] * (len(head.factors) if head else 1)
        with torch.no_grad():
            results, sums, counts = self._run(model, inputs, head, lambda replica, rows: step(replica, rows, *settings))
        losses, logits, labels = zip(*results, strict=True)
        loss = None if losses[0] is None else add_up(losses, self.args.device)
        if loss is not None and head is not None and not head.has_rest:
            means = [factor * float(mean) for factor, mean in zip(head.factors[1:], sums, strict=True)]
            terms = torch.tensor([[float(loss) - sum(means), *means], [items, *map(float, counts)]], dtype=torch.float64)
            terms[0] *= self._divisors[0]
            self._evaluated.append(terms * (inputs is not self._repeated))
            loss = head.divide(terms).to(loss)
        joined = [None if parts[0] is None else join(parts, self.args.device, 0) for parts in (logits, labels)]
        return loss, joined[0], joined[1]

    def evaluation_loop(self, *arguments: Any, **settings: Any) -> Any:
        """Runs all batches, as Trainer does. Their loss is that of all rows, not the mean over batches."""
        self._evaluated = []
        output = super().evaluation_loop(*arguments, **settings)
        name = f"{settings.get('metric_key_prefix', 'eval')}_loss"
        if name in output.metrics and self._evaluated and self._head is not None:
            output.metrics[name] = self._head.divide(sum_over_ranks(torch.stack(self._evaluated).sum(0))).item()
        return output


def count_rows(inputs: Inputs) -> int:
    """Returns the number of rows of a batch."""
    return int(find_batch_size(inputs))


def take_rows(inputs: Inputs, places: slice | list[int]) -> dict[str, Any]:
    """Returns some rows of a batch. Other arguments stay as they are."""
    rows = count_rows(inputs)
    tensors = {name for name, value in inputs.items() if isinstance(value, Tensor) and value.dim() and len(value) == rows}
    return {name: value[places] if name in tensors else value for name, value in inputs.items()}
