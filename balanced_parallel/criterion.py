"""``DataParallelCriterion``: the loss where the outputs are, and the mean of the whole batch, not a mean of means."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from . import nesting
from .devices import DeviceLike, resolve_device, resolve_devices
from .execution import run_replicas
from .losses import has_sum, is_known, reduction_of, refuse_coupled, weight_of_targets
from .precision import Precision
from .replication import Replicas
from .scattering import Arguments, Pieces, count_rows, cut, move_leaves, proportional_sizes, split_sizes
from .terms import Criterion, Shard, Terms, mean_and_weight, sum_and_weight, sum_of_terms, total_of
from .weighting import Weight, divide_once

__all__: list[str] = []


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
        self.replicas = Replicas()
        self._warned = False

    @property
    def reduction(self) -> str:
        """``"mean"``, ``"batchmean"``, ``"sum"`` or ``"none"``, as the criterion is set."""
        return reduction_of(self.module)

    def forward(self, outputs: Sequence[Any], *targets: Any, **kwargs: Any) -> Any:
        if kwargs.get("reduction", self.reduction) == "none":
            return self._run(Shard.call, outputs, targets, kwargs)
        sums, weights = self.terms(outputs, *targets, **kwargs)
        return divide_once(sums, weights, self.output_device or sums[0].device)

    def terms(self, outputs: Sequence[Any], *targets: Any, **kwargs: Any) -> Terms:
        """The loss in parts, for whoever divides later: one sum per replica on its device, and one weight each."""
        reduction = kwargs.get("reduction", self.reduction)
        if reduction == "none":
            raise ValueError("the criterion has reduction='none', expected a scalar loss: use reduction='mean' or 'sum'")
        if reduction == "sum":
            return Terms(self._run(total_of, outputs, targets, kwargs), None)
        term = sum_and_weight if self.weight is None and has_sum(self.module) else mean_and_weight(self._weigh())
        pairs = self._run(term, outputs, targets, kwargs)
        return Terms([total for total, _ in pairs], [weight for _, weight in pairs])

    def weigh_targets(self, *targets: Any) -> Weight | None:
        """What :meth:`terms` would find in all of a batch, where the targets alone say so, for whoever cuts it over time."""
        if self.weight is not None or self.reduction != "mean":
            return None
        return weight_of_targets(self.module, targets)

    def sums(self, outputs: Sequence[Any], *targets: Any) -> Terms:
        """:meth:`terms` of targets that were weighed before."""
        return Terms(self._run(sum_of_terms, outputs, targets, {}), [])

    def _weigh(self) -> Callable[[Shard], Weight]:
        """How one replica's mean is weighted where torch's own sum cannot be asked for."""
        if self.weight is not None:
            given = self.weight
            return lambda shard: given(shard.output, *shard.targets)
        if is_known(self.module):
            return Shard.weigh
        refuse_coupled(self.module)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"it is not known what {nesting.describe(self.module)} divides its mean by: it is weighted by rows, which is "
                "exact only where each row counts the same; give DataParallelCriterion weight=, a function "
                "(output, *targets) -> scalar, or register one with @loss_weight.register",
                stacklevel=6,
            )
        return lambda shard: shard.rows

    def _run(
        self, term: Callable[[Shard], Any], outputs: Sequence[Any], targets: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """``term(shard)`` for each replica, on the device of its output."""
        devices = self._devices_of(outputs)
        batch = Arguments(targets, kwargs)
        rows = count_rows(batch, self.dim)
        sizes = _sizes_like(outputs, rows, self.dim)
        batches = [batch] * len(outputs) if rows is None else cut(batch, sizes, self.dim)

        def run(criterion: Criterion, size: int, output: Any, mine: Arguments, device: torch.device) -> Any:
            return term(Shard(criterion, size, output, move_leaves(mine.inputs, device), move_leaves(mine.kwargs, device)))

        with self.precision.autocast(devices), self._copies(devices) as criteria:
            replicas = zip(criteria, sizes, outputs, batches, devices, strict=True)
            return run_replicas([functools.partial(run, *replica) for replica in replicas], devices, together=False)

    def _copies(self, devices: Sequence[torch.device]) -> contextlib.AbstractContextManager[Sequence[Criterion]]:
        """The criterion on each device. One that holds its class weights on the CPU follows the outputs."""
        criterion = self.module
        if isinstance(criterion, nn.Module):
            if len(devices) == 1 and _holds_nothing(criterion):
                return contextlib.nullcontext([criterion])
            return self.replicas.handed_out(criterion.to(devices[0]), devices, devices[0])
        if isinstance(criterion, functools.partial):
            moved = [(move_leaves(criterion.args, device), move_leaves(criterion.keywords, device)) for device in devices]
            copies = [functools.partial(criterion.func, *arguments, **settings) for arguments, settings in moved]
            return contextlib.nullcontext(copies)
        return contextlib.nullcontext([criterion] * len(devices))

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


def _holds_nothing(module: nn.Module) -> bool:
    return not module._modules and not any(held is not None for held in (*module._parameters.values(), *module._buffers.values()))


def _sizes_like(outputs: Sequence[Any], rows: int | None, dim: int) -> list[int]:
    """How many rows of the targets belong to each output: in proportion to the rows that its replica was given."""
    shares = outputs.sizes if isinstance(outputs, Pieces) else [_output_rows(output, dim) for output in outputs]
    known = [share for share in shares if share is not None]
    if len(known) < len(outputs):
        return [1] * len(outputs) if rows is None else split_sizes(rows, len(outputs))
    return known if rows is None else proportional_sizes(rows, known)


def _output_rows(output: Any, dim: int) -> int | None:
    tensor = nesting.first_tensor(output)
    return None if tensor is None or tensor.dim() <= dim else tensor.size(dim)
