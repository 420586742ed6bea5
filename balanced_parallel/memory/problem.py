"""A problem, and the request to trace one update of it, both as data.

::

    Problem    module, criterion and batch, as a user gives them
    Request    the same for one update: with its optimizer, its layout over devices, and its savings

``trace/layouts.py`` has a class for each layout, which runs such an update on fake devices.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from ..runtime import values
from ..strategies.tracing import TracedBatch
from .devices import DeviceKind
from .trace.values import is_small

LossFunction = Callable[..., Tensor]  # a module or a function
# Classes of trace/layouts.py, which know the engine. What traces any program does not.
Layout = Any
OptimizerMaker = Any


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


@dataclass(frozen=True, kw_only=True)
class Request:
    """One update of a problem to trace."""

    module: nn.Module
    criterion: LossFunction
    batch: TracedBatch
    scalar: float | None
    optimizer: OptimizerMaker
    precision: values.PrecisionName
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
    stack: Any = None  # the equal blocks of the module, if they were looked for
    # A trace has so many of a stack of equal blocks; None for all.
    blocks: tuple[Any, int] | None = None

    @property
    def reduces_each(self) -> bool:
        """True if several micro-batches all reduce their gradients. One that adds to the gradients
        of the update before is like the last of them.
        """
        return self.layout.is_sharded and self.micro_batches > 1 and not self.whole_gradients

    @property
    def traced_micro_batches(self) -> int:
        """The micro-batches of an update in a trace: a first, one that adds, one that reduces. More
        of them need no more memory.
        """
        return 1 if self.reduces_each else min(self.micro_batches, 3)

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
        return self.devices if self.layout.is_distributed else 1

    @property
    def row_step(self) -> int:
        """Numbers of rows are rounded up to a multiple of this, so that all devices have as many."""
        return 1 if self.split is not None or self.layout.is_distributed else self.devices

    def round_up(self, rows: int) -> int:
        """Returns the next multiple of :attr:`row_step`."""
        return -(-rows // self.row_step) * self.row_step

    @property
    def traced_devices(self) -> list[int]:
        """The traced device that stands for each of the devices."""
        return [0] * self.devices if self.layout.is_distributed else list(range(self.devices))
