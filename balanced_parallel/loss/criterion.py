"""``DataParallelCriterion``: losses computed on the devices of the outputs, and the exact mean over the whole batch."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..batch import containers
from ..batch.containers import Dims, check_dim, check_dims, is_first
from ..batch.outputs import PerReplica
from ..batch.plan import consecutive, proportional_sizes, split_sizes
from ..batch.rows import NOTHING, Arguments, Shard, count_rows, cut, mark, move_arguments, move_leaves, parameters_of, spread
from ..replicas.replicas import Replicas
from ..runtime.collectives import explain_unwatched, refuse_unshared, sum_over_ranks, world_size
from ..runtime.devices import DeviceLike, resolve_device, resolve_devices
from ..runtime.values import Precision
from .coupled import AdditiveLoss, Checks, CoupledLoss, LossOfSums, WholeLoss, check_coupled
from .means import LossOfMeans, single_mean
from .rules import find_torch_loss, has_sum, is_known, reduction_in, reduction_of, weight_of_targets
from .sums import (
    Criterion,
    Divisor,
    LossSum,
    MeanAndWeight,
    OwnCollectives,
    ShardLoss,
    Weight,
    add_means,
    bounds_of,
    call_weight,
    check_settings,
    copy_criterion,
    devices_of,
    divide_once,
    flat_weights,
    merge,
    sum_and_weight,
    total_of,
    weighed_sum,
    weights_of_targets,
)


class DataParallelCriterion(nn.Module):
    """Computes a criterion on each replica's output, on its device, and returns the loss of the whole batch as one scalar.

    The result equals ``criterion(gather(outputs), *targets)`` on one device for every split. Each replica computes the sum of its
    losses and their weight (:func:`loss_weight`). Both are summed over replicas and ranks, and divided once. A criterion that is
    a sum is not divided. With ``reduction="none"`` the result is a :class:`PerReplica` of the replicas' losses. If a criterion
    returns several means (a tuple, a mapping, a dataclass), so does the result, and each of them is exact.

    In ``criterion(outputs, *targets, **kwargs)``, targets and keyword arguments are split by rows as the model's inputs were. A
    tuple as a replica's output fills the leading arguments of the criterion. Any other output is one argument.

    Args:
        criterion: a module or a function. Parameters and buffers of a module are copied to each device, and its parameters get
            gradients. The tensors of a ``functools.partial`` are moved to each device, those of a closure are not.
        device_ids: the devices that outputs may be on; ``None`` allows all.
        output_device: device of the loss; ``None`` is the device of the first output.
        dim: the dimension of the rows in the targets. ``None`` is 0, and an error if the rows of the outputs are in another.
        weight: the divisor of the criterion's mean, if :func:`loss_weight` does not know it: ``"rows"``, or a function
            ``(output, *targets) -> scalar`` that also gets the keyword arguments that it accepts. It is called with the targets
            where they are, and on the outputs' devices only if that fails. For several means with different divisors it returns
            a divisor for each, in the same structure. Or a mapping or sequence of functions ``(*targets) -> scalar``, one for
            each mean: :class:`TrainStep` counts targets before the first micro-batch. A criterion that computes known means
            inside, and adds them, needs none.
        precision: autocast inside every replica, as in :class:`DataParallelModel`.
        reduction: ``"sum"``, ``"mean"`` or ``"none"``, for a criterion that is not a loss of torch.
        minimum: lower bound of the divisor, for a criterion that divides by ``max(count, minimum)``. ``weight`` is the count. For
            several means, one number for each in the structure of the weights. A single one bounds the divisors that are whole
            numbers, as counts are.
        in_dims: the dimension of the rows of each argument of the call, as in :class:`DataParallelModel`. The entry of the
            outputs, the first argument, is used only if they are not a :class:`PerReplica`.
        whole: gathers all outputs and targets, of all ranks too, and computes the loss once per process, on ``output_device``.
            For losses whose rows depend on each other, such as contrastive ones. For functions of sums: :class:`AdditiveLoss`.

    Raises:
        TypeError: outputs are not a list with one entry per replica; the rows of a loss depend on each other.
        ValueError: targets and outputs have different numbers of rows; a loss is not a scalar, or it is split over several
            shards and is neither a sum of known means nor described by ``weight`` or ``reduction``.
        BaseException: the first failure of a replica. A note on it names the replica and its device.

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
        weight: Divisor | None = None,
        precision: str | Precision | None = None,
        reduction: str | None = None,
        minimum: Any = 0.0,
        in_dims: Dims = None,
        whole: bool = False,
    ) -> None:
        if isinstance(criterion, (DataParallelCriterion, nn.DataParallel)):
            raise TypeError(f"the criterion is a {type(criterion).__name__} already, expected a plain one: pass its .module")
        check_settings(criterion, weight, reduction, minimum, whole=whole)
        check_coupled(criterion, whole, weight, reduction, minimum)
        super().__init__()
        check_dim(dim)
        check_dims(in_dims, "in_dims")
        self.module = criterion
        self.devices = None if device_ids is None else resolve_devices(device_ids)
        self.output_device = None if output_device is None else resolve_device(output_device)
        self.dim, self.in_dims, self.whole = dim, in_dims, whole
        self.precision = Precision("fp32" if precision is None else precision)
        self.replicas = Replicas()
        self.weight, self._reduction = weight, reduction
        self._is_joint = whole or isinstance(criterion, AdditiveLoss)  # it is computed once, of all rows
        is_mean = self.reduction == "mean"
        is_averaged = is_mean and not isinstance(weight, (Mapping, list, tuple))
        self.collectives = OwnCollectives(is_possible=find_torch_loss(criterion) is None, is_mean=is_averaged)
        # Its means are found while it runs, with their bounds.
        self.finds_means = is_mean and weight is None and not is_known(criterion)
        self.minimum = 0.0 if self.finds_means else minimum
        self.least = max(flat_weights(self.minimum))  # the smallest divisor of an update
        # In two passes over several micro-batches. Means are, until all of them are over one count.
        self.is_coupled = self._is_joint or self.finds_means
        self.checks: Checks | None = Checks()

    def weigh_by(self, weight: Divisor) -> None:
        """Sets the divisor of the criterion's mean."""
        self.weight, self.finds_means, self.is_coupled = weight, False, self._is_joint

    @property
    def reduction(self) -> str:
        """The reduction of the criterion: ``"mean"``, ``"batchmean"``, ``"sum"`` or ``"none"``."""
        if self._is_joint:
            return "sum"  # its parts add up to it
        return self._reduction or reduction_of(self.module)

    def forward(self, outputs: Sequence[Any], *targets: Any, **kwargs: Any) -> Any:
        """Returns the loss of the batch. ``targets`` and ``kwargs`` have all rows of the batch."""
        kwargs = kwargs if self._is_joint else self._modern(kwargs)
        entries, shards = self.cut(outputs, targets, kwargs)
        if world_size() > 1 and torch.is_grad_enabled():
            refuse_unshared(self.parameters())
            if reason := explain_unwatched(leaf for _, leaf in containers.leaves(list(entries))):
                raise ValueError(reason)
        reduction = kwargs.get("reduction", self.reduction)
        if reduction != "none":
            self.collectives.agree(int(any(shard.target_rows for shard in shards)))
        if self._is_joint or (self.finds_means and reduction == "mean"):
            return couple(self, torch.device("cpu")).value(entries, shards)
        if reduction == "none":
            return PerReplica(self.run(ShardLoss.call, entries, shards), entries.sizes, entries.dim)
        parts = self.run(self._term(reduction), entries, shards)
        return merge(parts, lambda sums: divide_once(sums, self.output_device or sums[0].total.device, self.minimum))

    @property
    def _output_dim(self) -> Dims:
        """The dimension of the rows in outputs that are not a ``PerReplica``."""
        if self.in_dims is None or isinstance(self.in_dims, int):
            return self.dim if self.in_dims is None else self.in_dims
        first: Dims = self.in_dims.get(0, self.dim) if isinstance(self.in_dims, Mapping) else (*self.in_dims, self.dim)[0]
        return first

    def mark(self, targets: tuple[Any, ...], kwargs: Any, dims: Dims, leading: int | None = None) -> tuple[Arguments, int]:
        """Marks the arguments after the outputs with ``in_dims``. Also returns the dimension of the rows in unmarked arguments.

        An output fills ``leading`` arguments of the criterion; ``None`` asks its signature.
        """
        if dims != 0 and self.in_dims is None and self.dim is None and not is_first(dims):
            unmarked = containers.leaves((targets, kwargs))
            if any(isinstance(leaf, torch.Tensor) and leaf.dim() for _, leaf in unmarked):
                raise ValueError(
                    f"the rows of the outputs are in dimension {dims!r}; say where those of the targets are: "
                    "DataParallelCriterion(..., dim=) or in_dims="
                )
        if self.in_dims is None:
            return Arguments(targets, kwargs), self.dim or 0
        function = self.module.forward if isinstance(self.module, nn.Module) else self.module
        leading = leading or _count_leading(function, len(targets))
        return mark(Arguments(targets, kwargs), self.in_dims, function, first=1, unnamed=leading - 1), self.dim or 0

    def cut(self, outputs: Any, targets: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[PerReplica, list[Shard]]:
        """Cuts the arguments behind the outputs as the outputs' shards. Returns the outputs, and the shards."""
        entries = _as_per_replica(outputs, self._output_dim)
        if entries.order is not None:
            raise ValueError(
                "the criterion was given outputs in another order than the batch, as after a cut by cost, expected the order of "
                "the targets: call criterion([outputs.gather()], targets)"
            )
        batch, dim = self.mark(targets, kwargs, entries.dim, len(spread(entries[0])))
        expected = None if None in entries.sizes else sum(size or 0 for size in entries.sizes)
        rows = count_rows(batch, dim, expected, "targets")
        if not (isinstance(outputs, PerReplica) and outputs.has_sizes) and not all(
            isinstance(part, PerReplica) for part in outputs
        ):
            _check_rows_of_list(entries, rows)
        if expected is None:
            sizes = [1] * len(entries) if rows is None else split_sizes(rows, len(entries))
        else:
            sizes = proportional_sizes(expected if rows is None else rows, [size or 0 for size in entries.sizes])
        parts = consecutive(sizes)
        is_whole = rows is None or len(parts) == 1
        batches = [batch] * len(parts) if is_whole else cut(batch, parts, dim)
        cells = zip(batches, parts, sizes, devices_of(entries, self.devices), strict=True)
        return entries, [Shard(NOTHING, piece, part, size, device) for piece, part, size, device in cells]

    def run(self, term: Callable[[ShardLoss], Any], outputs: PerReplica, shards: Sequence[Shard]) -> list[Any]:
        """Returns the term of the loss for each replica, computed on the device of its output."""
        devices = devices_of(outputs, self.devices)
        with self.precision.autocast(devices), copy_criterion(self.module, self.replicas, devices) as criteria:
            weights: list[Any] = [None] * len(shards)
            if isinstance(term, MeanAndWeight) and any(device.type != "cpu" for device in devices):
                weights = self._weights_in_place(term, outputs, shards)
            replicas = zip(criteria, outputs, shards, weights, devices, strict=True)
            work = [functools.partial(self._run, term, *replica) for replica in replicas]
            parts: list[Any] = self.replicas.workers(work, devices, together=False)
        if self.collectives.is_used and self.checks is not None:
            self.minimum, self.least, self.checks = 0.0, 0.0, None
            self.weigh_by(lambda *arguments, **kwargs: 1.0)
        return parts

    def _run(
        self, term: Callable[..., Any], criterion: Criterion, output: Any, shard: Shard, weights: Any, device: torch.device
    ) -> Any:
        targets, kwargs = move_arguments(shard.targets, device)
        with shard.context():
            try:
                return term(ShardLoss(criterion, shard.target_rows, output, targets, kwargs, self.collectives, weights))
            except (RuntimeError, IndexError) as error:
                if names := _tensors_outside(criterion):
                    error.add_note(
                        f"the criterion reads {', '.join(names)} beside its arguments, which is neither split by rows nor moved "
                        f"to {device}: pass a tensor of all rows as a target, another as a buffer of a module or by "
                        "functools.partial"
                    )
                raise

    def _weights_in_place(self, term: MeanAndWeight, outputs: PerReplica, shards: Sequence[Shard]) -> list[Any]:
        """Returns the weights of all shards, from targets that are not moved, or None for those that the replicas compute."""
        unmoved = [
            ShardLoss(self.module, shard.target_rows, output, *move_leaves(tuple(shard.targets), None))
            for output, shard in zip(outputs, shards, strict=True)
        ]
        try:
            return term.read(unmoved)
        except Exception:  # noqa: BLE001 - it needs outputs and targets on one device; or it fails there too, for the user to see
            return [None] * len(shards)

    def loss_sums(self, outputs: PerReplica, shards: Sequence[Shard]) -> list[LossSum]:
        """Returns the sum and the weight of each replica's losses. :class:`TrainStep` divides them later."""
        if self.reduction == "none":
            raise ValueError("the criterion has reduction='none', expected a scalar loss: use reduction='mean' or 'sum'")
        if self.weight == "rows" and any(shard.is_joined and shard.target_rows < len(shard.rows or ()) for shard in shards):
            raise ValueError(
                "weight='rows' with samples joined into fewer rows, expected a function that counts what the mean does"
            )
        parts = self.run(self._term(self.reduction), outputs, shards)
        if self.finds_means:
            LossOfMeans(self, torch.device("cpu")).check([part.terms for part in parts], outputs, shards)
        return [add_means(part) for part in parts]

    def _term(self, reduction: str) -> Callable[[ShardLoss], Any]:
        """Returns the function that computes one replica's part of the loss."""
        if reduction == "sum":
            return total_of
        if self.finds_means:
            return single_mean
        if self.weight is None:
            return sum_and_weight if has_sum(self.module) else MeanAndWeight(ShardLoss.weigh, self.minimum)
        weigh = (lambda shard: shard.rows) if self.weight == "rows" else functools.partial(call_weight, self.weight)
        return MeanAndWeight(weigh, self.minimum)

    def divided_sums(self, divisors: Sequence[float], outputs: PerReplica, shards: Sequence[Shard]) -> list[LossSum]:
        """Returns :meth:`loss_sums` of several means, each divided by its entry of ``divisors``, those of the whole batch."""
        factors, sums = [1 / divisor if divisor else 0.0 for divisor in divisors], []
        for part in self.run(self._term(self.reduction), outputs, shards):
            pairs = zip(containers.leaves(part), factors, strict=True)
            means = [mean.total * factor for (_, mean), factor in pairs if mean is not None]
            sums.append(LossSum(functools.reduce(torch.add, means), None if any(divisors) else 0.0))
        return sums

    def weigh_targets(self, *targets: Any) -> Weight | None:
        """Returns the total weight of a batch, if it depends on the targets alone; otherwise None."""
        if self.weight is not None or self.reduction != "mean":
            return None
        return weight_of_targets(self.module, targets)

    def _modern(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns keyword arguments with ``reduction=`` in place of the deprecated ``size_average=`` and ``reduce=``."""
        if not {"size_average", "reduce"} & kwargs.keys() or find_torch_loss(self.module) is None:
            return kwargs
        others = {name: value for name, value in kwargs.items() if name not in ("size_average", "reduce")}
        return {**others, "reduction": reduction_in(kwargs)}


def _tensors_outside(criterion: Criterion) -> list[str]:
    """Returns the names of tensors that a function reads beside its arguments, or that a module has as plain attributes."""
    try:
        outside = inspect.getclosurevars(criterion.forward if isinstance(criterion, nn.Module) else criterion)
        values = {**vars(criterion), **outside.globals, **outside.nonlocals}
    except TypeError:  # it is not written in Python, or a functools.partial, whose tensors are moved
        return []
    return [name for name, value in values.items() if isinstance(value, torch.Tensor)]


def couple(criterion: DataParallelCriterion, home: torch.device) -> CoupledLoss:
    """Returns the loss of one update that is computed once: of all rows, of an :class:`AdditiveLoss`, or of means inside."""
    if criterion.whole:
        return WholeLoss(criterion, home)
    return (LossOfMeans if criterion.finds_means else LossOfSums)(criterion, home)


class BatchLosses(NamedTuple):
    """A way to compute the losses of the micro-batches of one batch."""

    compute: Callable[..., list[LossSum]]  # one per replica, of a micro-batch's outputs and shards
    weight: Weight = 0.0  # of the whole batch on this rank, if ``compute`` returns sums without weights
    is_mean: bool = True  # the sum of all is to be divided by the sum of their weights


def losses_of_batch(criterion: DataParallelCriterion, targets: Sequence[tuple[Any, ...]], *, is_whole: bool) -> BatchLosses:
    """Chooses the way to compute the losses of one batch, from its targets in any number of parts.

    With ``is_whole``, no other batch is added before the update. Ranks then sum the divisors of several means.
    """
    weights = [criterion.weigh_targets(*part) for part in targets]
    counts = [weight for weight in weights if weight is not None]
    if targets and len(counts) == len(targets):
        return BatchLosses(functools.partial(criterion.run, weighed_sum), sum(counts, 0.0))
    is_mean = criterion.reduction != "sum"
    if not (is_whole and targets and is_mean and isinstance(criterion.weight, (Mapping, list, tuple))):
        return BatchLosses(criterion.loss_sums, is_mean=is_mean)
    parts = [flat_weights(weights_of_targets(criterion.weight, part)) for part in targets]
    totals = sum_over_ranks(torch.tensor(parts, dtype=torch.float64).sum(0))
    bounds = bounds_of(criterion.minimum, criterion.weight)
    divisors = [float(bound.of(total)) for total, bound in zip(totals, bounds, strict=False)]
    return BatchLosses(functools.partial(criterion.divided_sums, divisors), is_mean=False)


def _as_per_replica(outputs: Any, dim: Dims = None) -> PerReplica:
    """Converts outputs to a ``PerReplica``: a list with one entry per replica, or a ``PerReplica`` per leading argument."""
    if isinstance(outputs, PerReplica) and outputs:
        return outputs
    if not isinstance(outputs, (list, tuple)) or containers.is_named_tuple(outputs) or not outputs:
        raise TypeError(
            f"the criterion was given {containers.describe(outputs)}, expected the list that DataParallelModel returns, with "
            "one output per replica; for the output of one replica write criterion([output], ...)"
        )
    if all(isinstance(part, PerReplica) for part in outputs):
        if len({part.sizes for part in outputs}) > 1:
            rows = " and ".join(dict.fromkeys(str(list(part.sizes)) for part in outputs))
            raise ValueError(f"the criterion was given outputs with {rows} rows per replica, expected the same numbers in each")
        dims = tuple(part.dim for part in outputs)
        return PerReplica(zip(*outputs, strict=True), outputs[0].sizes, dims).in_order(outputs[0].order)
    dim = 0 if dim is None else dim
    tensors = [containers.first_tensor(output) for output in outputs]
    devices = {tensor.device for tensor in tensors if tensor is not None}
    sizes = [
        tensor.size(dim) if tensor is not None and isinstance(dim, int) and -tensor.dim() <= dim < tensor.dim() else None
        for tensor in tensors
    ]
    if len(outputs) > 1 and len(devices) == 1 and len({*sizes}) == 1 and None not in sizes:
        raise ValueError(
            f"the criterion was given a {type(outputs).__name__} of {len(outputs)} outputs with {sizes[0]} rows each, all on "
            f"{devices.pop()}: they may be those of {len(outputs)} replicas, or {len(outputs)} outputs of one replica. {_ADVICE}"
        )
    return PerReplica(outputs, sizes, dim)


_ADVICE = (
    "Use what keeps the rows of each replica: outputs.map(function) for a comprehension, outputs.unzip() for zip(*outputs) and "
    "for a model that returns a list, outputs.logits for one part"
)


def _check_rows_of_list(outputs: PerReplica, rows: int | None) -> None:
    """Raises ``ValueError`` if a plain list of outputs does not have the rows of the targets."""
    sizes = [size for size in outputs.sizes if size is not None]
    if rows is not None and (sum(sizes) != rows if sizes else len(outputs) > 1):
        raise ValueError(
            f"the criterion was given a list of {len(outputs)} outputs with {sum(sizes) or 'no'} rows in all, and targets with "
            f"{rows}: the rows of each replica are unknown. {_ADVICE}"
        )


def _count_leading(function: Callable[..., Any], targets: int) -> int:
    """Returns the number of required arguments of ``function`` before its last ``targets`` ones. An output fills them."""
    parameters = parameters_of(function) or []
    positional = [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    required = [parameter for parameter in positional if parameter.default is parameter.empty]
    return max(len(required) - targets, 1)
