"""Sums of losses and their weights, added over replicas and divided once; copies and settings of a criterion.

The mean of the replicas' means is the mean of the batch only if every replica has the same weight. Uneven shards, ignored labels
and class weights give different weights. There are three ways to compute one replica's part. A criterion that is a sum is called
as it is. The mean of any criterion is multiplied by its weight. A loss of torch is called with ``reduction="sum"``.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import numbers
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ..batch import containers
from ..batch.containers import Leaf
from ..batch.outputs import PerReplica
from ..batch.rows import move_leaves, parameters_of, spread
from ..replicas.replicas import Replicas
from ..runtime.collectives import OnCollective, explain_unwatched, gather_objects, sum_over_ranks, world_size
from ..runtime.devices import DeviceLike, move, pin, resolve_device, widest_float
from ..runtime.torch_private import is_compiled, is_compiled_function, is_differentiable
from ..runtime.values import check_number, check_type
from ..savings.linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy
from .rules import add_loss, find_torch_loss, loss_weight, reduction_of

Weight = Tensor | float
MINIMUM = "the smallest divisor of the mean: finite, and not negative"  # what an argument is expected to be


@dataclasses.dataclass(frozen=True, eq=False)
class LossSum(Leaf):
    """A sum of losses, a scalar, and the weight to divide it by: ``None`` if the criterion is a sum, and is not divided."""

    total: Tensor
    weight: Weight | None
    terms: dict[Any, Tensor] | None = None  # the totals of the means that were found in the loss
    bound: "Bound | None" = None  # of the divisor, if the loss is one of several


class Bound(NamedTuple):
    """The smallest divisor of a mean."""

    minimum: float
    is_of_counts: bool = False  # a divisor that is not a whole number is not bounded

    def of(self, divisor: Tensor) -> Tensor:
        """Returns a divisor that is not smaller."""
        bounded = divisor.clamp(min=self.minimum)
        return torch.where(divisor % 1 == 0, bounded, divisor) if self.is_of_counts else bounded


def weighted_mean(
    losses: Sequence[Tensor], weights: Sequence[Weight], device: DeviceLike | None = None, *, minimum: float = 0.0
) -> Tensor:
    """Returns the exact mean of means: the sum of ``weight x loss``, divided by the sum of the weights.

    For a model that computes its own loss, this is ``weighted_mean([o.loss for o in outputs], weights)``. A loss with weight zero
    is ignored, even if it is nan, so the host waits once for weights that are on devices. The result is nan if all weights are
    zero. In a process group, the mean is over all ranks, and each must call this function. Gradients are then correct after they
    are averaged over ranks, as DistributedDataParallel does.

    Args:
        losses: one scalar per replica, each on its own device.
        weights: the divisor of each loss: scalars, on any device.
        device: device of the result; ``None`` is the device of the first loss.
        minimum: lower bound of the divisor, for losses that divide by ``max(count, minimum)``, such as those of detectors.

    Raises:
        TypeError: losses or weights are not lists.
        ValueError: there is not one weight per loss; a loss is not a scalar; a weight is negative, not finite or not a scalar.

    Example:
        >>> weighted_mean([torch.tensor(1.0), torch.tensor(4.0)], [2, 1])
        tensor(2.)
    """
    for name, value in (("losses", losses), ("weights", weights)):
        is_scalar = isinstance(value, Tensor) and value.dim() == 0
        check_type(name, value, () if is_scalar else (Sequence, Tensor), "a list with one entry per replica")
    check_number("minimum", minimum, MINIMUM, at_least=0)
    if len(losses) != len(weights) or not len(losses):
        raise ValueError(f"weighted_mean was given {len(losses)} losses and {len(weights)} weights, expected one for each loss")
    if world_size() > 1 and (reason := explain_unwatched(losses)):
        raise ValueError(reason)
    values = check_weights(weights)
    pairs = zip(losses, values, strict=True)
    sums = [LossSum(weighted_sum(loss, max(weight, minimum)), weight) for loss, weight in pairs]
    return divide_once(sums, losses[0].device if device is None else resolve_device(device), minimum)


def weighted_sum(mean: Tensor, weight: float) -> Tensor:
    """Returns ``mean x weight`` in at least float32, or zero if the weight is zero, even if the mean is nan."""
    if isinstance(mean, float | int):
        mean = torch.tensor(float(mean))  # a loss that is a constant on this replica
    mean = check_loss(mean)
    return mean * weight if weight else zero_of(mean)


def check_loss(loss: Any) -> Tensor:
    """Returns a loss as a scalar in at least float32. A complex one would be trained on by its real part: it is an error."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"the criterion returned an object of type {type(loss).__name__}, expected a tensor with one element")
    if loss.is_complex():
        name = str(loss.dtype).removeprefix("torch.")
        raise TypeError(f"the loss is complex ({name}), expected a real scalar: return its absolute value or its real part")
    if loss.numel() != 1:
        raise ValueError(
            f"the loss has shape {tuple(loss.shape)}, expected a scalar: use reduction='mean' or 'sum', or give "
            "DataParallelCriterion reduction='none' for the replicas' losses as they are"
        )
    return widen(loss.reshape(()) if loss.dim() else loss)


def widen(tensor: Tensor) -> Tensor:
    """Converts half precision to float32, because sums of losses and counts would soon overflow."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def divide_once(sums: Sequence[LossSum], device: torch.device, minimum: Any = 0.0) -> Tensor:
    """Returns the sum of all totals over the sum of all weights, over all ranks. Sums without a weight are not divided.

    The result is nan, with gradients of zero, if the weights sum to zero, as torch's own losses are.
    """
    total = add_up([part.total for part in sums], device)
    weights = [part.weight for part in sums if part.weight is not None]
    divisor = add_up(weights, device) if weights else torch.ones((), device=device)
    bound = sums[0].bound or Bound(minimum)
    if world_size() == 1:
        return divide(total, bound.of(divisor) if minimum else divisor)
    whole = sum_over_ranks(torch.stack([total.double(), divisor.double()]))
    whole_divisor = bound.of(whole[1]) if weights else torch.ones_like(whole[1])
    local = divide(total * world_size(), whole_divisor.to(total.dtype))
    loss = divide(whole[0], whole_divisor).to(total.dtype)
    return hand_back(loss, [torch.ones_like(local)], [local])  # whose gradient is that of this rank's part


def add_up(scalars: Sequence[Weight], device: torch.device) -> Tensor:
    """Returns the sum of scalars that may be on different devices, in their order. Only scalars are moved."""
    return functools.reduce(torch.add, [_as_scalar(scalar, device) for scalar in scalars])


def _as_scalar(value: Weight, device: torch.device) -> Tensor:
    if isinstance(value, Tensor) and value.is_cpu and device.type != "cpu" and not value.requires_grad:
        value = value.item()  # a fill of a new tensor does not wait for the device, as a copy from the host would
    if not isinstance(value, Tensor):
        return torch.full((), value, dtype=torch.int64 if isinstance(value, int) else widest_float(device), device=device)
    value = widen(value)
    value = value.reshape(()) if value.dim() else value
    return value if value.device == device else value.to(device)


def zero_of(*tensors: Tensor) -> Tensor:
    """Returns a zero that is real and connected to ``tensors``: reducers of other ranks wait for a backward.

    The backward gives no gradient. One of zero could become nan in a loss that is 0 / 0.
    """
    return hand_back(None, [None] * len(tensors), tensors)


def hand_back(value: Tensor | None, derivatives: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> Tensor:
    """Returns ``value``, or zero. Its backward gives each tensor its derivative, times the gradient of the value."""
    result: Tensor = _HandBack.apply(value, derivatives, *tensors)
    return result


class _HandBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor | None, derivatives: Sequence[Tensor | None], *tensors: Tensor) -> Tensor:
        ctx.derivatives = derivatives
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        if value is None:  # a backward begins at a real number
            return widen(tensors[0].new_zeros((), dtype=tensors[0].dtype.to_real()))
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        results = [
            None if slope is None else (slope * move(gradients[0], slope.device).to(slope.dtype)).to(dtype)
            for slope, dtype in zip(ctx.derivatives, ctx.dtypes, strict=True)
        ]
        return None, None, *results


def divide(total: Tensor, divisor: Tensor) -> Tensor:
    """Returns the quotient, or nan with gradients of zero if the divisor is zero."""
    counted = divisor != 0
    return torch.where(counted, total / torch.where(counted, divisor, 1), torch.nan).to(total.dtype)


def check_weights(weights: Sequence[Any]) -> list[float]:
    """Returns ``weights`` as numbers, after a check of each. The host waits once for all that are on devices."""
    values = list(weights)
    places = [i for i, weight in enumerate(values) if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_cpu]
    if len(places) > 1 and len({values[i].dtype for i in places}) == 1:
        scalars = [move(values[i].detach().reshape(()), values[places[0]].device) for i in places]
        for i, number in zip(places, torch.stack(scalars).tolist(), strict=True):
            values[i] = float(number)
    for i, weight in enumerate(values):
        if isinstance(weight, bool) or not isinstance(weight, (numbers.Real, Tensor)):
            raise TypeError(f"a weight is an object of type {type(weight).__name__}, expected a number or a scalar tensor")
        if isinstance(weight, Tensor) and weight.numel() != 1:
            raise ValueError(f"a weight has shape {tuple(weight.shape)}, expected a scalar: the divisor of the mean")
        values[i] = float(weight)
        if not 0 <= values[i] < math.inf:
            raise ValueError(f"a weight is {values[i]}, expected the divisor of the mean: finite, and not negative")
    return values


def map_weights(function: Callable[[Any], Any], weights: Any) -> Any:
    """Applies ``function`` to each weight. Sequences become lists, and mappings and dataclasses dicts."""
    if dataclasses.is_dataclass(weights) and not isinstance(weights, type):
        weights = {field.name: getattr(weights, field.name) for field in dataclasses.fields(weights)}
    if isinstance(weights, Mapping):
        return {name: map_weights(function, weight) for name, weight in weights.items()}
    if isinstance(weights, (list, tuple)):
        return [map_weights(function, weight) for weight in weights]
    return function(weights)


def flat_weights(weights: Any) -> list[float]:
    """Returns a weight, or the weights in a structure, as one list of numbers."""
    leaves: list[Any] = []
    map_weights(leaves.append, weights)
    return check_weights(leaves)


Criterion = nn.Module | Callable[..., Tensor]
_COLLECTIVES = "the criterion communicates with the other ranks itself"
_WITHOUT = "write it without collectives, as for one process with all rows, and give weight=, AdditiveLoss or whole=True"


class OwnCollectives:
    """Collectives of a criterion's own, as in programs that come from ``DistributedDataParallel``.

    The first call tells whether there are some. The loss is what that class makes of it then: the mean of the values of all
    ranks. Each rank has to call the criterion once, so ranks tell how often they will.
    """

    def __init__(self, *, is_possible: bool = False, is_mean: bool = False) -> None:
        self.is_used = False
        self.asks = is_possible
        self.is_open = is_possible  # until the first call has come to its end
        self._is_mean = is_mean
        self._is_common = False  # each rank calls the criterion once

    def agree(self, calls: int) -> None:
        """Learns how often each rank calls the criterion in an update. All ranks call this."""
        if self.asks and world_size() > 1:
            counts = {*gather_objects(calls)}
            self._is_common = self._is_mean and counts == {1}
            self.asks = self.is_used or 0 in counts
            if self.is_used and not self._is_common:
                self.refuse()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Surrounds a call of the criterion. The first one finds collectives, or refuses them before they wait for a rank."""
        names = set[str]()
        act = names.add if self._is_common else self.refuse
        with OnCollective(act) if world_size() > 1 else contextlib.nullcontext():
            yield
        self.is_open = False
        if names:
            self.is_used = self.asks = True
            warnings.warn(
                f"{_COLLECTIVES}: its values are averaged over the ranks, as DistributedDataParallel does, and weight= is not "
                f"used. Better {_WITHOUT}",
                stacklevel=2,
            )

    def refuse(self, name: str = "") -> NoReturn:
        """Raises ``ValueError`` in place of a collective."""
        raise ValueError(f"{_COLLECTIVES}, expected rows and one micro-batch on each rank, and a mean, if it does: {_WITHOUT}")


class ShardLoss(NamedTuple):
    """Arguments of one replica: its copy of the criterion, its number of rows, its output, and its rows of the targets."""

    criterion: Criterion
    rows: int
    output: Any
    targets: tuple[Any, ...]
    kwargs: dict[str, Any]
    collectives: OwnCollectives = OwnCollectives()  # that the call may have
    weights: Any = None  # numbers that are known before the replica runs

    def call(self, criterion: Criterion | None = None) -> Any:
        """Calls the criterion, or another in its place, and returns the loss. See :func:`loss_of`."""
        watch = self.collectives.watch if self.collectives.is_open else contextlib.nullcontext
        with watch():
            result = call_spread(criterion or self.criterion, self.output, self.targets, self.kwargs)
        loss = result if isinstance(result, Tensor) else loss_of(result)
        if loss is None:
            raise TypeError("the criterion returned None, expected a loss: a scalar tensor, or a structure of them")
        return loss

    def weigh(self) -> Tensor:
        """Returns the divisor of the criterion's mean, as :func:`loss_weight` computes it."""
        return loss_weight(self.criterion, *spread(self.output), *self.targets, **self.kwargs)

    def nothing(self) -> Tensor:
        """Returns a zero that is connected to the output and to the criterion's parameters."""
        parameters = list(self.criterion.parameters()) if isinstance(self.criterion, nn.Module) else []
        tensors = [leaf for _, leaf in containers.leaves(self.output) if isinstance(leaf, Tensor) and is_differentiable(leaf)]
        return zero_of(*tensors, *parameters) if tensors or parameters else torch.zeros(())


def call_spread(function: Callable[..., Any], output: Any, targets: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function of output and targets. The entries of a tuple fill its leading arguments, which an error tells."""
    leading = spread(output)
    try:
        return function(*leading, *targets, **kwargs)
    except TypeError as error:
        if len(leading) == 1 or "positional argument" not in str(error):
            raise
        raise TypeError(
            f"{error}: the output is a tuple, whose {len(leading)} entries fill the first {len(leading)} arguments; name each of "
            "them, or take *arguments, or return a list from the model, which is one argument"
        ) from error


def loss_of(result: Any) -> Any:
    """Returns the attribute ``loss`` of a record, such as that of ``AdaptiveLogSoftmaxWithLoss``, or the result itself."""
    return result if isinstance(result, Tensor) else getattr(result, "loss", result)


def total_of(shard: ShardLoss) -> Any:
    """Returns the :class:`LossSum` of a criterion that is a sum, or a structure of them. It is not called without rows."""
    if not shard.rows:
        return LossSum(shard.nothing(), None)
    return containers.map_leaves(lambda leaf: leaf if leaf is None else LossSum(weighted_sum(leaf, 1), None), shard.call())


@dataclasses.dataclass(frozen=True)
class MeanAndWeight:
    """A function that computes ``mean x weight`` of a shard. ``weigh`` returns a weight, or one for each mean."""

    weigh: Callable[[ShardLoss], Any]
    minimum: Any

    def __call__(self, shard: ShardLoss) -> Any:
        """Returns the :class:`LossSum` of a shard, or a structure of them."""
        weights = self.read([shard])[0] if shard.weights is None else shard.weights
        bounds = bounds_of(self.minimum, weights)
        if not shard.rows or weights == 0 == self.minimum:
            # The criterion would return nan or raise an error.
            return map_weights(lambda weight: LossSum(shard.nothing(), weight, bound=next(bounds)), weights)
        means = shard.call()
        if shard.collectives.is_used:
            weights, bounds = 1.0, bounds_of(0.0, 1.0)
        return _weighted(means, weights, bounds, "the loss")

    @torch.no_grad()
    def read(self, shards: Sequence[ShardLoss]) -> list[Any]:
        """Returns the weights of several shards as numbers. The host waits once at most."""
        weighed = [self.weigh(shard) for shard in shards]
        numbers = iter(flat_weights(weighed))
        weights: list[Any] = map_weights(lambda _: next(numbers), weighed)
        return weights


def _weighted(means: Any, weights: Any, bounds: Iterator[Bound], place: str) -> Any:
    if isinstance(weights, float):
        bound = next(bounds)
        factor = float(bound.of(torch.tensor(weights, dtype=torch.float64))) if bound.minimum else weights

        def weigh(mean: Any) -> Any:
            return None if mean is None else LossSum(weighted_sum(mean, factor), weights, bound=bound)

        return containers.map_leaves(weigh, means)
    container = containers.open_container(means)
    entries = weights if isinstance(weights, dict) else dict(enumerate(weights))
    names = [*map(str, entries)]
    has_names = container is not None and (isinstance(weights, list) or containers.entry_names(container) == names)
    if container is None or not has_names or len(container.children) != len(names):
        raise ValueError(
            f"{place} is {containers.describe(means)}, and its weights have the entries {', '.join(names)}: expected one "
            "weight for each mean, in the same order"
        )
    pairs = zip(container.children, entries.values(), container.places, strict=True)
    return container.rebuild([_weighted(mean, weight, bounds, place + where) for mean, weight, where in pairs])


def bounds_of(minimum: Any, weights: Any) -> Iterator[Bound]:
    """Returns the bound of each weight in a structure. A number bounds a single divisor, or the counts among several."""
    if not _is_structure(minimum):
        return itertools.repeat(Bound(minimum, _is_structure(weights)))
    forms = [str(map_weights(lambda _: 0, structure)) for structure in (minimum, weights)]
    if forms[0] != forms[1]:
        raise ValueError(
            f"minimum={minimum!r}, expected one number, or one for each weight in the structure and order of weight="
        )
    return map(Bound, flat_weights(minimum))


def _is_structure(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple))


def sum_and_weight(shard: ShardLoss) -> LossSum:
    """Returns the :class:`LossSum` of a loss of torch: :func:`sum_of_terms` and its weight."""
    weight = shard.weigh()
    return LossSum(sum_of_terms(shard), weight)


def merge(parts: Sequence[Any], together: Callable[[list[LossSum]], Any]) -> Any:
    """Returns ``together(sums)`` of all replicas for each loss that the criterion returns, in the same structure."""
    form = next((part for part in parts if not isinstance(part, LossSum)), None)
    if form is None:
        return together(list(parts))

    def fill(part: Any) -> Any:  # a replica without rows has one sum for all losses
        return containers.map_leaves(lambda _: part, form) if isinstance(part, LossSum) else part

    return containers.zip_leaves(lambda place, sums: None if None in sums else together(sums), [*map(fill, parts)], "the loss")


def add_means(part: Any) -> LossSum:
    """Returns the sum of all losses of one replica, whose sums have one weight."""
    sums = [leaf for _, leaf in containers.leaves(part) if leaf is not None]
    are_bounded = any(mean.bound and mean.bound.is_of_counts and mean.bound.minimum and mean.weight % 1 for mean in sums)
    if are_bounded or len({(mean.weight, mean.bound) for mean in sums}) > 1:
        raise ValueError(
            "the criterion returns means with divisors of their own, which have to be known before the first micro-batch: call "
            "step(inputs, targets) with functions of the targets alone, one per mean, as in weight={'class': lambda target: "
            "len(target), ...}; or, in place of TrainStep, call criterion(outputs, targets), add up the losses, and call backward"
        )
    return LossSum(functools.reduce(torch.add, [mean.total for mean in sums]), sums[0].weight)


def weighed_sum(shard: ShardLoss) -> LossSum:
    """Returns :func:`sum_of_terms` with a weight of zero, for targets whose weight was added before."""
    return LossSum(sum_of_terms(shard), 0.0)


def sum_of_terms(shard: ShardLoss) -> Tensor:
    """Returns the sum of the terms of a loss of torch. There is no division, so no nan without counted targets."""
    if not shard.rows:  # multi_margin_loss of no rows returns uninitialised memory
        return widen(shard.nothing())
    if "reduction" in shard.kwargs:  # it would override the sum
        shard = shard._replace(kwargs={name: value for name, value in shard.kwargs.items() if name != "reduction"})
    for leaf in spread(shard.output):
        if isinstance(leaf, Tensor) and leaf.dtype == torch.float16:  # whose sum overflows
            return widen(shard.call(_reducing(shard.criterion, "none"))).sum()
    return check_loss(shard.call(_reducing(shard.criterion, "sum")))


def _reducing(criterion: Criterion, reduction: str) -> Criterion:
    """Returns the criterion with another reduction."""
    if not isinstance(criterion, nn.Module):
        return functools.partial(criterion, reduction=reduction)
    changed = type(criterion).__new__(type(criterion))
    object.__setattr__(changed, "__dict__", criterion.__dict__ | {"reduction": reduction})  # copy.copy takes ten times as long
    return changed


add_loss(LinearCrossEntropy, linear_cross_entropy)


def devices_of(outputs: PerReplica, allowed: Sequence[torch.device] | None) -> list[torch.device]:
    """Returns the device of each output. One without tensors gets that of its number in ``allowed``, or the CPU."""
    devices: list[torch.device] = []
    for number, output in enumerate(outputs):
        tensor = output if type(output) is torch.Tensor else containers.first_tensor(output)
        fallback = allowed or [torch.device("cpu")]
        devices.append(fallback[number % len(fallback)] if tensor is None else tensor.device)
        if allowed is not None and devices[-1] not in allowed:
            raise ValueError(f"an output is on {devices[-1]}, expected one of device_ids={[str(device) for device in allowed]}")
    return devices


def copy_criterion(
    criterion: Criterion, replicas: Replicas, devices: Sequence[torch.device]
) -> contextlib.AbstractContextManager[Sequence[Criterion]]:
    """Yields a copy of the criterion for each device. A module on another device is moved to that of the first output."""
    if isinstance(criterion, nn.Module):
        for tensor in (*criterion.parameters(), *criterion.buffers()):
            if tensor.device != devices[0]:
                criterion.to(devices[0])
        return replicas.of(criterion, devices, devices[0])
    if isinstance(criterion, functools.partial):
        bound = criterion.args, criterion.keywords
        if any(device.type != "cpu" for device in devices):
            bound = containers.map_leaves(lambda leaf: pin(leaf) if isinstance(leaf, torch.Tensor) else leaf, bound)
        moved = [move_leaves(bound, device) for device in devices]
        copies = [functools.partial(criterion.func, *arguments, **settings) for arguments, settings in moved]
        return contextlib.nullcontext(copies)
    return contextlib.nullcontext([criterion] * len(devices))


Divisor = Callable[..., Any] | str | Mapping[Any, Callable[..., Any]] | Sequence[Callable[..., Any]]
SEVERAL = "; several losses are one module that returns a mapping of them, with a weight= that has a function for each divisor"


def check_settings(criterion: Any, weight: Any, reduction: str | None, minimum: Any, *, whole: bool) -> None:
    """Raises ``TypeError`` or ``ValueError`` for settings that are invalid, or contradict the reduction of a loss of torch."""
    if isinstance(criterion, type) or not callable(criterion):
        more = SEVERAL if isinstance(criterion, (list, tuple, dict)) else ""
        raise TypeError(f"the criterion is {containers.describe(criterion)}, expected a module or a function{more}")
    is_described = weight is not None or reduction in ("sum", "none") or whole
    if not is_described and (is_compiled if isinstance(criterion, nn.Module) else is_compiled_function)(criterion):
        raise TypeError(
            f"the criterion is compiled ({containers.describe(criterion)}), and the terms and the divisor of a compiled loss "
            "are unknown: pass it without torch.compile (the model may be compiled), or give weight=, a function (output, "
            "*targets) -> scalar that returns the divisor of its mean, or reduction='sum'"
        )
    functions: Any = weight.values() if isinstance(weight, Mapping) else weight if isinstance(weight, (list, tuple)) else [weight]
    if weight is not None and weight != "rows" and not (functions and all(map(callable, functions))):
        raise ValueError(
            f"weight={weight!r}, expected a function (output, *targets) -> scalar, or 'rows', or for several means a mapping or "
            "a list with a function (*targets) -> scalar for each"
        )
    map_weights(lambda number: check_number("minimum", number, MINIMUM, at_least=0), minimum)
    if _is_structure(minimum) and weight in (None, "rows"):
        raise ValueError(f"minimum={minimum!r} was given with weight={weight!r}, expected a weight= that has a divisor for each")
    if reduction not in (None, "sum", "mean", "none"):
        raise ValueError(f"reduction={reduction!r}, expected 'sum', 'mean' or 'none'")
    if reduction is not None and find_torch_loss(criterion) is not None and reduction_of(criterion) != reduction:
        raise ValueError(
            f"reduction={reduction!r} was given for a loss of torch with reduction={reduction_of(criterion)!r}: set it in the "
            "constructor of the loss"
        )


def weights_of_targets(weight: Any, targets: tuple[Any, ...]) -> Any:
    """Calls each function of a mapping or sequence with the targets."""
    return map_weights(lambda count: count(*targets), weight)


def call_weight(weight: Any, shard: ShardLoss) -> Any:
    """Calls a weight function with the arguments of the criterion, without the keyword arguments that it does not accept."""
    if not callable(weight):
        return weights_of_targets(weight, shard.targets)
    kwargs, parameters = shard.kwargs, parameters_of(weight) if shard.kwargs else None
    if parameters is not None and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = {parameter.name for parameter in parameters}
        kwargs = {name: value for name, value in kwargs.items() if name in names}
    return call_spread(weight, shard.output, shard.targets, kwargs)
