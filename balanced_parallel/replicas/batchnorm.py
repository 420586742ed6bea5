"""Batch norm with statistics over the rows of all replicas and ranks.

torch's ``SyncBatchNorm`` needs a process group (pytorch#38940) and refuses the CPU. Here each
replica computes the count, mean and sum of squares of its own rows in the forward, and all combine
them (Chan, Golub and LeVeque 1979). The graph of each replica then includes the statistics of the
others, so the backward is an ordinary one without synchronisation.
"""

import contextvars
import functools
import inspect
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from ..runtime.collectives import gather_rows, second_group, world_size
from ..runtime.torch_private import BatchNorm
from ..runtime.values import naming_arguments
from .all_rows import exchange, refuse_recomputation, sums_rows
from .module_tree import check_is_module
from .workers import current_replica


@naming_arguments
def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Converts all batch norms in ``module`` to use statistics over the rows of all devices and
    ranks, and returns ``module``.

    Layers are converted in place. They keep their parameters, buffers, hooks and names in the
    ``state_dict()``, and those of a subclass what their ``forward`` adds to
    ``super().forward(...)``, such as an activation. Outputs, gradients and running statistics equal
    those of the plain program on the same rows, also for uneven shards and for shards with one row
    or none. Under torchrun on CUDA, :func:`parallelize` replaces these layers by
    ``nn.SyncBatchNorm``.

    Statistics are those of one forward: of each micro-batch, over all devices and ranks. Under
    torchrun, all ranks take part in every forward, without rows if they have none left.
    ``TrainStep`` takes care of this in ``step(...)``, but ``step.add(...)`` must be called equally
    often on all ranks.

    Raises:
        TypeError: the ``forward`` of a subclass computes the statistics itself.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> model = DataParallelModel(convert_sync_batchnorm(net), ["cpu", "cpu"])
        >>> output = model(torch.randn(5, 3, 8, 8)).gather()
        >>> output.shape
        torch.Size([5, 8, 6, 6])
        >>> bool(output.mean((0, 2, 3)).abs().max() < 1e-6)  # all 5 rows are normalized together
        True
    """
    check_is_module(module)
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, BatchNorm)}
    lazy = [
        name or "the module"
        for name, layer in layers.items()
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin)
    ]
    if lazy:
        raise ValueError(
            f"{lazy[0]} is not initialised yet: run the module once on a few rows before it is converted"
        )
    for name, layer in layers.items():
        if computes_statistics(layer):
            raise TypeError(
                f"{name or 'the module'} is a {type(layer).__name__}, whose {advice(layer)}"
            )
    for layer in layers.values():
        if not isinstance(layer, AllRowsBatchNorm):
            _exchange(layer, AllRowsBatchNorm)
    return module


def advice(layer: nn.Module) -> str:
    """Returns a way to normalise by all rows, for a batch norm that normalises by the rows of its
    replica.
    """
    if not computes_statistics(layer):
        return "use convert_sync_batchnorm(module), or a norm that does not mix rows"
    return (
        "forward computes statistics itself, which convert_sync_batchnorm cannot exchange: call super().forward(...) in it, or "
        "exchange the layer before for a subclass of nn.SyncBatchNorm that does so, as timm.layers.convert_sync_batchnorm does"
    )


def computes_statistics(layer: nn.Module) -> bool:
    """Returns True for a batch norm whose ``forward`` is neither torch's nor calls it as
    ``super().forward(...)``.
    """
    if isinstance(layer, AllRowsBatchNorm):
        return False
    kinds = type(layer).__mro__
    before = kinds[: kinds.index(_torch_class(kinds[0]))]
    return "forward" in vars(layer) or not all(
        _calls_super(vars(kind)["forward"]) for kind in before if "forward" in vars(kind)
    )


def _calls_super(forward: Any) -> bool:
    names = _names_in(inspect.unwrap(forward))
    return {"super", "forward"} <= names and "batch_norm" not in names


def _torch_class(kind: type) -> type:
    """Returns the class of torch that a class of batch norms is, or is derived from."""
    return next(base for base in kind.__mro__ if base.__module__.startswith("torch.nn."))


def _names_in(code: object) -> set[str]:
    """Returns the names of globals and attributes in the code of a function, and in that of its
    inner functions.
    """
    if isinstance(code, types.FunctionType):
        code = code.__code__
    if not isinstance(code, types.CodeType):
        return set()
    return {*code.co_names}.union(*map(_names_in, code.co_consts))


def _exchange(layer: nn.Module, statistics: type) -> None:
    """Exchanges torch's forward of a batch norm for that of ``statistics``.

    The layer keeps the forward of its class.
    """
    kind: Any = getattr(layer, "converted_class", type(layer))
    is_plain = kind in (AllRowsBatchNorm, _torch_class(kind))
    layer.__class__ = statistics if is_plain else _subclass(kind, statistics)


@functools.cache
def _subclass(kind: type, statistics: type) -> type:
    """Returns a subclass of ``kind`` with ``statistics`` before the class of torch in the order of
    its bases.
    """
    base = type(statistics.__name__, (statistics, _torch_class(kind)), {})
    return type(
        kind.__name__, (kind, base), {"converted_class": kind, "__module__": kind.__module__}
    )


def use_torch_sync_batchnorm(module: nn.Module) -> None:
    """Converts layers of this module to torch's ``SyncBatchNorm``, which has kernels for CUDA."""
    for layer in module.modules():
        if isinstance(layer, AllRowsBatchNorm):
            _exchange(layer, AllRanksBatchNorm)


def meets_others(part: object) -> bool:
    """Returns True if a call of a module or a function waits for the same call of other replicas and
    ranks.
    """
    layers = part.modules() if isinstance(part, nn.Module) else ()
    has_norms = any(isinstance(layer, (AllRowsBatchNorm, nn.SyncBatchNorm)) for layer in layers)
    return has_norms or sums_rows(part)


class AllRowsBatchNorm(BatchNorm):
    """Batch norm over the rows of all replicas and ranks, for any number of dimensions."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"batch norm was given {input.dim()} dimensions, expected at least 2: rows and channels"
            )

    def forward(self, input: Tensor) -> Tensor:
        """Normalises the rows. In training, this waits for the other replicas and ranks."""
        self._check_input_dim(input)
        _refuse_chunks(self, input)
        uses_batch = self.training or self.running_mean is None
        if uses_batch:
            refuse_recomputation(self)
        if not uses_batch or (current_replica() is None and world_size() == 1):
            return BatchNorm.forward(self, input)  # nn.SyncBatchNorm's refuses the CPU.
        dims = [0, *range(2, input.dim())]
        values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        count, mean, squares = _combine(gather_statistics(values, dims))
        if count <= 1:
            raise ValueError(
                f"batch norm was given {tuple(input.shape)}, expected more than 1 value per channel in training"
            )
        self._update_running(mean.detach(), squares.detach() / (count - 1))
        shape = [1, -1, *(1 for _ in dims[1:])]
        scale = torch.rsqrt(squares / count + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        return (values * scale.view(shape) + shift.view(shape)).to(input.dtype)

    def _update_running(self, mean: Tensor, variance: Tensor) -> None:
        if not self.training or self.running_mean is None or self.running_var is None:
            return
        factor: float | Tensor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / self.num_batches_tracked.to(mean.dtype)
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            running.copy_(running * (1 - factor) + value.to(running.dtype) * factor)


class AllRanksBatchNorm(nn.SyncBatchNorm):
    """torch's ``SyncBatchNorm``, in the process group for statistics."""

    @property
    def process_group(self) -> Any:  # type: ignore[override]
        """Returns the process group.

        It is not an attribute of the layer, which could then not be copied or pickled.
        """
        return second_group("statistics")

    def forward(self, input: Tensor) -> Tensor:
        """Normalises the rows, with those of all ranks."""
        _refuse_chunks(self, input)
        return super().forward(input)


# Rows of the running forward of a rank, and the layers that were called with fewer of them.
_calls: contextvars.ContextVar[tuple[int, set[nn.Module]]] = contextvars.ContextVar(
    "calls", default=(0, set())
)


def begin_forward(rows: int | None) -> None:
    """Begins to count the calls of layers with fewer rows than this forward of a rank has."""
    _calls.set((rows or 0, set()))


def _refuse_chunks(layer: nn.Module, input: Tensor) -> None:
    rows, layers = _calls.get()
    if len(input) < rows:
        if layer in layers:
            raise ValueError(
                f"a converted batch norm was called again in a forward of {rows} rows, with {len(input)} of them, expected all "
                "rows in a call, as ranks would wait for as many calls: do not convert layers that normalise chunks of the rows "
                "(ghost batch norm)"
            )
        layers.add(layer)


# The number of values per channel on the host, and the moments [3, channels]: mean, sum of squared
# differences from the mean, and that number. They are zeros if there are no rows.
Statistics = tuple[int, Tensor]


def gather_statistics(values: Tensor, dims: list[int]) -> list[Statistics]:
    """Returns the statistics of every replica and rank, on the device of ``values``, the rows of
    this replica.
    """
    if has_torch_function_unary(values):
        # Modes of torch see one call, in place of sums over the rows of a shard.
        seen: list[Statistics] = handle_torch_function(gather_statistics, (values,), values, dims)
        return seen
    count = values.numel() // max(values.size(1), 1)
    mean = values.sum(dims) / max(count, 1)
    squares = (values - mean.view(1, -1, *(1 for _ in dims[1:]))).square().sum(dims)
    # a fill: the host does not wait
    parts = exchange(torch.stack([mean, squares, torch.full_like(mean, count)]), count)
    if world_size() == 1:
        return parts
    packed = torch.stack([moments for _, moments in parts])
    gathered = gather_rows(packed, [len(packed)] * world_size(), 0, second_group("statistics"))
    sizes = gathered[:, 2, 0].tolist()  # the host waits once
    return [(int(size), moments) for size, moments in zip(sizes, gathered, strict=True)]


def _combine(statistics: list[Statistics]) -> tuple[int, Tensor, Tensor]:
    """Returns count, mean and sum of squared differences of all rows, without waiting for a device."""
    count = sum(size for size, _ in statistics)
    means, squares, sizes = torch.stack([moments for _, moments in statistics]).unbind(1)
    counts = sizes.detach()  # stacked with statistics that have gradients
    mean = (counts / max(count, 1) * means).sum(0)
    return count, mean, (squares + counts * (means - mean).square()).sum(0)
