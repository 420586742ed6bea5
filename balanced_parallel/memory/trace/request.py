"""The input and the result of one trace."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...batch.row_marks import Arguments
from ..device_specs import DeviceKind
from ..operators.workspaces import Call
from .allocations import Block
from .optimizer_choice import OptimizerChoice

if TYPE_CHECKING:
    from .strategies import Layout

__all__: list[str] = []


@dataclass(frozen=True)
class Request:
    """What is to be traced: micro-batches of some rows, ``micro_batches`` of them, given as a batch of ``rows`` rows."""

    module: Any
    criterion: Any
    inputs: Arguments
    targets: tuple[Any, ...]
    rows: int
    optimizer: OptimizerChoice
    precision: str
    micro_batches: int
    batches: int  # the batch is given so many times, each cut into its part of the micro-batches
    layout: "type[Layout]"
    devices: int
    balanced: bool
    blocks: tuple[str, ...]  # to be checkpointed
    split: tuple[float, ...] | None
    kind: DeviceKind
    dim: int = 0  # of the rows
    scalar: int | float | bool | None = None  # what the model finds where it reads a value


@dataclass(frozen=True)
class Trace:
    """What happened: ``events`` as :class:`Count` has them, the second update from ``marks["second"]`` on."""

    rows: int
    micro_batches: int
    blocks: list[Block]
    events: list[int]
    operators: list[str]
    marks: dict[str, int]
    flops: int
    calls: list[Call]
