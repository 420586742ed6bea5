"""``DataParallelCriterion``: the loss where the outputs are, and the mean of the whole batch, not a mean of means."""

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import nesting
from .devices import DeviceLike, resolve_device, resolve_devices
from .execution import run_replicas
from .losses import has_sum, is_known, loss_weight, reduction_of, refuse_coupled
from .precision import Precision
from .replication import replicate
from .scattering import Arguments, Pieces, count_rows, cut, move_leaves, proportional_sizes, split_sizes
from .weighting import Weight, divide_once, weighted_sum, widen, zero_of

__all__: list[str] = []

Criterion = nn.Module | Callable[..., Tensor]


class Terms(NamedTuple):
    """The loss of each replica as a sum and what it is to be divided by; no weights where the criterion is itself a sum."""

    sums: list[Tensor]
    weights: list[Weight] | None


class DataParallelCriterion(nn.Module):
    """Computes a criterion on each replica's output, where it lies, and returns the loss of the whole batch as one scalar.

    The result is that of ``criterion(gather(outputs), *targets)`` on one device, whatever the split: each replica's loss is a
    sum and the count it divides by (:func:`loss_weight`), both are added up, and divided once. Under torchrun it is the loss over
    all ranks. With ``reduction="sum"`` the sums are added; with ``reduction="none"`` the result is the list of the replicas'
    losses, for :func:`gather`.

    ``criterion(outputs, *targets, **kwargs)``: targets (and keyword arguments) are cut by rows as the model's inputs were. A
    replica's output that is a tuple is spread over the criterion's leading arguments; a tensor, a list, a named tuple, a
    mapping or a dataclass is passed as it is.

    Args:
        criterion: a module, whose parameters and buffers are copied to each device (its parameters get their gradients), or
            a function; of a ``functools.partial``, the tensors are moved to each device.
        device_ids: the devices that outputs may lie on; ``None`` takes them wherever they are.
        output_device: where the loss goes; ``None`` is the device of the first output.
        dim: the dimension of the rows in the targets.
        weight: a function ``(output, *targets) -> scalar`` that returns what ``criterion`` divides its mean by, for one that
            :func:`loss_weight` does not know. Without it such a criterion is weighted by rows, with a warning.
        precision: autocast inside every replica, as in :class:`DataParallelModel`.

    Raises:
        ValueError: targets that do not fit the outputs' rows, or a loss that is not a scalar.
        BaseException: the first failure of a replica, of its own type, with the replica and its device in the message.
    """

    def __init__(
        self,
        criterion: Criterion,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        weight: Callable[..., Weight] | None = None,
        precision: str | Precision | None = None,
    ) -> None:
        super().__init__()
        if not callable(criterion):
            raise TypeError(f"the criterion is {nesting.describe(criterion)}, expected a module or a function")
        self.module = criterion
        self.devices = None if device_ids is None else resolve_devices(device_ids)
        self.output_device = None if output_device is None else resolve_device(output_device)
        self.dim = dim
        self.weight = weight
        self.precision = Precision("fp32" if precision is None else precision)
        self._warned = False

    @property
    def reduction(self) -> str:
        """``"mean"``, ``"sum"`` or ``"none"``, as the criterion is set."""
        return reduction_of(self.module)

    def forward(self, outputs: Sequence[Any], *targets: Any, **kwargs: Any) -> Any:
        if kwargs.get("reduction", self.reduction) == "none":
            return self._run(_call, self.module, outputs, targets, kwargs)
        sums, weights = self.terms(outputs, *targets, **kwargs)
        return divide_once(sums, weights, self.output_device or sums[0].device)

    def terms(self, outputs: Sequence[Any], *targets: Any, **kwargs: Any) -> Terms:
        """The loss in parts, for whoever divides later: one sum per replica on its device, and one weight each."""
        reduction = kwargs.get("reduction", self.reduction)
        if reduction == "none":
            raise ValueError("the criterion has reduction='none', expected a scalar loss: use reduction='mean' or 'sum'")
        if reduction == "sum":
            return Terms(self._run(_total, self.module, outputs, targets, kwargs), None)
        if self.weight is None and has_sum(self.module):
            pairs = self._run(_sum_and_weight, self.module, outputs, targets, kwargs)
        else:
            pairs = self._run(functools.partial(_mean_and_weight, self._weigh()), self.module, outputs, targets, kwargs)
        return Terms([term for term, _ in pairs], [weight for _, weight in pairs])

    def _weigh(self) -> Callable[..., Weight]:
        """How one replica's mean is weighted where torch's own sum cannot be asked for."""
        if self.weight is not None:
            given = self.weight
            return lambda criterion, rows, output, targets, kwargs: given(output, *targets)
        if is_known(self.module):
            return lambda criterion, rows, output, targets, kwargs: loss_weight(
                criterion, *nesting.spread(output), *targets, **kwargs
            )
        refuse_coupled(self.module)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"it is not known what {nesting.describe(self.module)} divides its mean by: it is weighted by rows, which is "
                "exact only where each row counts the same; give DataParallelCriterion weight=, a function "
                "(output, *targets) -> scalar, or register one with @loss_weight.register",
                stacklevel=6,
            )
        return lambda criterion, rows, output, targets, kwargs: rows

    def _run(
        self,
        term: Callable[..., Any],
        criterion: Criterion,
        outputs: Sequence[Any],
        targets: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[Any]:
        """``term(criterion, rows, output, targets, kwargs)`` for each replica, on the device of its output."""
        devices = self._devices_of(outputs)
        batch = Arguments(targets, kwargs)
        rows = count_rows(batch, self.dim)
        sizes = _sizes_like(outputs, rows, self.dim)
        shards = [batch] * len(outputs) if rows is None else cut(batch, sizes, self.dim)
        with self.precision.autocast(devices):
            work = [
                functools.partial(_on_shard, term, replica, size, output, shard, device)
                for replica, size, output, shard, device in zip(
                    _copies(criterion, devices), sizes, outputs, shards, devices, strict=True
                )
            ]
            return run_replicas(work, devices)

    def _devices_of(self, outputs: Sequence[Any]) -> list[torch.device]:
        if not isinstance(outputs, (list, tuple)) or nesting.is_named_tuple(outputs) or not outputs:
            raise TypeError(
                f"the criterion was given {nesting.describe(outputs)}, expected the list that DataParallelModel returns, with "
                "one output per replica; for a single output write criterion([output], ...)"
            )
        tensors = [nesting.first_tensor(output) for output in outputs]
        fallback = self.devices or [torch.device("cpu")]
        devices = [fallback[i % len(fallback)] if tensor is None else tensor.device for i, tensor in enumerate(tensors)]
        strange = [str(device) for device in devices if self.devices is not None and device not in self.devices]
        if strange:
            raise ValueError(
                f"an output is on {strange[0]}, expected one of device_ids={[str(device) for device in self.devices or ()]}"
            )
        return devices


def _copies(criterion: Criterion, devices: Sequence[torch.device]) -> Sequence[Criterion]:
    """The criterion on each device. One that holds its class weights on the CPU follows the outputs."""
    if isinstance(criterion, nn.Module):
        return replicate(criterion.to(devices[0]), devices)
    if isinstance(criterion, functools.partial):
        moved = [(move_leaves(criterion.args, device), move_leaves(criterion.keywords, device)) for device in devices]
        return [functools.partial(criterion.func, *arguments, **settings) for arguments, settings in moved]
    return [criterion] * len(devices)


def _sizes_like(outputs: Sequence[Any], rows: int | None, dim: int) -> list[int]:
    """How many rows of the targets belong to each output: in proportion to the rows that its replica was given."""
    shares = outputs.sizes if isinstance(outputs, Pieces) else [_output_rows(output, dim) for output in outputs]
    known = [share for share in shares if share is not None]
    if len(known) < len(outputs):
        return split_sizes(1 if rows is None else rows, len(outputs))
    return known if rows is None else proportional_sizes(rows, known)


def _output_rows(output: Any, dim: int) -> int | None:
    tensor = nesting.first_tensor(output)
    return None if tensor is None or tensor.dim() <= dim else tensor.size(dim)


def _on_shard(
    term: Callable[..., Any], criterion: Criterion, rows: int, output: Any, shard: Arguments, device: torch.device
) -> Any:
    targets, kwargs = move_leaves(shard, device)
    return term(criterion, rows, output, targets, kwargs)


def _call(criterion: Criterion, rows: int, output: Any, targets: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = criterion(*nesting.spread(output), *targets, **kwargs)
    return result if isinstance(result, Tensor) else getattr(result, "loss", result)  # AdaptiveLogSoftmaxWithLoss


def _total(criterion: Criterion, rows: int, output: Any, targets: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    if rows == 0:  # the sum of nothing, for which some losses have only an error
        return _nothing(criterion, output)
    return weighted_sum(_call(criterion, rows, output, targets, kwargs), 1)


def _mean_and_weight(
    weigh: Callable[..., Weight],
    criterion: Criterion,
    rows: int,
    output: Any,
    targets: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Tensor, Weight]:
    with torch.no_grad():
        weight = weigh(criterion, rows, output, targets, kwargs)
    if not weight:  # whatever the criterion makes of nothing (nan, an error), it counts for nothing
        return _nothing(criterion, output), weight
    return weighted_sum(_call(criterion, rows, output, targets, kwargs), weight), weight


def _nothing(criterion: Criterion, output: Any) -> Tensor:
    """Zero, connected to the output and to the criterion's parameters."""
    parameters = list(criterion.parameters()) if isinstance(criterion, nn.Module) else []
    tensors = [leaf for _, leaf in nesting.leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return zero_of(*tensors, *parameters) if tensors or parameters else torch.zeros(())


def _sum_and_weight(
    criterion: Criterion, rows: int, output: Any, targets: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Weight]:
    """The loss of torch as the sum of its terms: no division, hence no nan where there is nothing to count."""
    weight = loss_weight(criterion, *nesting.spread(output), *targets, **kwargs)
    tensors = [leaf for leaf in nesting.spread(output) if isinstance(leaf, Tensor)]
    if any(tensor.dtype == torch.float16 for tensor in tensors):
        if not torch.is_autocast_enabled(tensors[0].device.type):  # all is float16, and a sum in it overflows: keep the mean
            return _mean_and_weight(lambda *_: weight, criterion, rows, output, targets, kwargs)
        output = tuple(widen(leaf) if isinstance(leaf, Tensor) else leaf for leaf in nesting.spread(output))
    if isinstance(criterion, nn.Module):
        summing = copy.copy(criterion)
        summing.reduction = "sum"  # type: ignore[assignment]
        return widen(summing(*nesting.spread(output), *targets, **kwargs)), weight
    return widen(_call(functools.partial(criterion, reduction="sum"), rows, output, targets, kwargs)), weight
