"""``DataParallelCriterion``: the loss where the outputs are, and the mean of the whole batch, not a mean of means."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..batch import nested
from ..batch.dims import Dims, check_dims, is_first
from ..batch.per_replica import PerReplica
from ..batch.row_marks import Arguments, mark, without_mark
from ..batch.rows import count_rows, cut, move_leaves
from ..replicas.replicas import Replicas
from ..runtime.devices import DeviceLike, resolve_device, resolve_devices
from ..runtime.precision import Precision
from .custom_weights import call_weight, check_settings, count_leading, keywords_of, warn_unknown, weigh_without_output
from .output_rows import as_per_replica, sizes_like
from .partial_sums import Criterion, Shard, mean_and_weight, merge, sum_and_weight, sum_of_terms, total_of
from .reduction import reduction_in, reduction_of
from .rules import find_torch_loss, has_sum, is_known, refuse_coupled, weight_of_targets
from .weighting import LossSum, Weight, divide_once, flat_weights, read_weights

__all__: list[str] = []


class DataParallelCriterion(nn.Module):
    """Computes a criterion on each replica's output, where it lies, and returns the loss of the whole batch as one scalar.

    The result is that of ``criterion(gather(outputs), *targets)`` on one device, whatever the split: each replica's loss is a
    sum and the count it divides by (:func:`loss_weight`), both are added up, and divided once. Under torchrun it is the loss over
    all ranks. A criterion that is a sum is added up and not divided; with ``reduction="none"`` the result is the
    :class:`PerReplica` of the replicas' losses, for :func:`gather`. A criterion that returns several means (a tuple, a mapping, a
    dataclass) gives as many exact ones, in the same structure.

    ``criterion(outputs, *targets, **kwargs)``: targets (and keyword arguments) are cut by rows as the model's inputs were. A
    replica's output that is a tuple is spread over the criterion's leading arguments; a tensor, a list, a named tuple, a
    mapping or a dataclass is passed as it is.

    Args:
        criterion: a module, whose parameters and buffers are copied to each device (its parameters get their gradients), or
            a function; of a ``functools.partial``, the tensors are moved to each device.
        device_ids: the devices that outputs may lie on; ``None`` takes them wherever they are.
        output_device: where the loss goes; ``None`` is the device of the first output.
        dim: the dimension of the rows in the targets. ``None`` is 0, and an error where that of the outputs is another.
        weight: what ``criterion`` divides its mean by, for one that :func:`loss_weight` does not know: ``"rows"``, or a function
            that is called as the criterion is, ``(output, *targets) -> scalar``, with the keyword arguments that it takes. For
            several means with divisors of their own it returns as many, in the same structure. Without it such a criterion is
            weighted by rows, with a warning.
        precision: autocast inside every replica, as in :class:`DataParallelModel`.
        reduction: ``"sum"``, ``"mean"`` or ``"none"``, for a criterion of which that is not known: one that is not torch's.
        minimum: the floor of the divisor, for a criterion that divides by ``max(count, minimum)``: ``weight`` is the count.
        in_dims: the dimension of the rows, argument by argument of the call, as in :class:`DataParallelModel`. The first
            argument is the outputs, whose dimension counts only where they are not a :class:`PerReplica`.

    Raises:
        TypeError: outputs that are not a list with one entry per replica; a loss whose rows depend on each other.
        ValueError: targets that do not fit the outputs' rows, a loss that is not a scalar, or a setting out of its range.
        BaseException: the first failure of a replica, of its own type, with the replica and its device in the message.

    Example:
        >>> criterion = DataParallelCriterion(torch.nn.CrossEntropyLoss())
        >>> outputs = PerReplica([torch.zeros(3, 10), torch.zeros(2, 10)], [3, 2])
        >>> criterion(outputs, torch.tensor([1, 2, 3, -100, -100]))
        tensor(2.3026)
    """

    def __init__(
        self,
        criterion: Criterion,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int | None = None,
        *,
        weight: Callable[..., Any] | str | None = None,
        precision: str | Precision | None = None,
        reduction: str | None = None,
        minimum: float = 0.0,
        in_dims: Dims = None,
    ) -> None:
        super().__init__()
        check_settings(criterion, weight, reduction, minimum)
        check_dims(in_dims, "in_dims")
        self.module = criterion
        self.devices = None if device_ids is None else resolve_devices(device_ids)
        self.output_device = None if output_device is None else resolve_device(output_device)
        self.dim = dim
        self.in_dims = in_dims
        self.weight = weight
        self.minimum = minimum
        self.precision = Precision("fp32" if precision is None else precision)
        self.replicas = Replicas()
        self._reduction = reduction
        self._weight_takes = keywords_of(weight)
        self._has_one_divisor = False  # as far as is known
        self._warned = False

    @property
    def reduction(self) -> str:
        """``"mean"``, ``"batchmean"``, ``"sum"`` or ``"none"``, as the criterion is set."""
        return self._reduction or reduction_of(self.module)

    def forward(self, outputs: Sequence[Any], *targets: Any, **kwargs: Any) -> Any:
        """The loss of the batch.

        Args:
            outputs: one per replica, as the model returns them, each with its rows.
            targets: what follows the output in the criterion's arguments: all rows of the batch.
            kwargs: of the criterion, cut likewise.
        """
        kwargs = self._modern(kwargs)
        reduction = kwargs.get("reduction", self.reduction)
        if reduction == "none":
            found = as_per_replica(outputs, self._output_dim)
            return PerReplica(self._run(Shard.call, outputs, targets, kwargs), found.sizes, found.dim)
        parts = self._run(self._term(reduction), outputs, targets, kwargs)
        return merge(parts, self._divide)

    def _divide(self, sums: list[LossSum]) -> torch.Tensor:
        return divide_once(sums, self.output_device or sums[0].total.device, self.minimum)

    def loss_sums(self, outputs: Sequence[Any], *targets: Any, **kwargs: Any) -> list[LossSum]:
        """Returns the sum and the weight of each replica's losses, for :class:`TrainStep`, which divides later.

        Raises:
            ValueError: there is no one divisor: the criterion returns losses as they are, or means with divisors of their own.
        """
        kwargs = self._modern(kwargs)
        reduction = kwargs.get("reduction", self.reduction)
        if reduction == "none":
            raise ValueError("the criterion has reduction='none', expected a scalar loss: use reduction='mean' or 'sum'")
        return [_add_means(part) for part in self._run(self._term(reduction), outputs, targets, kwargs)]

    def _term(self, reduction: str) -> Callable[[Shard], Any]:
        """Returns the function that computes one replica's part of the loss."""
        if reduction == "sum":
            return total_of
        by_sum = self.weight is None and has_sum(self.module)
        return sum_and_weight if by_sum else mean_and_weight(self._weigh(), self.minimum)

    def divisors_of_targets(self, *targets: Any) -> list[float] | None:
        """Returns what each of several means divides by in all of a batch, if the targets alone say so."""
        if not callable(self.weight) or self.reduction == "sum" or self._has_one_divisor:
            return None
        weights = weigh_without_output(self.weight, tuple(map(without_mark, targets)))
        if weights is None or isinstance(weights, (torch.Tensor, float, int)):
            self._has_one_divisor = True  # or some that depend on the outputs
            return None
        return flat_weights(read_weights(weights))

    def divided_sums(self, divisors: Sequence[float], outputs: Sequence[Any], *targets: Any) -> list[LossSum]:
        """Returns :meth:`loss_sums` of several means, each divided by one of ``divisors``, which are those of the whole batch."""
        parts = self._run(self._term(self.reduction), outputs, targets, {})
        factors = [1 / divisor if divisor else 0.0 for divisor in divisors]
        sums = [
            [one.total * factor for (_, one), factor in zip(nested.leaves(part), factors, strict=True) if one is not None]
            for part in parts
        ]
        return [LossSum(functools.reduce(torch.add, means), None if any(divisors) else 0.0) for means in sums]

    def weigh_targets(self, *targets: Any) -> Weight | None:
        """Returns the total weight of a batch, if it depends on the targets alone; otherwise None."""
        if self.weight is not None or self.reduction != "mean":
            return None
        return weight_of_targets(self.module, targets)

    def weighed_sums(self, outputs: Sequence[Any], *targets: Any) -> list[LossSum]:
        """Returns :meth:`loss_sums` of targets that were weighed before: their weights are zero."""
        return [LossSum(total, 0.0) for total in self._run(sum_of_terms, outputs, targets, {})]

    def _modern(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of a function of torch, with ``reduction=`` in place of what torch deprecated for it."""
        if not {"size_average", "reduce"} & kwargs.keys() or find_torch_loss(self.module) is None:
            return kwargs
        others = {name: value for name, value in kwargs.items() if name not in ("size_average", "reduce")}
        return {**others, "reduction": reduction_in(kwargs)}

    def _weigh(self) -> Callable[[Shard], Any]:
        """Returns the function that weighs one replica's mean. Used where torch's own sum cannot be asked for."""
        given = self.weight
        if callable(given):
            return functools.partial(call_weight, given, self._weight_takes)
        if given is None and is_known(self.module):
            return Shard.weigh
        if given is None:
            refuse_coupled(self.module)
        if given is None and self._reduction is None and not self._warned:
            self._warned = True
            warn_unknown(self.module, stacklevel=7)
        return lambda shard: shard.rows

    @property
    def _output_dim(self) -> Dims:
        """The dimension of the rows in outputs that do not say it themselves."""
        if isinstance(self.in_dims, Mapping):
            of_outputs: Dims = self.in_dims.get(0, self.dim)
            return of_outputs
        if isinstance(self.in_dims, Sequence):
            return self.in_dims[0] if self.in_dims else self.dim
        return self.dim if self.in_dims is None else self.in_dims

    def mark(
        self, targets: tuple[Any, ...], kwargs: dict[str, Any], dims: Dims, leading: int | None = None
    ) -> tuple[Arguments, int]:
        """Marks the arguments behind the outputs with ``in_dims``, and returns the dimension of the rows in the others too.

        Args:
            targets, kwargs: all rows of the batch.
            dims: of the outputs.
            leading: how many of the criterion's arguments an output fills; ``None`` is what the targets leave of them.

        Raises:
            ValueError: the rows of the outputs are not in dimension 0, and nobody has said where those of the targets are.
        """
        if self.in_dims is None and self.dim is None and not is_first(dims) and _has_rows((targets, kwargs)):
            raise ValueError(
                f"the rows of the outputs are in dimension {dims!r}; say where those of the targets are: "
                "DataParallelCriterion(..., dim=) or in_dims="
            )
        function = self.module.forward if isinstance(self.module, nn.Module) else self.module
        leading = leading or count_leading(function, len(targets))
        return mark(Arguments(targets, kwargs), self.in_dims, function, first=1, unnamed=leading - 1), self.dim or 0

    def _run(
        self, term: Callable[[Shard], Any], outputs: Sequence[Any], targets: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """``term(shard)`` for each replica, on the device of its output."""
        entries = as_per_replica(outputs, self._output_dim)
        devices = self._devices_of(entries)
        batch, dim = self.mark(targets, kwargs, entries.dim, len(nested.spread(entries[0])))
        expected = None if None in entries.sizes else sum(size or 0 for size in entries.sizes)
        rows = count_rows(batch, dim, expected)
        sizes = sizes_like(entries, rows)
        batches = [batch] * len(entries) if rows is None else cut(batch, sizes, dim)

        def run(criterion: Criterion, size: int, output: Any, mine: Arguments, device: torch.device) -> Any:
            return term(Shard(criterion, size, output, move_leaves(mine.inputs, device), move_leaves(mine.kwargs, device)))

        with self.precision.autocast(devices), self._copies(devices) as criteria:
            replicas = zip(criteria, sizes, entries, batches, devices, strict=True)
            work = [functools.partial(run, *replica) for replica in replicas]
            return self.replicas.workers(work, devices, together=False)

    def _copies(self, devices: Sequence[torch.device]) -> contextlib.AbstractContextManager[Sequence[Criterion]]:
        """The criterion on each device. One that holds its class weights on the CPU follows the outputs."""
        criterion = self.module
        if isinstance(criterion, nn.Module):
            if len(devices) == 1 and _holds_nothing(criterion):
                return contextlib.nullcontext([criterion])
            if any(held.device != devices[0] for held in (*criterion.parameters(), *criterion.buffers())):
                criterion.to(devices[0])  # only then: it asks for gradients, which micro-batches leave with the replicas
            return self.replicas.of(criterion, devices, devices[0])
        if isinstance(criterion, functools.partial):
            moved = [(move_leaves(criterion.args, device), move_leaves(criterion.keywords, device)) for device in devices]
            copies = [functools.partial(criterion.func, *arguments, **settings) for arguments, settings in moved]
            return contextlib.nullcontext(copies)
        return contextlib.nullcontext([criterion] * len(devices))

    def _devices_of(self, outputs: PerReplica) -> list[torch.device]:
        tensors = [nested.first_tensor(output) for output in outputs]
        fallback = self.devices or [torch.device("cpu")]
        devices = [fallback[i % len(fallback)] if tensor is None else tensor.device for i, tensor in enumerate(tensors)]
        strange = [str(device) for device in devices if self.devices is not None and device not in self.devices]
        if strange:
            raise ValueError(
                f"an output is on {strange[0]}, expected one of device_ids={[str(device) for device in self.devices or ()]}"
            )
        return devices


def _add_means(part: Any) -> LossSum:
    """Returns one sum for all losses that a replica's part consists of."""
    sums = [leaf for _, leaf in nested.leaves(part) if leaf is not None]
    if len({one.weight for one in sums}) > 1:
        raise ValueError(
            "the criterion returns means with divisors of their own, which have to be known before the first micro-batch: call "
            "step(inputs, targets) with a weight= that looks at the targets alone; or criterion(outputs, targets), add up what "
            "it returns, and call backward, in place of TrainStep"
        )
    return LossSum(functools.reduce(torch.add, [one.total for one in sums]), sums[0].weight)


def _has_rows(node: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 for _, leaf in nested.leaves(node))


def _holds_nothing(module: nn.Module) -> bool:
    return not module._modules and not any(held is not None for held in (*module._parameters.values(), *module._buffers.values()))
