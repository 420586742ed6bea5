"""The layouts: one class each, with the facts that an estimate needs and one update on fake devices."""

import abc
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ...batch.gathering import gather
from ...batch.row_marks import Arguments
from ...batch.rows import move_leaves
from ...distributed.sharding import shard
from ...loss.criterion import DataParallelCriterion
from ...optim.balanced import BalancedOptimizer
from ...runtime.precision import Precision
from ...runtime.tensors import get_gradient
from .coupled_update import CoupledUpdates, make_criterion
from .ddp_buckets import DDPBuckets, largest_partition
from .fake_devices import HOME, fake_devices
from .plain_program import compute_loss, learned_parameters
from .torch_data_parallel import run_replicas
from .traced_replicas import TracedModel, make_replicas

if TYPE_CHECKING:
    from .traced_request import Request

__all__: list[str] = []


class Layout(CoupledUpdates):
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

    @classmethod
    def traced_devices(cls, devices: int) -> list[int]:
        """Returns the traced device that stands for each of the devices."""
        return [0] * devices if cls.is_distributed else list(range(devices))

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

    def accumulating(self) -> contextlib.AbstractContextManager[Any]:
        """Surrounds a micro-batch that is not the last of its update."""
        return contextlib.nullcontext()

    def zero_grad(self) -> None:
        """Begins an update."""
        self.optimizer.zero_grad()

    def gradients(self) -> Iterator[Any]:
        """Yields every gradient that exists."""
        updated = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        # the plain attribute of torch: reading parameter.grad would sum the gradients of the replicas
        yield from (get_gradient(parameter) for parameter in (*self.parameters, *updated) if parameter.is_leaf)

    def parameter_copies(self) -> Iterator[Tensor]:
        """Yields the copies of the parameters on other devices."""
        yield from ()

    def optimizer_states(self) -> Iterator[Any]:
        """Yields the state of every parameter in the optimizer."""
        for state in self._inner.state.values():
            yield from state.values()

    def close(self) -> None:
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


class Replicas(Layout):
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

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keeps gradients unreduced during a micro-batch."""
        with contextlib.ExitStack() as stack:
            for replicas in self.replicas:
                stack.enter_context(replicas.gradients.no_sync())
            yield

    def gradients(self) -> Iterator[Any]:
        """Yields every gradient that exists, those that the replicas hold too."""
        yield from super().gradients()
        for bucket in (bucket for replicas in self.replicas for bucket in replicas.gradients.buckets):
            for gradients in bucket.held:
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


class TorchDataParallel(Layout):
    """``nn.DataParallel``, the layout that the others are measured against.

    Parameters are copied at each forward and outputs are gathered on the first device. The loss, the gradients and the
    optimizer's state are there too.
    """

    name = "torch_data_parallel"
    batch_on_host = True

    def loss(self, arguments: Arguments, targets: tuple[Any, ...]) -> Tensor:
        """Runs the forward of one micro-batch."""
        devices, dim = fake_devices(self.request.devices), self.request.dim
        with Precision(self.request.precision).autocast([HOME]):
            output = gather(run_replicas(self.module, arguments, devices, dim), HOME, dim)
            return compute_loss(self.criterion, output, move_leaves(targets, HOME))


class ReplicasOfStep(Replicas):
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


LAYOUTS: dict[str, type[Layout]] = {layout.name: layout for layout in (SingleDevice, Replicas, DDP, FSDP, TorchDataParallel)}


def find_layout(name: str) -> type[Layout]:
    """Returns the layout of that name.

    Raises:
        ValueError: no layout has it.
    """
    if name not in LAYOUTS:
        raise ValueError(f"layout={name!r}, expected one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]
