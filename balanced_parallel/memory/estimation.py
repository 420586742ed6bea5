"""``memory.estimate``: what an update needs on each device, before there is a device."""

import collections
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .device_specs import DeviceKind
from .errors import UnknownMemory
from .extrapolation import Lines
from .operators.rnn import SOURCE as RECURRENCE
from .report import PARTS, Holder, MemoryReport
from .request import Request
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
    device_kind: str | None = None,
    split: Sequence[float] | None = None,
    dim: int = 0,
    scalar: int | float | bool | None = None,
) -> MemoryReport:
    """Runs two updates on tensors without memory, in a process of their own, and counts. Nothing of the caller's is touched.

    The update is ``criterion(module(inputs), targets).backward()`` and ``optimizer.step()``; inputs that are a tuple are spread
    over the module's arguments, a mapping over its keyword arguments; targets that are a tuple over the criterion's.

    Args:
        module: on any device, ``meta`` included.
        criterion: a module or a function of output and targets.
        inputs, targets: real, meta or fake tensors with rows along ``dim``: what a process passes to one step.
        optimizer: a class of ``torch.optim``, a ``functools.partial`` of one, or a function of the parameters.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``: autocast, as in :class:`TrainStep`.
        micro_batch_size: rows per device in one forward; ``None`` is all of them.
        accumulate: how many times such a batch is added before the update.
        layout: ``"single"``, the plain program on one device; ``"replicas"``, :class:`DataParallelModel`; ``"ddp"`` and
            ``"fsdp"``, one rank of several, with ``inputs`` of its own; ``"torch_data_parallel"``, ``nn.DataParallel``.
        devices: how many, or how many ranks.
        balanced_optimizer: :class:`BalancedOptimizer`, which under ddp is torch's ZeroRedundancyOptimizer.
        checkpoint: ``"blocks"`` for activation checkpointing of the module's repeated blocks, or names of submodules.
        device_kind: ``"h200"``, ``"a100"``, ..., ``"cpu"``, or ``"sim"`` for what :func:`simulate` counts; ``None`` is this
            machine's accelerator, else ``"h200"``.
        split: the weight of each device, as in :class:`DataParallelModel`.
        dim: the dimension of the rows in inputs, outputs and targets.
        scalar: what the module finds where it reads a value of a tensor (``.item()``, ``if``); without it that is an error.

    Raises:
        ValueError: a setting out of its range; inputs without rows; an operator whose memory depends on values.
        BaseException: what the module, the criterion or the optimizer raise on these shapes.
    """
    request = Request.of(
        module,
        criterion,
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
        device_kind=device_kind,
        split=split,
        dim=dim,
        scalar=scalar,
    )
    return report_of(request, request.rows_per_micro_batch)


def report_of(request: Request, rows: int) -> MemoryReport:
    """Traces micro-batches of ``rows`` rows, and of twice as many."""
    step = request.row_step
    base = -(-max(rows, 2) // step) * step  # one row is a special case for torch: broadcasting, strides
    traces, why = _trace_lines(request, sorted({rows, base, 2 * base}))
    mine = Lines(traces[0], None, request.kind, request.devices, 1)
    lines = Lines(traces[-2], traces[-1], request.kind, request.devices, step, request.split) if len(traces) > 1 else mine
    if not lines.is_affine:
        warnings.warn(f"{why}, so memory is no line in the rows: at() and largest() trace each number of them", stacklevel=3)
    return make_report(request, rows, mine, None, lines)


def make_report(request: Request, rows: int, mine: Lines, asked: Sequence[int] | None, lines: Lines) -> MemoryReport:
    """The report on micro-batches of ``rows`` rows.

    Args:
        mine, asked: lines, and the rows to read them at for each device; ``None`` reads the rows that were traced.
        lines: for other numbers of rows.
    """
    traced = request.layout.traced_devices(request.devices)
    read = [(i, None if asked is None else asked[i]) for i in traced]

    @functools.cache
    def trace_at(count: int) -> Lines:
        return Lines(run_traces([(request, count)])[0], None, request.kind, request.devices, 1)

    def peak_at(count: int) -> tuple[int, ...]:
        # one row broadcasts, and has other strides; oneDNN rounds the workspace of a recurrent layer up in its own way
        special = count == 1 or not lines.is_affine or _has(mine.first, "mkldnn_rnn_layer")
        return tuple(trace_at(count).peak(i) if special else lines.peak(i, count) for i in traced)

    def most_rows(limits: Sequence[int]) -> int | None:
        if not lines.is_affine:
            return 2**20
        found = [lines.most_rows(i, limit) for i, limit in zip(traced, limits, strict=True)]
        return min((most for most in found if most is not None), default=None)

    def fits(count: int, limits: Sequence[int]) -> bool:
        known, at = (lines, count) if lines.is_affine else (trace_at(count), None)
        asking = dict.fromkeys(zip(traced, limits, strict=True))
        return all(known.reserved(i, at, limit) is not None for i, limit in asking)

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
        assumed=_assumed(mine.first, request.kind),
        timeline=tuple(tuple(mine.levels(i, at)[mine.start :].tolist()) for i, at in read),
        where=tuple(_holders(mine, i, at) for i, at in read),
        phases={name: mine.first.marks[name] - mine.start for name in ("backward", "update")},
        flops=mine.flops(None if asked is None else rows) * request.micro_batches // mine.first.micro_batches,
        affine=lines.is_affine,
        _peak_at=peak_at,
        _traced_at=lambda count: tuple(trace_at(count).peak(i) for i in traced),
        _most_rows=most_rows,
        _reserved_at=fits,
    )


def _assumed(trace: Trace, kind: DeviceKind) -> dict[str, str]:
    if not kind.context:
        return {}
    return kind.sources() | ({"recurrent layers": RECURRENCE} if _has(trace, "recurrence") else {})


def _has(trace: Trace, operator: str) -> bool:
    return any(operator in name for name in trace.operators)


def _trace_lines(request: Request, counts: Sequence[int]) -> tuple[list[Trace], str]:
    """A trace for each of ``counts``; where the module does not take the others, only for the first. And what to say if their
    memory is no line."""
    try:
        return run_traces([(request, count) for count in counts]), "twice the rows ran other operators"
    except UnknownMemory:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a module raises
        alone = run_traces([(request, counts[0])])  # raises it again, if it is not for the number of rows
        return alone, f"with {counts[-1]} rows the module raises {type(error).__name__}: {error}"


def _parts(lines: Lines, device: int, rows: int | None) -> dict[str, int]:
    parts = dict.fromkeys(PARTS, 0)
    unit = lines.kind.rounds_to
    event, _, scratch = lines.summit(device, rows)
    for block in lines.blocks_at(device, event, rows):
        parts[block.kind] += -(-block.size // unit) * unit
    return parts | {"workspace": lines.kind.workspace + scratch, "context": lines.kind.context}


def _holders(lines: Lines, device: int, rows: int | None, most: int = 12) -> tuple[Holder, ...]:
    held: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for block in lines.blocks_at(device, lines.summit(device, rows)[0], rows):
        held[block.kind, block.module, block.line or block.operator] += block.size
    return tuple(Holder(count, *key) for key, count in held.most_common(most))
