"""``memory.estimate``: the memory of an update on each device, predicted without a device."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .device_specs import DeviceKind
from .errors import UnknownMemory
from .extrapolation import Lines
from .holders import holders_of
from .length_traces import trace_lengths
from .operators.rnn import SOURCE as RECURRENCE
from .other_batches import OtherBatches, runs
from .report import PARTS, MemoryReport
from .request import make_request
from .trace.coupled_update import is_coupled, plain_criterion
from .trace.traced_request import Request
from .trace.tracer import Trace, run_traces

__all__: list[str] = []


def estimate(
    module: torch.nn.Module,
    criterion: Callable[..., Any],
    inputs: Any,
    targets: Any,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    precision: str = "fp32",
    micro_batch_size: int | None = None,
    accumulate: int = 1,
    layout: str = "single",
    devices: int = 1,
    balanced_optimizer: bool = False,
    checkpoint: str | Iterable[str] | None = None,
    savings: Iterable[str] = (),
    device_kind: str | None = None,
    split: Sequence[float] | None = None,
    dim: int = 0,
    scalar: int | float | bool | None = None,
    lengths: tuple[int, int] | None = None,
    trim: int = 1,
) -> MemoryReport:
    """Predicts the memory of an update on each device.

    Two updates run on fake tensors, in processes of their own, and every allocation is counted. Objects of the caller do not
    change. The update is ``criterion(module(inputs), targets).backward()`` and ``optimizer.step()``. A tuple of inputs is spread
    over the arguments of the module, a mapping over its keyword arguments, and a tuple of targets over the arguments of the
    criterion after the output.

    Args:
        module: on any device, ``meta`` included.
        criterion: a module or a function of output and targets; a loss of all rows is ``DataParallelCriterion(..., whole=True)``.
        inputs, targets: real, meta or fake tensors with rows along ``dim``: the batch of one process.
        optimizer: a class of ``torch.optim``, a ``functools.partial`` of one, or a function of the parameters.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``: autocast, as in :class:`TrainStep`.
        micro_batch_size: rows per device in one forward. ``None`` is a device's whole share.
        accumulate: number of such batches per update.
        layout: ``"single"``, the plain program on one device; ``"replicas"``, :class:`DataParallelModel`; ``"ddp"`` and
            ``"fsdp"``, one rank of several, with ``inputs`` of its own; ``"torch_data_parallel"``, ``nn.DataParallel``.
        devices: number of devices, or of ranks.
        balanced_optimizer: uses :class:`BalancedOptimizer`, which under ddp is torch's ``ZeroRedundancyOptimizer``.
        checkpoint: ``"blocks"`` for activation checkpointing of the module's repeated blocks, or names of submodules.
        savings: names of functions of ``balanced_parallel.savings``, such as ``["offload_activations"]``, with their default
            settings. They are applied to the copies that are traced.
        device_kind: ``"h200"``, ``"a100"``, ..., ``"cpu"``, or ``"sim"`` for the devices of :func:`simulate`. ``None`` is the
            accelerator of this machine, else ``"h200"``.
        split: the weight of each device, as in :class:`DataParallelModel`.
        dim: the dimension of the rows in inputs, outputs and targets.
        scalar: the result where the module reads a value of a tensor (``.item()``, ``if``). Without it such a read is an error.
        lengths: the shortest and the longest row, for reports of other lengths: ``report.at(rows, length)`` and
            ``report.largest_cost(capacity)``. Takes six more traces.
        trim: the dimension of the lengths, as in :class:`TrainStep`: that of all tensors with the batch's length there.

    Raises:
        ValueError: a setting is out of its range; the inputs have no rows; the memory of an operator depends on values.
        BaseException: the module, the criterion or the optimizer raised it on these shapes.

    Example:
        >>> net = torch.nn.Linear(256, 10)
        >>> batch = torch.zeros(8, 256), torch.zeros(8, dtype=torch.int64)
        >>> report = estimate(net, torch.nn.CrossEntropyLoss(), *batch, device_kind="cpu")
        >>> report.parts[0]["parameters"], report.parts[0]["optimizer state"]
        (10280, 20568)
    """
    request = make_request(
        module,
        plain_criterion(criterion),
        inputs,
        targets,
        optimizer=optimizer,
        precision=precision,
        micro_batch_size=micro_batch_size,
        accumulate=accumulate,
        layout=layout,
        devices=devices,
        balanced_optimizer=balanced_optimizer,
        checkpoint=checkpoint,
        savings=savings,
        device_kind=device_kind,
        split=split,
        dim=dim,
        scalar=scalar,
    )
    if lengths is None:
        return report_of(request, request.rows_per_micro_batch)
    traces = trace_lengths(request, trim, lengths)
    return dataclasses.replace(report_of(request, request.rows_per_micro_batch), _lengths=traces)


def report_of(request: Request, rows: int) -> MemoryReport:
    """Traces micro-batches of ``rows`` rows, and of twice as many, and makes the report."""
    mine, lines = lines_of(request, rows)
    return make_report(request, rows, mine, None, lines)


def lines_of(request: Request, rows: int) -> tuple[Lines, Lines]:
    """Traces micro-batches of ``rows`` rows, and of twice as many. Returns the lines of this number of rows, and of others."""
    step = request.row_step
    base = -(-max(rows, 2) // step) * step  # one row is a special case for torch: broadcasting, strides
    traces, reason = _trace_lines(request, sorted({rows, base, 2 * base}))
    mine = Lines.exact(traces[0], request)
    lines = Lines(traces[-2], traces[-1], request.kind, request.devices, step, request.split) if len(traces) > 1 else mine
    if not lines.is_affine:
        warnings.warn(
            f"{reason}, so memory is not affine in the rows: at() and largest() trace each number of rows", stacklevel=4
        )
    return mine, lines


def make_report(request: Request, rows: int, mine: Lines, asked: Sequence[int] | None, lines: Lines) -> MemoryReport:
    """Makes the report of micro-batches of ``rows`` rows.

    Args:
        mine: the lines of this number of rows.
        asked: for each device, the rows at which to read ``mine``. ``None`` reads at the rows that were traced.
        lines: for other numbers of rows.
    """
    traced = request.layout.traced_devices(request.devices)
    read = [(i, None if asked is None else asked[i]) for i in traced]

    return MemoryReport(
        layout=request.layout.name,
        device_kind=request.kind.name,
        precision=request.precision,
        devices=request.devices,
        rows=rows,
        micro_batches=request.micro_batches,
        peak=tuple(mine.peak(i, at) for i, at in read),
        reserved=tuple(mine.reserved(i, at) or 0 for i, at in read),
        parts=tuple(_parts(mine, i, at) for i, at in read),
        assumed=_assumed(mine, request.kind),
        timeline=tuple(tuple(mine.levels(i, at)[mine.start :].tolist()) for i, at in read),
        where=tuple(holders_of(mine, i, at) for i, at in read),
        phases={name: mine.first.marks[name] - mine.start for name in ("backward", "update")},
        flops=mine.flops(None if asked is None else rows) * request.micro_batches // mine.first.micro_batches,
        affine=lines.is_affine,
        _batches=OtherBatches(request, mine, read, lines),
    )


def _assumed(lines: Lines, kind: DeviceKind) -> dict[str, str]:
    if not kind.context:
        return {}
    return kind.sources() | ({"recurrent layers": RECURRENCE} if runs(lines, "recurrence") else {})


def _trace_lines(request: Request, counts: Sequence[int]) -> tuple[list[Trace], str]:
    """Returns a trace for each of ``counts``, and the reason for a warning if they do not make a line.

    If the module refuses the larger numbers of rows, the only trace is that of the first."""
    if is_coupled(request.criterion) and request.micro_batches == 1:
        return run_traces([(request, counts[0])]), "the loss of all rows may need memory for each pair of them"
    try:
        return run_traces([(request, count) for count in counts]), "twice the rows ran other operators"
    except UnknownMemory:
        raise
    except Exception as error:  # noqa: BLE001 - a module may raise anything
        first = run_traces([(request, counts[0])])  # raises again if the number of rows is not the cause
        return first, f"with {counts[-1]} rows the module raises {type(error).__name__}: {error}"


def _parts(lines: Lines, device: int, rows: int | None) -> dict[str, int]:
    parts = dict.fromkeys(PARTS, 0)
    unit = lines.kind.rounds_to
    event, _, scratch = lines.summit(device, rows)
    for block in lines.blocks_at(device, event, rows):
        parts[block.kind] += -(-block.size // unit) * unit
    return parts | {"workspace": lines.kind.workspace + scratch, "context": lines.kind.context}
