"""One step to trace, and the layouts that run it on fake devices: one class each, with the facts that an estimate needs.

::

    Request      a step as data: module, criterion, batch, optimizer, layout, devices
    Layout       runs the micro-batches of one update: loss, gradients, optimizer state
      SingleDevice    the plain program
        DDP           one rank; its reducer is written in C++ and does not run on fake tensors, so DDPBuckets imitates it
        FSDP          one rank of torch's FSDP2, on a process group that sends nothing
      ReplicaLayout   the model and the criterion of this package

A loss whose rows depend on each other runs in two passes, or in one, as in :class:`TrainStep`.
"""

import abc
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ...batch.containers import leaves, map_leaves
from ...batch.outputs import PerReplica
from ...batch.plan import split_sizes
from ...batch.rows import Along, Arguments, count_rows
from ...loss.coupled import AdditiveLoss, CoupledLoss, WholeLoss, couple
from ...loss.criterion import DataParallelCriterion
from ...loss.sums import LossSum, Shard, add_up
from ...optim.balanced import BalancedOptimizer
from ...replicas.model import DataParallelModel
from ...replicas.replicas import Replicas, parameter_window
from ...replicas.workers import run_in_turn
from ...runtime.collectives import world_size
from ...runtime.streams import SideStreams
from ...runtime.torch_private import get_gradient
from ...runtime.values import Precision
from ...strategies.fsdp import shard
from ..devices import DeviceKind
from ..errors import UnknownMemory
from .fakes import HOME, fake_devices
from .optimizers import ExistingOptimizers, OptimizerChoice

__all__: list[str] = []


@dataclass(frozen=True)
class Request:
    """One update to trace.

    Attributes:
        inputs, targets: a batch of ``rows`` rows along dimension ``dim``: the arguments of the module, and those of the
            criterion after the output.
        micro_batches: how many make the update.
        batches: how many batches make the update. Each is cut into an equal part of the micro-batches.
        balanced: the optimizer is a :class:`BalancedOptimizer`.
        blocks: names of the modules to checkpoint.
        savings: functions of ``balanced_parallel.savings`` to apply to the traced copies.
        split: the weight of each device; None for equal shares.
        scalar: the result of every read of a tensor's value in the module.
        update_rows: rows of an update over all devices of a process; None for those of ``batches``.
    """

    module: torch.nn.Module
    criterion: Callable[..., Any]
    inputs: Arguments
    targets: tuple[Any, ...]
    rows: int
    optimizer: OptimizerChoice | ExistingOptimizers
    precision: str
    micro_batches: int
    batches: int
    layout: "type[Layout]"
    devices: int
    balanced: bool
    blocks: tuple[str, ...]
    split: tuple[float, ...] | None
    kind: DeviceKind
    dim: int
    scalar: int | float | bool | None
    savings: tuple[str, ...] = ()
    update_rows: int | None = None

    @property
    def rows_per_micro_batch(self) -> int:
        """Rows of the largest micro-batch over all devices of a process."""
        return -(-self.rows * self.batches // self.micro_batches)

    @property
    def rows_of_update(self) -> int:
        """Rows of an update over all devices and ranks, whose outputs a loss with ``whole=True`` needs."""
        ranks = self.devices if self.layout.is_distributed else 1
        return (self.update_rows or self.rows * self.batches) * ranks

    @property
    def row_step(self) -> int:
        """Numbers of rows are rounded up to a multiple of this, so that all devices have as many."""
        return 1 if self.split is not None else self.layout.devices_per_process(self.devices)

    def round_up(self, rows: int) -> int:
        """Returns the next multiple of :attr:`row_step`."""
        return -(-rows // self.row_step) * self.row_step

    @property
    def traced_devices(self) -> list[int]:
        """The traced device that stands for each of the devices."""
        return [0] * self.devices if self.layout.is_distributed else list(range(self.devices))


MicroBatch = tuple[Arguments, tuple[Any, ...]]


def plain_criterion(criterion: Any) -> Any:
    """Returns the criterion in a :class:`DataParallelCriterion`, or the criterion itself, also if its rows are coupled."""
    return criterion.module if isinstance(criterion, DataParallelCriterion) and not criterion.is_coupled else criterion


def is_coupled(criterion: Any) -> bool:
    """Returns True for a criterion with ``whole=True``, and for an :class:`AdditiveLoss`."""
    return criterion.is_coupled if isinstance(criterion, DataParallelCriterion) else isinstance(criterion, AdditiveLoss)


def make_criterion(criterion: Any, replicas: Replicas, *, dim: int, precision: str) -> DataParallelCriterion:
    """Returns a criterion on fake devices. ``whole=`` is that of a :class:`DataParallelCriterion` that the caller has given."""
    whole = is_coupled(criterion) and isinstance(criterion, DataParallelCriterion)
    inner = criterion.module if whole else criterion
    return TracedCriterion(inner, replicas, dim=dim, precision=precision, whole=whole and criterion.whole)


def coupled_losses(
    criterion: DataParallelCriterion,
    forward: Callable[[Arguments], Any],
    micro_batches: Sequence[MicroBatch],
    rows: int,
    single: bool,
) -> list[Callable[[], Tensor]]:
    """Runs the first pass, and returns a function for each micro-batch that computes its loss in the second pass.

    Args:
        criterion: on fake devices.
        forward: returns the outputs of the replicas.
        micro_batches: those that are traced.
        rows: of the whole update. Outputs of further rows are allocated without a forward.
        single: there is one micro-batch in an update, so one pass.
    """
    criterion.is_checked = True  # fake tensors have no values
    loss = couple(criterion, HOME)
    if single:
        return [functools.partial(_at_once, loss, forward, rows, *micro_batch) for micro_batch in micro_batches]
    with torch.no_grad():
        for arguments, targets in micro_batches:
            loss.collect(forward(arguments), *targets)
        _fill(loss, rows)
    loss.differentiate(None)
    return [functools.partial(_hand_back, loss, forward, *micro_batch) for micro_batch in micro_batches]


def _at_once(
    loss: CoupledLoss, forward: Callable[[Arguments], Any], rows: int, arguments: Arguments, targets: tuple[Any, ...]
) -> Tensor:
    parts = loss.collect_parts(forward(arguments), *targets)
    _fill(loss, rows)
    loss.differentiate(None)
    return _sum(loss.hand_back_parts(parts))


def _hand_back(loss: CoupledLoss, forward: Callable[[Arguments], Any], arguments: Arguments, targets: tuple[Any, ...]) -> Tensor:
    return _sum(loss.hand_back(forward(arguments), *targets))


def _sum(losses: list[LossSum]) -> Tensor:
    return add_up([loss.total for loss in losses], HOME)


def _fill(loss: CoupledLoss, rows: int) -> None:
    """Collects outputs and targets of further rows, on the devices of the last ones."""
    if not isinstance(loss, WholeLoss):
        return
    missing = max(rows - sum(map(_rows, loss.pieces)), 0)
    last = list({_device(piece): piece for piece in loss.pieces}.values())
    for piece, count in zip(last, split_sizes(missing, len(last)), strict=True):
        loss.pieces.append(map_leaves(functools.partial(_more, count, loss.dim, _rows(piece)), piece))


def _rows(piece: Arguments) -> int:
    first = next(leaf for _, leaf in leaves(piece) if isinstance(leaf, Along))
    return int(first.leaf.size(first.dim))


def _device(piece: Arguments) -> torch.device:
    first = next(leaf for _, leaf in leaves(piece) if isinstance(leaf, Along))
    place: torch.device = first.leaf.device
    return place


def _more(count: int, dim: int, rows: int, leaf: Any) -> Any:
    """Returns a leaf like another one of ``rows`` rows, with ``count`` rows."""
    if isinstance(leaf, Along) and isinstance(leaf.leaf, Tensor):
        return Along(_more(count, leaf.dim, rows, leaf.leaf), leaf.dim)
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return leaf
    shape = list(leaf.shape)
    shape[dim] = shape[dim] * count // max(rows, 1)
    return leaf.new_empty(shape)


T = TypeVar("T")


class OwnValues:
    """An exchange in which a replica receives its own value in the place of each other value: one of the same size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def exchange(self, index: int, number: int, value: Any) -> list[Any]:
        """Returns ``value`` once per replica."""
        return [value] * self.size


def run_in_this_thread(work: Sequence[Callable[[], T]], devices: Sequence[torch.device], *, together: bool = True) -> list[T]:
    """Runs replicas one after the other: a fake mode belongs to one thread."""
    return run_in_turn(work, devices, OwnValues(len(work)))


def make_replicas(*, have_streams: bool) -> Replicas:
    """Makes replicas of fake tensors.

    Args:
        have_streams: the fake devices stand for devices with streams. Gradients then live until another stream has read them.
    """
    return Replicas(side=SideStreams() if have_streams else None, workers=run_in_this_thread)


class TracedModel(DataParallelModel):
    """A :class:`DataParallelModel` on fake devices.

    Args:
        module: of fake tensors on the first of ``devices``.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: list[torch.device],
        replicas: Replicas,
        *,
        dim: int,
        precision: str,
        split: Sequence[float] | None,
    ) -> None:
        nn.Module.__init__(self)
        self._set_up(devices, replicas, dim=dim, precision=precision, split=split)
        self.module = module


class TracedCriterion(DataParallelCriterion):
    """A :class:`DataParallelCriterion` with given replicas."""

    def __init__(self, criterion: Any, replicas: Replicas, *, dim: int, precision: str, whole: bool = False) -> None:
        super().__init__(criterion, dim=dim, precision=precision, whole=whole)
        self.replicas = replicas


class Layout(abc.ABC):
    """One way to use the devices. An instance runs micro-batches of one update on fake tensors.

    Attributes:
        name: the ``layout=`` of :func:`estimate`.
        is_distributed: one process per device. The trace is that of one rank, which stands for all.
        batch_on_host: the batch is on the host, and each device receives its rows.
        takes_several_devices: ``devices=`` may be more than one.
        takes_balanced_optimizer: ``balanced_optimizer=True`` is allowed.
        is_sharded: the parameters are ``DTensor``s.
        parameters: those of the module and of the criterion, each once.
        buckets: flat tensors of the communication, allocated once.
    """

    name: ClassVar[str]
    is_distributed: ClassVar[bool] = False
    batch_on_host: ClassVar[bool] = False
    takes_several_devices: ClassVar[bool] = True
    takes_balanced_optimizer: ClassVar[bool] = False
    is_sharded: ClassVar[bool] = False

    @classmethod
    def devices_per_process(cls, devices: int) -> int:
        """Returns the number of devices over which a process divides the rows of its batch."""
        return 1 if cls.is_distributed else devices

    def __init__(self, request: "Request", module: nn.Module, criterion: Any) -> None:
        self.request = request
        self.module = module
        self.criterion = criterion
        self.parameters = learned_parameters(module, criterion)
        self.buckets: list[Tensor] = []
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Makes the optimizer of the request."""
        return self.request.optimizer(self.parameters)

    @abc.abstractmethod
    def loss(self, arguments: Arguments, targets: tuple[Any, ...]) -> Tensor:
        """Runs the forward of one micro-batch."""

    def losses(self, micro_batches: Sequence[MicroBatch]) -> list[Callable[[], Tensor]]:
        """Begins an update. Returns a function for the loss of each micro-batch."""
        if not is_coupled(self.criterion):
            return [functools.partial(self.loss, *micro_batch) for micro_batch in micro_batches]
        request = self.request
        if world_size() > 1:
            raise UnknownMemory("the memory of a loss whose rows depend on each other is not known with shards: use layout='ddp'")
        with Precision(request.precision).autocast([HOME]):
            criterion, single = self.coupled_criterion(), request.micro_batches == 1
            return coupled_losses(criterion, self.outputs, micro_batches, request.rows_of_update, single)

    def coupled_criterion(self) -> DataParallelCriterion:
        """Returns the criterion on fake devices."""
        replicas = make_replicas(have_streams=False)
        return make_criterion(self.criterion, replicas, dim=self.request.dim, precision=self.request.precision)

    def outputs(self, arguments: Arguments) -> PerReplica:
        """Runs the forward of one micro-batch. Returns an output per replica."""
        with Precision(self.request.precision).autocast([HOME]):
            output = self.module(*arguments.inputs, **arguments.kwargs)
        return PerReplica([output], [count_rows(arguments, self.request.dim)], self.request.dim)

    def accumulating(self) -> contextlib.AbstractContextManager[Any]:
        """Surrounds a micro-batch that is not the last of its update."""
        return contextlib.nullcontext()

    def window(self) -> contextlib.AbstractContextManager[Any]:
        """Surrounds an update, in which parameters are written to by the optimizer alone."""
        return contextlib.nullcontext()

    def zero_grad(self) -> None:
        """Begins an update."""
        self.optimizer.zero_grad()

    def gradients(self) -> Iterator[Any]:
        """Yields every gradient that exists."""
        updated = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        # the plain attribute of torch: reading the grad of a sharded parameter would gather it
        yield from (get_gradient(parameter) for parameter in (*self.parameters, *updated) if parameter.is_leaf)

    def parameter_copies(self) -> Iterator[Tensor]:
        """Yields the copies of the parameters on other devices."""
        yield from ()

    def optimizer_states(self) -> Iterator[Any]:
        """Yields the state of every parameter in the optimizer."""
        for state in self._inner.state.values():
            yield from state.values()

    def close(self) -> None:  # noqa: B027 - most layouts have none
        """Ends the process group of the layout, if it has one."""

    @property
    def _inner(self) -> torch.optim.Optimizer:
        return self.optimizer.shards.inner if isinstance(self.optimizer, BalancedOptimizer) else self.optimizer


class SingleDevice(Layout):
    """The plain program: ``criterion(module(inputs), targets).backward()``, ``optimizer.step()``."""

    name = "single"
    takes_several_devices = False

    def loss(self, arguments: Arguments, targets: tuple[Any, ...]) -> Tensor:
        """Runs the forward of one micro-batch."""
        with Precision(self.request.precision).autocast([HOME]):
            return compute_loss(self.criterion, self.module(*arguments.inputs, **arguments.kwargs), targets)


class ReplicaLayout(Layout):
    """:class:`DataParallelModel` and :class:`DataParallelCriterion` of this package."""

    name = "replicas"
    batch_on_host = True
    takes_balanced_optimizer = True

    def __init__(self, request: "Request", module: nn.Module, criterion: Any) -> None:
        self.request = request
        self.replicas = [make_replicas(have_streams=request.kind.like_cuda) for _ in range(2)]
        self.model, self.parallel_criterion = self.wrap(module, criterion)
        super().__init__(request, module, criterion)

    def wrap(self, module: nn.Module, criterion: Any) -> tuple[TracedModel, Any]:
        """Returns the model and the criterion on fake devices."""
        request = self.request
        settings: dict[str, Any] = {"dim": request.dim, "precision": request.precision}
        devices = fake_devices(request.devices)
        model = TracedModel(module, devices, self.replicas[0], split=request.split, **settings)
        return model, make_criterion(criterion, self.replicas[1], **settings)

    def coupled_criterion(self) -> Any:
        """Returns the criterion on fake devices."""
        return self.parallel_criterion

    def outputs(self, arguments: Arguments) -> Any:
        """Runs the forward of one micro-batch."""
        return self.model(*arguments.inputs, **arguments.kwargs)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Makes the optimizer of the layout."""
        choice = self.request.optimizer
        return choice.balanced(self.model, self.parameters) if self.request.balanced else choice(self.parameters)

    def loss(self, arguments: Arguments, targets: tuple[Any, ...]) -> Tensor:
        """Runs the forward of one micro-batch."""
        total: Tensor = self.parallel_criterion(self.outputs(arguments), *targets)
        return total

    def window(self) -> contextlib.AbstractContextManager[Any]:
        """Refreshes the copies of the parameters once."""
        return parameter_window(self.model, self.parallel_criterion)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keeps gradients unreduced during a micro-batch."""
        with contextlib.ExitStack() as stack:
            for replicas in self.replicas:
                stack.enter_context(replicas.no_sync())
            yield

    def gradients(self) -> Iterator[Any]:
        """Yields every gradient that exists, those that the replicas hold too."""
        yield from super().gradients()
        for bucket in (bucket for replicas in self.replicas for bucket in replicas.gradients.buckets):
            for gradients in bucket.held.values():
                yield from gradients

    def parameter_copies(self) -> Iterator[Tensor]:
        """Yields the copies of the parameters on other devices."""
        for tensors in (tensors for replicas in self.replicas for tensors in replicas.copies.by_device.values()):
            yield from tensors


class DDP(SingleDevice):
    """One rank of ``DistributedDataParallel(gradient_as_bucket_view=True)``, as :func:`parallelize` makes it.

    With a balanced optimizer (``ZeroRedundancyOptimizer``) it is the rank with the most state. A single rank has no reducer.
    """

    name = "ddp"
    is_distributed = True
    takes_several_devices = True
    takes_balanced_optimizer = True

    def __init__(self, request: "Request", module: nn.Module, criterion: Any) -> None:
        super().__init__(request, module, criterion)
        self.reducer = DDPBuckets(self._trained if request.devices > 1 else [])
        self.buckets = self.reducer.tensors

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Makes the optimizer of the layout."""
        if not self._is_sharded:
            return super().make_optimizer()
        return self.request.optimizer(largest_partition(self._trained, self.request.devices))

    def accumulating(self) -> contextlib.AbstractContextManager[Any]:
        """Accumulates gradients in the buckets during a micro-batch."""
        return self.reducer.no_sync()

    def zero_grad(self) -> None:
        """Clears the gradients of all parameters."""
        # ZeroRedundancyOptimizer.zero_grad() covers the parameters of all ranks
        (self.module if self._is_sharded else self.optimizer).zero_grad()

    @property
    def _is_sharded(self) -> bool:
        return self.request.balanced and self.request.devices > 1

    @property
    def _trained(self) -> list[Tensor]:
        return [parameter for parameter in self.parameters if parameter.requires_grad]


class FSDP(SingleDevice):
    """One rank of FSDP2, as :func:`parallelize` makes it: torch itself, on a process group that sends nothing."""

    name = "fsdp"
    is_distributed = True
    takes_several_devices = True
    is_sharded = True

    def __init__(self, request: "Request", module: nn.Module, criterion: Any) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the fake backend, in private code only
        from torch.utils._python_dispatch import _disable_current_modes  # no public context leaves all modes

        if dist.is_initialized():
            raise RuntimeError(
                "layout='fsdp' cannot be estimated while a process group is running: estimate it before, or elsewhere"
            )
        with _disable_current_modes():
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.devices)
            mesh = init_device_mesh("cpu", (request.devices,))
        shard(module, mesh, Precision(request.precision), lambda unit: None)
        super().__init__(request, module, criterion)

    def close(self) -> None:
        """Ends the process group."""
        torch.distributed.destroy_process_group()


class ReplicasOfStep(ReplicaLayout):
    """Replicas with the settings of a model and a criterion that exist. The criterion of the request is the wrapped one."""

    def wrap(self, module: nn.Module, criterion: DataParallelCriterion) -> tuple[TracedModel, Any]:
        """Returns the model and the criterion on fake devices."""
        request = self.request
        devices = fake_devices(request.devices)
        model = TracedModel(module, devices, self.replicas[0], split=request.split, dim=request.dim, precision=request.precision)
        criterion.devices = criterion.output_device = None
        criterion.replicas = self.replicas[1]
        if criterion.precision.name == "fp32":
            criterion.precision = Precision(request.precision)
        return model, criterion


LAYOUTS: dict[str, type[Layout]] = {layout.name: layout for layout in (SingleDevice, ReplicaLayout, DDP, FSDP)}


def find_layout(name: str) -> type[Layout]:
    """Returns the layout of that name.

    Raises:
        ValueError: no layout has it.
    """
    if name not in LAYOUTS:
        raise ValueError(f"layout={name!r}, expected one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def compute_loss(criterion: Any, output: Any, targets: tuple[Any, ...]) -> Tensor:
    """Returns the loss of an output, whose entries are spread over the criterion's arguments if it is a tuple."""
    result: Tensor = Shard(criterion, 1, output, targets, {}).call()
    return result


def learned_parameters(module: nn.Module, criterion: Any) -> list[Tensor]:
    """Returns the parameters of the module and of the criterion, each once."""
    of_criterion: Iterable[Tensor] = criterion.parameters() if isinstance(criterion, nn.Module) else ()
    return list(dict.fromkeys((*module.parameters(), *of_criterion)))


class DDPBuckets:
    """One flat tensor per dtype, as with ``gradient_as_bucket_view=True``.

    Without accumulation, autograd makes a gradient, and the hook of the reducer copies it into the bucket. With accumulation,
    micro-batches add to the bucket itself, so gradients exist once (``DDPSync``).

    Args:
        parameters: parameters that require a gradient.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.tensors: list[Tensor] = []
        self._views: dict[Tensor, Tensor] = {}
        self._is_reducing = True
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            group = [parameter for parameter in parameters if parameter.dtype == dtype]
            flat = torch.zeros(sum(parameter.numel() for parameter in group), dtype=dtype, device=group[0].device)
            self.tensors.append(flat)
            start = 0
            for parameter in group:
                view = flat[start : start + parameter.numel()].view(parameter.shape)
                parameter.register_post_accumulate_grad_hook(self._copy_into(view))
                self._views[parameter] = view
                start += parameter.numel()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Makes gradients in this block accumulate in the buckets. Nothing is reduced."""
        for parameter, view in self._views.items():
            if parameter.grad is None:
                parameter.grad = view.zero_()
        self._is_reducing = False
        try:
            yield
        finally:
            self._is_reducing = True

    def _copy_into(self, view: Tensor) -> Callable[[Tensor], None]:
        def copy(parameter: Tensor) -> None:
            if self._is_reducing and parameter.grad is not None and parameter.grad is not view:
                view.copy_(parameter.grad)
                parameter.grad = view

        return copy


def largest_partition(parameters: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """Returns the parameters of the rank with the most state under ``ZeroRedundancyOptimizer``.

    It assigns parameters by size, the largest first, each to the rank with the fewest elements so far.
    """
    partitions: list[list[Tensor]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for parameter in sorted(parameters, key=lambda parameter: parameter.numel(), reverse=True):
        rank = sizes.index(min(sizes))
        partitions[rank].append(parameter)
        sizes[rank] += parameter.numel()
    return partitions[sizes.index(max(sizes))]
