"""A problem, and the request to trace one update of it, both as data.

::

    Problem    module, criterion and batch, as a user gives them
    Request    the same for one update: with its optimizer, its layout over devices, and its savings
    Layout     a class that runs such an update on fake devices; ``trace/layouts.py`` has those of this package
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from ..strategies.tracing import Shard, TracedBatch
from .devices import DeviceKind
from .trace.values import is_small

LossFunction = Callable[..., Tensor]  # a module or a function


@dataclass(frozen=True)
class Problem:
    """Arguments of :func:`estimate` and :func:`plan` that say what is computed."""

    module: nn.Module
    criterion: LossFunction
    inputs: object
    targets: object
    dim: int = 0
    # the result of every read of a tensor's value in the module
    scalar: float | None = None

    @property
    def batch(self) -> TracedBatch:
        """Inputs and targets with some rows."""
        batch = TracedBatch.of(self.inputs, self.targets, self.dim)
        if batch.rows:
            return batch
        raise ValueError(
            f"the inputs have no rows, expected tensors with rows along dimension {self.dim}"
        )

    def with_rows(self, rows: int) -> Self:
        """Returns the problem with ``rows`` rows, or a multiple of them, in its batch.

        Tensors are on the meta device. Those that are small, and lists, repeat their rows.
        """
        batch = self.batch.resized(rows, is_small)
        inputs = batch.inputs.kwargs or batch.inputs.inputs
        return dataclasses.replace(self, inputs=inputs, targets=batch.targets.inputs)


class Layout(Protocol):
    """One update on fake devices, and the facts about its kind that an estimate needs."""

    name: ClassVar[str]
    is_distributed: ClassVar[bool] = False  # the trace is that of one rank, which stands for all
    batch_on_host: ClassVar[bool] = False  # each device receives its rows from there
    is_sharded: ClassVar[bool] = False  # the parameters are DTensors
    is_whole: ClassVar[bool] = False  # the criterion runs the update, with its backwards
    buckets: list[Tensor]  # flat tensors of the communication, allocated once
    parameters: list[nn.Parameter]
    replicas: Sequence[Any] = ()  # The model has some, and the criterion.
    optimizers: list[Optimizer]
    inner_optimizers: list[Optimizer]  # They are those of torch, also inside of balanced ones.

    def __init__(self, request: "Request", module: nn.Module, criterion: LossFunction) -> None: ...

    @classmethod
    def devices_per_process(cls, devices: int) -> int:
        """Returns the number of devices over which a process divides the rows of its batch."""
        return 1 if cls.is_distributed else devices

    @classmethod
    def pieces(cls, request: "Request") -> Iterator[tuple[tuple[Hashable, ...], Tensor]]:
        """Returns a parameter for each of its pieces on devices that own it, with the facts that
        tell pieces apart.
        """
        return iter(())

    @classmethod
    def traffic(
        cls,
        request: "Request",
        parameters: int,
        learned: int,
        devices: int,
        micro_batches: int,
        reductions: int,
    ) -> int:
        """Returns the bytes to and from the busiest device per update.

        Args:
            parameters: their bytes, of which ``learned`` are trained. Frozen values stay where they
                are, unless they are gathered for each forward.
            devices: the number of devices of all hosts.
            reductions: how often gradients are reduced.
        """
        moved = 2 * (devices - 1) * learned
        # a reduce-scatter and an all-gather, or from and to the first device
        is_ring = request.balanced or cls.is_distributed
        return 2 * moved // devices if is_ring else moved

    def evaluate(self, part: Shard) -> Tensor:
        """Runs the forward of one micro-batch, with the loss of its own rows."""
        ...

    def run(self, part: Shard) -> None:
        """Runs a whole update, with its backwards and the steps of its optimizers."""
        return

    def losses(self, micro_batches: Sequence[Shard]) -> list[Callable[[], Tensor]]:
        """Begins an update. Returns a function for the loss of each micro-batch."""
        ...

    def take_outputs(self) -> list[object]:
        """Returns the outputs of the last forward. They stay alive if the request says so."""
        ...

    def accumulating(self) -> AbstractContextManager[None]:
        """Begins a micro-batch that is not the last of its update.

        Its gradients stay unreduced until the end of the block.
        """
        return nullcontext()

    def window(self) -> AbstractContextManager[None]:
        """Surrounds an update, in which parameters are written to by the optimizer alone."""
        return nullcontext()

    def zero_grad(self) -> None:
        """Begins an update."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def close(self) -> None:
        """Ends the process group of the layout, if it has one."""
        return


class OptimizerMaker(Protocol):
    """The optimizers of an update, which a trace makes once there are parameters."""

    has_state: ClassVar[bool] = False

    def make_all(
        self, parameters: Iterable[Tensor], model: nn.Module | None = None
    ) -> list[Optimizer]:
        """Makes the optimizers, with a :class:`BalancedOptimizer` if there is a model."""
        ...


@dataclass(frozen=True, kw_only=True)
class Request:
    """One update of a problem to trace."""

    module: nn.Module
    criterion: LossFunction
    batch: TracedBatch
    scalar: float | None
    optimizer: OptimizerMaker
    precision: str
    micro_batches: int
    layout: type[Layout]
    devices: int
    balanced: bool
    split: tuple[float, ...] | None
    kind: DeviceKind
    couples_rows: bool = False  # The loss is a function of all rows, or of sums over them.
    savings: tuple[str, ...] = ()
    update_rows: int | None = None  # over all devices of a process; None for those of the batch
    whole_gradients: bool = False  # FSDP keeps them until the last micro-batch.
    mode: str = "train"
    keeps_outputs: bool = False  # The loop has them until the next forward.
    keeps_gradients: bool = False  # The loop clears them behind the forward.
    # Each gradient has a bucket with 0, so that blocks repeat. The memory lacks that of some buckets.
    bucket_bytes: int | None = None
    blocks: int | None = None  # A trace has so many of a stack of equal blocks; None for all.

    @property
    def reduces_each(self) -> bool:
        """True if several micro-batches all reduce their gradients, so that one shows the rest."""
        return self.layout.is_sharded and self.micro_batches > 1 and not self.whole_gradients

    @property
    def rows(self) -> int:
        """The number of rows of the batch."""
        return self.batch.rows or 0

    @property
    def rows_of_update(self) -> int:
        """Rows of an update over all devices and ranks, whose outputs a loss with ``whole=True``
        needs.
        """
        return (self.update_rows or self.rows) * self.processes

    @property
    def processes(self) -> int:
        """The number of processes, each with rows of its own: ranks, or one."""
        return self.devices // self.layout.devices_per_process(self.devices)

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
