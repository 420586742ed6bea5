"""``BalancedTrainer``: the Trainer of transformers, with the loss and the gradients of the whole
batch.

A window is all rows of one update, of all micro-batches, devices and ranks. Each backward runs on
sums over divisors::

    get_batch_samples   the rows of the window, and the divisors: what is counted in all rows, or a guess if the loss is one mean
    training_step       the sums of each shard, on its device; one backward from their total
                        after the last backward, if the loss is one mean: gradients x guess / count of the window
    prediction_step     the same for evaluation; outputs are gathered in the order of the rows
"""

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    clear_device_cache,
    find_batch_size,
    unwrap_peft_model,
)

from ..batch.outputs import join
from ..batch.rows import Whole, move_leaves, take
from ..loss.means import MeansAsSums
from ..loss.sums import add_up
from ..replicas.model import DataParallelModel
from ..runtime.collectives import gather_objects, rank, sum_over_ranks, world_size
from ..runtime.devices import DeviceLike, keep_random_state, resolve_devices

Inputs = dict[str, object]  # the arguments of a model, with the rows of a batch
Function = Callable[[nn.Module, Inputs], Sequence[Any]]  # returns a loss first, or None


class Parts(NamedTuple):
    """A loss as a sum over parts: means of torch's losses, and a rest, which is a sum."""

    # The first is that of the rest, 0 or 1. There are none if the loss is not such a sum.
    factors: tuple[float, ...]
    has_items: bool = True  # The rest is divided by num_items_in_batch.
    guess: float = 0.0  # about the count of a batch, if the loss is one mean


class Task(nn.ModuleList):
    """Calls a function with the model and the rows of a shard. Its replicas do so on their devices."""

    def forward(self, function: Callable[[nn.Module, Inputs], object], inputs: Inputs) -> object:
        """Returns ``function(model, inputs)``."""
        return function(self[0], inputs)


class BalancedTrainer(Trainer):
    """A ``transformers.Trainer`` whose loss and gradients are those of plain PyTorch with the whole
    batch on one device.

    In one process the model runs in a :class:`DataParallelModel`, under torchrun in Trainer's
    ``DistributedDataParallel``. With accumulation, the batch is all rows of an update. Rows that a
    sampler repeats do not count. ``eval_loss`` is that of all rows.

    Args:
        model, args, arguments, kwargs: those of ``transformers.Trainer``. ``args`` are copied.
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
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *arguments: object,
        device_ids: Sequence[DeviceLike] | None = None,
        **kwargs: object,
    ) -> None:
        args = copy.copy(TrainingArguments("tmp_trainer") if args is None else args)
        if device_ids is not None and args.world_size > 1:
            raise ValueError(
                f"device_ids={device_ids!r} was given on {args.world_size} ranks, expected None: each has a device"
            )
        # Quantized weights have no copies.
        count = 1 if getattr(model, "is_quantized", False) else args.n_gpu
        # batch sizes are multiples of it
        args._n_gpu = count if device_ids is None else len(resolve_devices(device_ids))
        args.average_tokens_across_devices = False  # would multiply the loss
        super().__init__(model, args, *arguments, **kwargs)
        self.devices = (
            [args.device] if args.n_gpu < 2 else resolve_devices(device_ids or range(args.n_gpu))
        )
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
        self._parts: Parts | None = None  # They are found in the first batch.
        # The rows that run now have num_items_in_batch, and the divisor of each mean.
        self._divisors = [1.0]
        self._terms = torch.zeros(2)  # Terms of the window, or of all batches of an evaluation.

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: object = None
    ) -> nn.Module:
        # one for training and evaluation
        if len(self.devices) > 1 and not isinstance(self.model_wrapped, DataParallelModel):
            precision = self.accelerator.mixed_precision.replace("no", "fp32")
            self.model_wrapped: nn.Module = DataParallelModel(
                Task([self.model]), self.devices, precision=precision, refresh="recorded"
            )
        return (
            self.model_wrapped
            if len(self.devices) > 1
            else super()._wrap_model(model, training, dataloader)
        )

    def _prepare_input(self, data: object) -> object:
        # replicas move their rows
        return super()._prepare_input(data) if len(self.devices) == 1 else data

    def _count_items(self, inputs: Inputs) -> Tensor | float:
        """Returns the number of labels, if the loss may be divided by it, or 1."""
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor) or (
            self._parts is not None and not self._parts.has_items
        ):
            return 1.0
        shifted = inputs.get("shift_labels")
        if not isinstance(shifted, Tensor):
            shifted = labels[..., int(self._loss_shifts_labels) :]
        return shifted.ne(-100).sum()

    def _run(
        self, model: nn.Module, inputs: Inputs, function: Function | None = None
    ) -> tuple[Sequence[Sequence[Any]], Tensor, Tensor]:
        """Runs each shard.

        Returns results, the sum of their losses, and terms: this and items, sum and count of each
        mean.
        """
        function = function or (
            lambda *shard: [
                self.compute_loss(*shard, num_items_in_batch=torch.tensor(self._divisors[0]))
            ]
        )

        def run(replica: nn.Module, rows: Inputs) -> tuple[Sequence[Any], list[Tensor | float]]:
            with MeansAsSums(self._divisors[1:]) as means:
                result = function(replica, dict(rows))
            return result, [
                0.0 if result[0] is None else result[0],
                self._count_items(rows),
                *means.terms,
            ]

        shards = (
            model(Whole(run), dict(inputs))
            if isinstance(model, DataParallelModel)
            else [run(model, inputs)]
        )
        results, terms = zip(*shards, strict=True)
        if len(self._divisors) > 1 and {len(numbers) for numbers in terms} != {
            2 * len(self._divisors)
        }:
            means = f"{max(map(len, terms)) // 2 - 1} means, and {len(self._divisors) - 1} of the first rows"
            raise ValueError(
                f"the loss computes {means}, expected the same means of all rows: compute them always"
            )
        totals = [add_up(numbers, self.args.device) for numbers in zip(*terms, strict=True)]
        return (
            results,
            totals[0],
            torch.stack([total.detach().float() for total in totals]).view(-1, 2),
        )

    def _find_parts(self, inputs: Inputs) -> Parts:
        """Returns the parts of the loss.

        The first call runs the model on each of a few rows, and on all of them.
        """
        if self._parts is None:
            # A rank may have no labels.
            self._parts = max(gather_objects(self._parts_of_rows(inputs)))
        return self._parts

    def _parts_of_rows(self, inputs: Inputs) -> Parts:
        samples = self._few_rows(inputs)
        # The first settings leave a rest that is not divided, the second any rest, the third all
        # parts.
        settings = (math.inf, math.inf), (1.0, math.inf), (1.0, 1.0)
        with torch.no_grad():
            losses = [
                self._loss_of_rows(sample, *setting)[0]
                for setting in settings
                for sample in samples
            ]
        table = torch.stack(losses).view(3, -1)
        if not self._adds_up(table[:, :-1].sum(1), table[:, -1]):
            return Parts(())
        rest, rest_over_items, total = table[:, -1].tolist()
        with torch.enable_grad():
            loss, terms = self._loss_of_rows(samples[0], 1.0, 1.0)
            means = terms[::2]
            factors = (
                torch.autograd.grad(loss, means, allow_unused=True, materialize_grads=True)
                if means
                else ()
            )
        # A total of zero means that there are no labels.
        has_items = rest_over_items != rest or not (terms or total)
        has_rest = has_items or rest != 0
        guess = 0.0
        if len(factors) == 1 and not has_rest:
            guess = max(float(terms[1]), 1.0) * self.args.train_batch_size
        return Parts((float(has_rest), *map(float, factors)), has_items, guess)

    def _few_rows(self, inputs: Inputs) -> list[Inputs]:
        """Returns single rows of a batch, and last all of these rows at once."""
        inputs = move_leaves(dict(inputs), next(self.model.parameters()).device)
        sizes = {
            len(value) for value in inputs.values() if isinstance(value, Tensor) and value.dim()
        }
        if len(sizes) > 1:
            return [inputs, inputs]  # Packed rows are one, beside tensors of other lengths.
        last = sizes.pop() - 1
        return [take(inputs, rows) for rows in ([0], [0], [last], [0, 0, last])]

    def _loss_of_rows(
        self, rows: Inputs, items: float, divisor: float
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the loss over a number of items, with all means over one divisor, and the sum and
        count of each mean.
        """
        with self.accelerator.autocast(), MeansAsSums(itertools.repeat(divisor)) as means:
            loss = self.compute_loss(self.model, dict(rows), num_items_in_batch=torch.tensor(items))
        return loss, means.terms

    def _adds_up(self, apart: Tensor, whole: Tensor) -> bool:
        """Returns whether parts of the loss of single rows are those of all rows.

        A window in parts needs that.
        """
        errors = (apart - whole).abs()
        is_additive = bool((errors <= 0.02 * whole.abs()).all())
        if (
            not is_additive
            and len(self.devices) * world_size() * self.args.gradient_accumulation_steps > 1
        ):
            part = errors.argmax()
            raise ValueError(
                f"a part of the loss of a few rows is {whole[part]:.4g}, and {apart[part]:.4g} added up row by row: it is no "
                "sum or mean over them, as that of a router (output_router_logits=True), or its rows depend on each other. "
                "Expected means of torch's losses, or sums over num_items_in_batch. For others, use TrainStep, and "
                "DataParallelCriterion(..., whole=True)"
            )
        return is_additive

    def get_batch_samples(
        self, epoch_iterator: Iterator[Inputs], num_batches: int, device: torch.device
    ) -> tuple[list[Inputs], Tensor]:
        """Returns the micro-batches of the next update, and what their loss divides by if it is
        told.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches:
            self.model.eval()  # training_step undoes it
            batches[-1], weight = self._split(batches[-1])[0]
            # Each micro-batch to come has a weight. It is 0 if all its rows are repeated.
            self._weights = [1.0] * (len(batches) - 1) + [weight]
            factors, _, guess = self._find_parts(batches[0])
            if guess or len(factors) < 2:
                numbers = [[float(self._count_items(batch)), guess] for batch in batches]
                terms = torch.tensor(numbers)[:, : len(factors) or 1]
            else:
                self._divisors = [1.0] * len(factors)
                with torch.no_grad(), keep_random_state():
                    runs = [
                        self._run(self.model_wrapped, self._prepare_inputs(batch))[2]
                        for batch in batches
                    ]
                terms = torch.stack(runs)[:, :, 1].cpu()
            counts = sum_over_ranks(torch.tensor(self._weights) @ terms).tolist()
            self._divisors = [count or 1.0 for count in counts]
            total = 0.0 if all(counts) else math.nan  # a mean of nothing
            self._terms = torch.tensor([total, 0.0], device=self.args.device)
        return batches, torch.tensor(self._divisors[0])

    def _split(self, inputs: Inputs) -> list[tuple[Inputs, float]]:
        """Returns the rows of a batch with weight 1, and those that a sampler has repeated with
        weight 0.
        """
        state = self.accelerator.gradient_state
        rows = find_batch_size(inputs)
        is_last = world_size() > 1 and state.end_of_dataloader and state.remainder > 0
        new = min(max(state.remainder - rank() * rows, 0), rows) if is_last else rows
        pieces = (range(new), 1.0), (range(new, rows), 0.0)
        return [
            (take(dict(inputs), piece) if 0 < new < rows else inputs, weight)
            for piece, weight in pieces
            if piece
        ]

    def training_step(
        self, model: nn.Module, inputs: Inputs, num_items_in_batch: object = None
    ) -> Tensor:
        """Runs forward and backward of a micro-batch.

        Returns zero, and after the last one the loss of the update.
        """
        model.train()
        self.optimizer.train()
        weight = self._weights.pop(0)
        with (
            model.no_sync()
            if self._weights and isinstance(model, DataParallelModel)
            else contextlib.nullcontext()
        ):
            _, loss, terms = self._run(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss * weight * world_size())  # DDP averages over the ranks
        if (
            self.args.torch_empty_cache_steps
            and self.state.global_step % self.args.torch_empty_cache_steps == 0
        ):
            clear_device_cache()
        self._terms = self._terms + weight * terms
        loss = self._terms[0, 0] * world_size()
        if self._parts and self._parts.guess and not self._weights:
            # The factor stays on the device, so the host does not wait.
            factor = self._divisors[1] / sum_over_ranks(self._terms[1, 1])
            loss = loss * factor
            for gradient in [
                parameter.grad
                for parameter in self.model.parameters()
                if parameter.grad is not None
            ]:
                gradient.mul_(factor.nan_to_num(posinf=0.0).to(gradient.device))
        return torch.zeros_like(loss) if self._weights else loss

    @torch.no_grad()
    def prediction_step(
        self, model: nn.Module, inputs: Inputs, *arguments: object, **settings: object
    ) -> tuple[Tensor | None, object, object]:
        """Runs a batch. Returns its loss, and outputs and labels in the order of its rows."""
        names = self.label_names
        step = super().prediction_step
        has_loss = (names or self.can_return_loss) and all(
            inputs.get(name) is not None for name in names
        )
        factors = self._find_parts(inputs).factors if has_loss else ()
        results = list[Sequence[Any]]()
        total = torch.zeros(2)
        for rows, weight in self._split(inputs):
            self._divisors = [1.0] * len(factors) or [float(self._count_items(rows))]
            parts, _, terms = self._run(
                model, rows, lambda *shard: step(*shard, *arguments, **settings)
            )
            results += parts
            total = total + weight * terms.cpu().double()
        columns = zip(*results, strict=True)
        loss, logits, labels = (
            None if parts[0] is None else join(parts, self.args.device, 0) for parts in columns
        )
        if factors:
            self._terms = self._terms + total
            loss = self._divide(total).to(loss)
        return loss if loss is None else loss.mean(), logits, labels

    def _divide(self, terms: Tensor) -> Tensor:
        """Returns the loss of rows from their terms, which are sums that are not divided."""
        (has_rest, *factors), has_items, _ = self._parts or Parts((0.0,))
        parts = terms[1:, 0] * torch.tensor(factors)
        rest = has_rest * (terms[0, 0] - parts.sum()) / (terms[0, 1] if has_items else 1)
        return rest + (parts / terms[1:, 1]).sum()

    def evaluation_loop(self, *arguments: object, **settings: object) -> Any:
        """Runs all batches, as Trainer does.

        Their loss is that of all rows, not the mean over batches.
        """
        self._terms = torch.zeros(2)
        output = super().evaluation_loop(*arguments, **settings)
        name = f"{settings.get('metric_key_prefix', 'eval')}_loss"
        if name in output.metrics and self._parts and self._parts.factors:
            output.metrics[name] = self._divide(sum_over_ranks(self._terms)).item()
        return output
