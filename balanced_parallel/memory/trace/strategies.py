"""How one update runs in each layout, on fake devices: this package's own replicas, and stand-ins for what needs real memory."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...batch.row_marks import Arguments
from ...loss.criterion import DataParallelCriterion
from ...loss.partial_sums import Shard
from ...optim.balanced import BalancedOptimizer
from ...replicas.gradient_sums import own_gradient
from ...replicas.model import DataParallelModel
from ...runtime.precision import Precision
from ...runtime.streams import SideStreams

__all__: list[str] = []

HOME = torch.device("cpu")


def fake_devices(count: int) -> list[torch.device]:
    """The devices of a trace. CPUs, because autograd aborts on accelerators that are not there; the first without an index, so
    that what a model makes without naming a device is on it."""
    return [HOME, *(torch.device("cpu", index) for index in range(1, count))]


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer that is made when there are parameters.

    Args:
        make: a class of ``torch.optim``, a ``functools.partial`` of one, or a function of the parameters.
        foreach: takes torch's multi-tensor kernels, as torch does by itself for parameters on a GPU.
    """

    make: Callable[..., torch.optim.Optimizer]
    foreach: bool

    def __call__(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        return self._set(self.make(parameters))

    def balanced(self, model: DataParallelModel, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        made: Any = self.make
        settings: dict[str, Any] = {}
        while isinstance(made, functools.partial):
            made, settings = made.func, made.keywords | settings
        if not isinstance(made, type):
            raise TypeError(f"optimizer={self.make!r}, expected a class, or a functools.partial of one, with BalancedOptimizer")
        return self._set(BalancedOptimizer(model, made, parameters, **settings))

    def _set(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for group in optimizer.param_groups if self.foreach else ():
            if group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = True
        return optimizer


@dataclass
class Job:
    """One layout, ready to run micro-batches.

    ``loss(arguments, targets)`` is the forward, ``accumulating()`` surrounds a micro-batch that is not the last of its
    update, and the rest says which tensors are what.
    """

    loss: Callable[[Arguments, tuple[Any, ...]], Tensor]
    optimizer: torch.optim.Optimizer
    parameters: list[Tensor]
    buckets: list[Tensor] = field(default_factory=list)
    accumulating: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    held: Callable[[], Iterable[Any]] = tuple  # gradients that are not in any grad
    copies: Callable[[], Iterable[Tensor]] = tuple  # of the parameters, on other devices
    zero_grad: Callable[[], None] | None = None
    close: Callable[[], None] = lambda: None

    def gradients(self) -> Iterator[Any]:
        updated = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        # a plain look: to whoever asks for grad, replicas sum what they hold
        yield from (own_gradient.__get__(parameter) for parameter in (*self.parameters, *updated) if parameter.is_leaf)
        yield from self.held()

    def states(self) -> Iterator[Any]:
        for state in self._inner.state.values():
            yield from state.values()

    @property
    def _inner(self) -> torch.optim.Optimizer:
        return self.optimizer.shards.inner if isinstance(self.optimizer, BalancedOptimizer) else self.optimizer


def one_device(module: nn.Module, criterion: Any, optimizer: OptimizerChoice, precision: str) -> Job:
    """The plain program: ``criterion(module(inputs), targets).backward()``, ``optimizer.step()``."""

    def loss(arguments: Arguments, targets: tuple[Any, ...]) -> Tensor:
        with Precision(precision).autocast([HOME]):
            return loss_of(criterion, module(*arguments.inputs, **arguments.kwargs), targets)

    learned = learned_parameters(module, criterion)
    return Job(loss, optimizer(learned), learned)


def loss_of(criterion: Any, output: Any, targets: tuple[Any, ...]) -> Tensor:
    result: Tensor = Shard(criterion, 1, output, targets, {}).call()
    return result


def learned_parameters(module: nn.Module, criterion: Any) -> list[Tensor]:
    held = [*module.parameters(), *(criterion.parameters() if isinstance(criterion, nn.Module) else ())]
    return list(dict.fromkeys(held))


def distributed_data_parallel(
    module: nn.Module, criterion: Any, optimizer: OptimizerChoice, precision: str, ranks: int, shards_state: bool
) -> Job:
    """One rank of ``DistributedDataParallel(gradient_as_bucket_view=True)``, as ``parallelize`` makes it. Its reducer is C++ and
    wants memory: here the buckets are one flat tensor per parameter's dtype, and gradients are moved there when they come.
    ``shards_state``: the optimizer is a ``ZeroRedundancyOptimizer``, of which this is the rank with the most. A rank that is
    alone has no reducer.
    """
    job = one_device(module, criterion, optimizer, precision)
    if ranks == 1:
        return job
    learned = [parameter for parameter in job.parameters if parameter.requires_grad]
    reducing = [True]

    def view_of(flat: Tensor, start: int, parameter: Tensor) -> Callable[[Tensor], None]:
        view = flat[start : start + parameter.numel()].view(parameter.shape)

        def into_bucket(parameter: Tensor) -> None:
            if reducing[0] and parameter.grad is not None and parameter.grad is not view:
                view.copy_(parameter.grad)
                parameter.grad = view

        return into_bucket

    for dtype in dict.fromkeys(parameter.dtype for parameter in learned):
        alike = [parameter for parameter in learned if parameter.dtype == dtype]
        flat = torch.zeros(sum(parameter.numel() for parameter in alike), dtype=dtype, device=HOME)
        job.buckets.append(flat)
        start = 0
        for parameter in alike:
            parameter.register_post_accumulate_grad_hook(view_of(flat, start, parameter))
            start += parameter.numel()

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        reducing[0] = False
        try:
            yield
        finally:
            reducing[0] = True

    job.accumulating = no_sync
    if shards_state:
        job.optimizer = optimizer(_largest_part(learned, ranks))
        job.zero_grad = module.zero_grad
    return job


def _largest_part(parameters: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """As ``ZeroRedundancyOptimizer`` parts them: the largest first, each to the rank that has the least."""
    parts: list[list[Tensor]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for parameter in sorted(parameters, key=lambda parameter: parameter.numel(), reverse=True):
        least = sizes.index(min(sizes))
        parts[least].append(parameter)
        sizes[least] += parameter.numel()
    return parts[sizes.index(max(sizes))]


def replicas(
    module: nn.Module,
    criterion: Any,
    optimizer: OptimizerChoice,
    precision: str,
    devices: list[torch.device],
    balanced: bool,
    split: Sequence[float] | None,
    has_streams: bool,
    dim: int,
) -> Job:
    """This package in one process, itself."""
    for part in (module, criterion):
        if isinstance(part, nn.Module):
            part.__dict__["to"] = functools.partial(_stay, part)  # fake tensors cannot be swapped, and are there already
    model = DataParallelModel(module, ["cpu"] * len(devices), dim=dim, precision=precision, split=split)
    model.devices = devices
    losses = DataParallelCriterion(criterion, dim=dim, precision=precision)
    model.replicas.copies._watch = losses.replicas.copies._watch = None  # there are no values to compare
    if has_streams:  # as the devices that these stand for, which keep gradients until another stream has read them
        model.replicas.gradients.side, losses.replicas.gradients.side = SideStreams(), SideStreams()

    def loss(arguments: Arguments, targets: tuple[Any, ...]) -> Tensor:
        total: Tensor = losses(model(*arguments.inputs, **arguments.kwargs), *targets)
        return total

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        with model.no_sync(), losses.replicas.gradients.no_sync():
            yield

    def held() -> Iterator[Any]:
        for bucket in (*model.replicas.gradients.buckets, *losses.replicas.gradients.buckets):
            for gradients in bucket.held:
                yield from gradients

    def copies() -> Iterator[Tensor]:
        for kept in (model.replicas, losses.replicas):
            for tensors in kept.copies.by_device.values():
                yield from tensors

    learned = learned_parameters(module, criterion)
    if balanced:
        beside = [parameter for parameter in learned if not any(parameter is mine for mine in module.parameters())]
        made: torch.optim.Optimizer = optimizer.balanced(model, [*module.parameters(), *beside])
    else:
        made = optimizer(learned)
    return Job(loss, made, learned, accumulating=no_sync, held=held, copies=copies)


def fully_sharded(
    module: nn.Module, criterion: Any, optimizer: OptimizerChoice, precision: str, ranks: int, blocks: Sequence[str]
) -> Job:
    """One rank of FSDP2, torch itself on a process group that sends nothing: each block, then the root, is sharded."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import _disable_current_modes

    if dist.is_initialized():
        raise RuntimeError("layout='fsdp' cannot be estimated while a process group is running: estimate it before, or elsewhere")
    with _disable_current_modes():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        mesh = init_device_mesh("cpu", (ranks,))
    for name in blocks:
        fully_shard(module.get_submodule(name), mesh=mesh)
    fully_shard(module, mesh=mesh)
    job = one_device(module, criterion, optimizer, precision)
    job.close = dist.destroy_process_group
    return job


def _stay(module: nn.Module, *_: Any, **__: Any) -> nn.Module:
    return module
