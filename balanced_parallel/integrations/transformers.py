"""``BalancedTrainer``: the Trainer of transformers, with the loss and the gradients of the whole batch.

A window is all rows of one update, of all micro-batches, devices and ranks. Trainer fetches it before the first forward. So each
shard can divide its sums by the counts of the window, and nothing is averaged afterwards::

    get_batch_samples       the rows of the window, and what its loss divides by
    training_step           the loss of each shard over that, on its device; one backward from their sum
    prediction_step         the same for evaluation; outputs are gathered in the order of the rows

The loss is the model's, label smoothing, ``compute_loss_func``, or a ``compute_loss`` of a subclass. A :class:`Head` says what it
divides by. A few rows of the first batch tell.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import unwrap_peft_model

from ..batch.outputs import PerReplica, join
from ..batch.rows import Whole, move_leaves
from ..loss.rules import RULES, loss_weight, reduction_of
from ..loss.sums import add_up, weighted_sum
from ..replicas.model import DataParallelModel
from ..runtime.collectives import rank, sum_over_ranks, world_size
from ..runtime.devices import DeviceLike, keep_random_state, resolve_devices

Inputs = Mapping[str, Any]
CountRule = functools.partial[Any]  # of a function of the inputs
POSITIONS = ("start_positions", "end_positions")  # of answers: those outside of the text do not count
IGNORED = -100  # a label


class Means(TorchFunctionMode):
    """Computes each mean of torch's losses inside of the block as a sum over a divisor, in place of its own count.

    Args:
        divisors: one for each mean, in the order of their calls; a number for all; or ``None`` for their own counts.
    """

    def __init__(self, divisors: Sequence[float] | float | None = None) -> None:
        super().__init__()
        self.divisors = divisors
        self.counts: list[float] = []  # of each mean
        self.ignored: list[float | None] = []  # the label that each leaves out; nan if it has weights
        self.values: list[Tensor] = []
        self.summed: list[float] = []  # the counts of losses that are sums already

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reduction = reduction_of(functools.partial(function, **kwargs)) if function in RULES else "none"
        if reduction == "none":
            return function(*args, **kwargs)
        is_told, count = isinstance(self.divisors, Sequence), 0.0
        if not is_told or function is F.ctc_loss:  # to count waits for the device
            mean = functools.partial(function, **kwargs | {"reduction": "mean" if reduction == "sum" else reduction})
            count = float(loss_weight(mean, *args))
        if reduction == "sum":
            self.summed.append(count)
            return function(*args, **kwargs)
        if self.divisors is None:
            value = function(*args, **kwargs)
        else:
            divisor = self.divisors[len(self.counts)] if isinstance(self.divisors, Sequence) else self.divisors
            value = self._sum(function, args, kwargs, count) / divisor
        self.counts.append(count)
        has_labels = function in (F.cross_entropy, F.nll_loss) and not args[1].is_floating_point()
        ignored = kwargs.get("ignore_index", IGNORED) if has_labels else None
        self.ignored.append(ignored if kwargs.get("weight") is None else math.nan)
        self.values.append(value.detach())
        return value

    def _sum(self, function: Callable[..., Tensor], args: Any, kwargs: Any, count: float) -> Tensor:
        if function is F.ctc_loss:  # its sum does not divide by the lengths
            return weighted_sum(function(*args, **kwargs), count)
        if args[0].dtype in (torch.float16, torch.bfloat16):
            return function(*args, **kwargs | {"reduction": "none"}).float().sum()
        return function(*args, **kwargs | {"reduction": "sum"})


class Head(NamedTuple):
    """The divisors of a loss: ``num_items_in_batch`` if it divides by that, and one for each mean of torch inside of it."""

    has_items: bool
    counts: tuple[CountRule | None, ...]  # of the inputs; None where only a forward tells
    factors: tuple[float, ...]  # of each mean
    has_sums: bool = False  # that are not divided

    def items(self, divisors: Sequence[float]) -> Tensor | None:
        """Returns the ``num_items_in_batch`` of a loss with these divisors."""
        return torch.tensor(divisors[0]) if self.has_items else None

    def means(self, divisors: Sequence[float]) -> contextlib.AbstractContextManager[Any]:
        """Returns a block in which the means of a loss have these divisors."""
        return Means(divisors[self.has_items :]) if len(self.counts) > self.has_items else contextlib.nullcontext()


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
        self._head: Head | None = None
        self._divisors: list[float] = []  # of the rows that run now; 1 in place of 0
        self._has_labels = True  # for each divisor
        self._repeated: Any = None  # a batch whose rows another rank has
        self._evaluated: list[tuple[Tensor, Tensor]] = []  # the terms of the loss of each batch, and their divisors

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

    def _run(self, model: nn.Module, inputs: Inputs, function: Callable[[nn.Module, Inputs], Any]) -> PerReplica:
        """Returns ``function(model, inputs)`` of each shard of the rows, on its device."""
        if isinstance(model, DataParallelModel):
            outputs: PerReplica = model(Whole(function), dict(inputs))
            return outputs
        return PerReplica([function(model, inputs)], [None])

    def _find_head(self, inputs: Inputs) -> Head:
        """Returns the divisors of the loss. The first call runs the model on a few rows."""
        if self._head is None:
            rows = move_leaves(dict(inputs), next(self.model.parameters()).device)
            self.model.eval()  # training_step undoes it
            with torch.no_grad(), self.accelerator.autocast():
                try:
                    self._head = read_head(self._loss_of_rows, sample_rows(rows, self.label_names), self._counts_of_labels())
                except ValueError:
                    if len(self.devices) * world_size() * self.args.gradient_accumulation_steps > 1:
                        raise
                    self._head = Head(False, (), ())  # a window is one forward, and any loss is that of the window
        return self._head

    def _counts_of_labels(self) -> list[CountRule]:
        """Returns what a loss may divide by. The first is what a loss divides by that gives no hint."""
        ignored = getattr(getattr(self.model, "config", None), "semantic_loss_ignore_index", IGNORED)
        is_causal = self._loss_shifts_labels or type(unwrap_peft_model(self.model)).__name__ in CAUSAL.values()
        counts: list[CountRule] = []
        for name in ("shift_labels", *self.label_names):
            counts += [functools.partial(count_labels, name, ignored, first) for first in ((1, 0) if is_causal else (0, 1))]
            counts += [functools.partial(count_positions, name), functools.partial(count_elements, name)]
        return [*counts, functools.partial(count_rows)]

    def _loss_of_rows(self, inputs: Inputs, items: float | None) -> float:
        number = None if items is None else torch.tensor(items)
        return float(self.compute_loss(self.model, dict(inputs), num_items_in_batch=number))

    def _count(self, inputs: Inputs) -> Tensor:
        """Returns what the loss of these rows divides by, one number for each of its divisors."""
        head = self._find_head(inputs)
        counts = [None if count is None else float(count(inputs)) for count in head.counts]
        if None in counts:

            def forward(replica: nn.Module, rows: Inputs) -> list[float]:
                means = Means()
                with means:
                    self.compute_loss(replica, dict(rows), num_items_in_batch=head.items([1.0]))
                return means.counts

            with torch.no_grad(), keep_random_state():
                of_means = self._run(self._wrap_model(self.model_wrapped), self._prepare_inputs(inputs), forward)
            counts[head.has_items :] = map(sum, zip(*of_means, strict=True))
        return torch.tensor(counts, dtype=torch.float64) * (inputs is not self._repeated)

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Tensor | None:
        return self._head.items(self._divisors) if self._head is not None and self._divisors else None

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Returns the micro-batches of the next update, and what their loss divides by."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches:
            batches[-1] = self._leave_out_repeated(batches[-1])
            counts = sum_over_ranks(torch.stack([self._count(batch) for batch in batches]).sum(0)).tolist()
            self._divisors, self._has_labels = [count or 1.0 for count in counts], all(counts)
        return batches, self._get_num_items_in_batch(batches, device)

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
        """Runs forward and backward of a micro-batch. Returns its part of the loss of the update."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        is_repeated = inputs is self._repeated
        inputs, head = self._prepare_inputs(inputs), self._find_head(inputs)

        def compute(replica: nn.Module, rows: Inputs) -> Any:
            with head.means(self._divisors):
                return self.compute_loss(replica, dict(rows), num_items_in_batch=num_items_in_batch)

        is_deferred = isinstance(model, DataParallelModel) and not self.accelerator.sync_gradients
        with cast(Any, model).no_sync() if is_deferred else contextlib.nullcontext():
            losses = self._run(model, inputs, compute)
            loss = add_up(losses, self.args.device) * (0.0 if is_repeated else world_size())  # DDP averages over the ranks
            self.accelerator.backward(loss)
        steps = self.args.torch_empty_cache_steps
        if steps and self.state.global_step % steps == 0 and torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        return loss.detach() if self._has_labels else torch.full_like(loss, math.nan)  # as a mean of nothing

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Runs a batch. Returns its loss, and outputs and labels in the order of its rows."""
        predict = functools.partial(self._predict, super().prediction_step, model)
        has_loss = bool(self.label_names or self.can_return_loss) and all(
            inputs.get(name) is not None for name in self.label_names
        )
        new = self._leave_out_repeated(inputs) if has_loss else inputs
        if new is not inputs:  # the loss of fewer rows than those with outputs
            predict(new, True, ignore_keys, has_loss=True, is_evaluated=True)
        return predict(inputs, prediction_loss_only, ignore_keys, has_loss=has_loss, is_evaluated=has_loss and new is inputs)

    def _predict(
        self, step: Callable[..., Any], model: nn.Module, inputs: Inputs, *settings: Any, has_loss: bool, is_evaluated: bool
    ) -> tuple[Any, Any, Any]:
        device, head = self.args.device, self._find_head(inputs) if has_loss else Head(False, (), ())
        counts = self._count(inputs) if has_loss else torch.empty(0)
        divisors = self._divisors = [count or 1.0 for count in counts.tolist()]

        def predict(replica: nn.Module, rows: Inputs) -> tuple[Any, Any, Any, list[Tensor]]:
            with head.means(divisors) as means:
                result = step(replica, dict(rows), *settings)
            return *result, means.values if means else []

        with torch.no_grad():
            losses, logits, labels, values = zip(*self._run(model, inputs, predict), strict=True)
        loss = None if losses[0] is None else add_up(losses, device)
        if is_evaluated and loss is not None and head.counts and not head.has_sums:
            terms = [
                add_up(column, device) * factor for column, factor in zip(zip(*values, strict=True), head.factors, strict=True)
            ]
            terms = [loss - sum(terms), *terms] if head.has_items else terms
            self._evaluated.append((torch.stack(terms).double().cpu() * counts, counts))
        joined = [None if parts[0] is None else join(parts, device, 0) for parts in (logits, labels)]
        return loss, joined[0], joined[1]

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Runs all batches, as Trainer does. Their loss is that of all rows, not the mean over batches."""
        self._evaluated = []
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if f"{metric_key_prefix}_loss" in output.metrics and self._evaluated:
            sums, counts = (sum_over_ranks(torch.stack(column).sum(0)) for column in zip(*self._evaluated, strict=True))
            output.metrics[f"{metric_key_prefix}_loss"] = (sums / counts).sum().item()
        return output


def read_head(loss_of: Callable[[Inputs, float | None], float], inputs: Inputs, candidates: Sequence[CountRule]) -> Head:
    """Returns what a loss divides by.

    Args:
        loss_of: the loss of rows, told a number of items.
        inputs: a few rows, whose candidates differ.
        candidates: functions of the inputs.
    """

    def run(items: float | None, divisors: Sequence[float] | float | None, rows: Inputs = inputs) -> tuple[float, Means]:
        with Means(divisors) as means:
            return loss_of(rows, items), means

    def run_apart(items: float, divisors: Sequence[float] | float) -> float:
        return sum(run(items, divisors, take_rows(inputs, slice(row, row + 1)))[0] for row in range(count_rows(inputs)))

    def find_count(number: float, rules: Sequence[CountRule], tolerance: float = 0.0) -> CountRule | None:
        numbers = [(abs(rule(inputs) - number), place) for place, rule in enumerate(rules) if not math.isnan(rule(inputs))]
        distance, place = min(numbers, default=(math.inf, 0))
        return rules[place] if distance <= tolerance * number else None

    (of_means, means), (with_items, _) = run(math.inf, None), run(1.0, None)
    has_items = of_means != with_items
    of_sums, _ = run(math.inf, math.inf)
    if of_sums and abs(run_apart(math.inf, math.inf) - of_sums) > 0.02 * abs(of_sums):
        raise ValueError(
            f"the loss of a few rows has a part of {of_sums:.3g} that is no sum or mean over them: expected means of torch's "
            "losses, or sums over num_items_in_batch, as compute_loss_func can have them. The loss of a router "
            "(output_router_logits=True) depends on all rows at once"
        )
    counts = []
    for number, ignored in zip(means.counts, means.ignored, strict=True):
        counts.append(find_count(number, [rule for rule in candidates if ignored_by(rule, inputs) == ignored]))
    if has_items:
        number, tolerance = (means.summed[0], 0.0) if len(set(means.summed)) == 1 else (0.0, 0.05)
        if not number:
            with contextlib.suppress(TypeError):  # a function that divides by None
                number = (with_items - of_means) / (run(None, None)[0] - of_means)
        guess = next(rule for rule in candidates if not math.isnan(rule(inputs)))
        counts.insert(0, find_count(number, candidates, tolerance) if number else guess)
        if counts[0] is None:
            raise ValueError(
                f"the loss divides by {number:.4g} for the labels of a few rows, expected the number of those that count"
            )
    divisors = [2.0 * count_rows(inputs)] * len(counts)
    items = divisors[0] if has_items else math.inf
    (whole, _), apart = run(items, divisors[has_items:]), run_apart(items, divisors[has_items:])
    if abs(apart - whole) > 0.02 * abs(whole):
        raise ValueError(
            f"the loss of a few rows is {whole:.4g}, and those of each add up to {apart:.4g}: its rows depend on each other, "
            "expected a sum over rows. DataParallelCriterion(..., whole=True) and TrainStep compute such losses"
        )
    factors = []
    for place in range(len(means.counts)):
        alone = [divisors[0] if place == other else math.inf for other in range(len(means.counts))]
        value, of_mean = run(math.inf, alone)
        factors.append((value - of_sums) / float(of_mean.values[place]))
    return Head(has_items, tuple(counts), tuple(factors), of_sums != 0)


def sample_rows(inputs: Inputs, names: Sequence[str]) -> Inputs:
    """Returns the first row twice and the last, with another mask and other ignored labels: no two counts are the same."""
    is_packed = any(isinstance(value, Tensor) and value.dim() and len(value) != count_rows(inputs) for value in inputs.values())
    rows = take_rows(inputs, [0] if is_packed else [0, 0, -1])
    mask = rows.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and len(mask) > 1:
        rows["attention_mask"] = mask.clone()
        rows["attention_mask"][1, 2:] = 0  # some losses count the words of a text
    for name in ("shift_labels", *names):
        labels = rows.get(name)
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            continue
        if labels.dim() > 1 and (labels == IGNORED).any():
            places = torch.arange(labels.size(-1), device=labels.device)
            counted = torch.stack([places < 3, (places > 0) & (places < 6), places == 1])[: len(labels)]
            counted = counted.view(len(labels), *[1] * (labels.dim() - 2), -1)
            rows[name] = labels.where(labels >= 0, labels.max().clamp(min=0)).where(counted, IGNORED)
        elif name in POSITIONS and "input_ids" in rows:
            length = rows["input_ids"].size(1)
            rows[name] = labels.new_tensor([0, 0 if name == POSITIONS[0] else length, length])[: len(labels)]
    return rows


def count_rows(inputs: Inputs) -> int:
    """Returns the number of rows of a batch."""
    return int(find_batch_size(inputs))


def take_rows(inputs: Inputs, places: slice | list[int]) -> dict[str, Any]:
    """Returns some rows of a batch. Other arguments stay as they are."""
    rows = count_rows(inputs)
    tensors = {name for name, value in inputs.items() if isinstance(value, Tensor) and value.dim() and len(value) == rows}
    return {name: value[places] if name in tensors else value for name, value in inputs.items()}


def count_labels(name: str, ignored: int, first: int, inputs: Inputs) -> float:
    """Returns the number of labels that are not ignored, from position ``first`` of each row on."""
    labels = inputs.get(name)
    if labels is None or labels.is_floating_point() or labels.dim() <= first:
        return math.nan
    return float((labels[..., first:] != ignored).sum())


def count_positions(name: str, inputs: Inputs) -> float:
    """Returns the number of positions that are in the text."""
    if name not in POSITIONS or "input_ids" not in inputs:
        return math.nan
    return float((inputs[name] < inputs["input_ids"].size(1)).sum())


def count_elements(name: str, inputs: Inputs) -> float:
    """Returns the number of labels."""
    return math.nan if inputs.get(name) is None else float(inputs[name].numel())


def ignored_by(rule: CountRule, inputs: Inputs) -> int | None:
    """Returns the label that a count leaves out."""
    if rule.func is count_positions:
        return int(inputs["input_ids"].size(1)) if "input_ids" in inputs else None
    return int(rule.args[1]) if rule.func is count_labels else None
