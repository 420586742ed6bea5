"""Shards of a criterion: a copy on the device of each output, its rows of the targets, and the settings of its divisor."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..batch import containers
from ..batch.containers import Dims, is_first
from ..batch.outputs import PerReplica
from ..batch.plan import RowNumbers, consecutive, proportional_sizes, split_sizes
from ..batch.rows import Arguments, Shard, count_rows, cut, mark, move_arguments, move_leaves, parameters_of
from ..replicas.replicas import Replicas
from ..runtime.devices import pin
from ..runtime.torch_private import is_compiled, is_compiled_function
from ..runtime.values import Precision, check_number
from .rules import find_torch_loss, reduction_of
from .sums import MINIMUM, Criterion, MeanAndWeight, ShardLoss, call_spread, map_weights


class ShardRunner(nn.Module):
    """A criterion with copies on the devices of the outputs: the base of :class:`DataParallelCriterion`."""

    module: Criterion
    whole: bool  # the loss is computed once, of all outputs
    is_checked = False  # parts of a coupled loss are checked in the first batch
    is_coupled: bool
    minimum: float
    devices: list[torch.device] | None  # that outputs may be on
    output_device: torch.device | None
    dim: int | None
    in_dims: Dims
    precision: Precision
    replicas: Replicas

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
        leading = leading or count_leading(function, len(targets))
        return mark(Arguments(targets, kwargs), self.in_dims, function, first=1, unnamed=leading - 1), self.dim or 0

    def cut(self, outputs: Any, targets: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[PerReplica, list[Shard]]:
        """Cuts the arguments behind the outputs as the outputs' shards. Returns the outputs, and the shards."""
        entries = as_per_replica(outputs, self._output_dim)
        batch, dim = self.mark(targets, kwargs, entries.dim, len(containers.spread(entries[0])))
        expected = None if None in entries.sizes else sum(size or 0 for size in entries.sizes)
        rows = count_rows(batch, dim, expected, "targets")
        if not (isinstance(outputs, PerReplica) and outputs.has_sizes) and not all(
            isinstance(part, PerReplica) for part in outputs
        ):
            check_rows_of_list(entries, rows)
        if expected is None:
            sizes = [1] * len(entries) if rows is None else split_sizes(rows, len(entries))
        else:
            sizes = proportional_sizes(expected if rows is None else rows, [size or 0 for size in entries.sizes])
        parts: list[RowNumbers] = [*consecutive(sizes)]
        if entries.order is not None and rows is not None:
            order = entries.order  # the rows of the outputs were cut by cost
            if rows != len(order):
                raise ValueError(
                    f"the targets have {rows} rows, and the outputs {len(order)}, in the order of their cost, expected the same "
                    "number: call criterion([outputs.gather()], targets)"
                )
            parts = [[order[place] for place in part] for part in parts]
        is_whole = rows is None or (len(parts) == 1 and entries.order is None)
        batches = [batch] * len(parts) if is_whole else cut(batch, parts, dim)
        cells = zip(batches, parts, sizes, devices_of(entries, self.devices), strict=True)
        return entries, [Shard(Arguments((), {}), piece, part, size, device) for piece, part, size, device in cells]

    def run(self, term: Callable[[ShardLoss], Any], outputs: PerReplica, shards: Sequence[Shard]) -> list[Any]:
        """Returns the term of the loss for each replica, computed on the device of its output."""
        devices = devices_of(outputs, self.devices)
        with self.precision.autocast(devices), copy_criterion(self.module, self.replicas, devices) as criteria:
            weights: list[Any] = [None] * len(shards)
            if isinstance(term, MeanAndWeight) and any(device.type != "cpu" for device in devices):
                weights = self._weights_in_place(term, outputs, shards)
            replicas = zip(criteria, outputs, shards, weights, devices, strict=True)
            work = [functools.partial(_run, term, *replica) for replica in replicas]
            return self.replicas.workers(work, devices, together=False)

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


def _run(term: Callable[..., Any], criterion: Criterion, output: Any, shard: Shard, weights: Any, device: torch.device) -> Any:
    targets, kwargs = move_arguments(shard.targets, device)
    with shard.drawing("criterion"):
        return term(ShardLoss(criterion, shard.target_rows, output, targets, kwargs, weights))


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


def as_per_replica(outputs: Any, dim: Dims = None) -> PerReplica:
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
        return PerReplica(zip(*outputs, strict=True), outputs[0].sizes, tuple(part.dim for part in outputs))
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


def check_rows_of_list(outputs: PerReplica, rows: int | None) -> None:
    """Raises ``ValueError`` if a plain list of outputs does not have the rows of the targets."""
    sizes = [size for size in outputs.sizes if size is not None]
    if rows is not None and (sum(sizes) != rows if sizes else len(outputs) > 1):
        raise ValueError(
            f"the criterion was given a list of {len(outputs)} outputs with {sum(sizes) or 'no'} rows in all, and targets with "
            f"{rows}: the rows of each replica are unknown. {_ADVICE}"
        )


Divisor = Callable[..., Any] | str | Mapping[Any, Callable[..., Any]] | Sequence[Callable[..., Any]]
SEVERAL = "; several losses are one module that returns a mapping of them, with a weight= that has a function for each divisor"


def check_settings(criterion: Any, weight: Any, reduction: str | None, minimum: float, *, whole: bool) -> None:
    """Raises ``TypeError`` or ``ValueError`` for settings that are invalid, or contradict the reduction of a loss of torch."""
    if isinstance(criterion, type) or not callable(criterion):
        more = SEVERAL if isinstance(criterion, (list, tuple, dict)) else ""
        raise TypeError(f"the criterion is {_described(criterion)}, expected a module or a function{more}")
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
    check_number("minimum", minimum, MINIMUM, at_least=0)
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


def count_leading(function: Callable[..., Any], targets: int) -> int:
    """Returns the number of required arguments of ``function`` before its last ``targets`` ones. An output fills them."""
    parameters = parameters_of(function) or []
    positional = [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    required = [parameter for parameter in positional if parameter.default is parameter.empty]
    return max(len(required) - targets, 1)


def _described(criterion: Any) -> str:
    return f"the class {criterion.__name__}" if isinstance(criterion, type) else containers.describe(criterion)
