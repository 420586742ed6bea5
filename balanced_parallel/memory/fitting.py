"""``memory.fit``: the most rows of a micro-batch with which an existing step fits its devices.

If not one row fits, the error names the largest holders of memory, and the saving that would help most.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..batch.plan import count_micro_batches, split_sizes
from ..replicas.model import DataParallelModel
from ..runtime.collectives import max_over_ranks
from ..runtime.devices import free_bytes
from ..runtime.values import format_bytes, parse_each
from ..training.step import TrainStep
from .candidates import SCALARS
from .estimation import bytes_in_use, kind_of, lines_of, make_report, report_of, request_of_step
from .lengths import LengthTraces, trace_lengths, with_length
from .lines import Lines
from .remedies import SAVINGS
from .report import Holder, MemoryReport, trace_exactly
from .trace.layouts import Request, is_coupled
from .trace.tracer import Trace, try_traces

__all__: list[str] = []


def fit(
    step: TrainStep,
    inputs: Any,
    targets: Any,
    *,
    capacity: int | str | Sequence[int | str] | None = None,
    lengths: tuple[int, int] | None = None,
    trim: int = 1,
) -> MemoryReport:
    """Sets ``step.micro_batch_size`` to the most rows per device that fit in one forward, before the first step runs.

    One update is traced as by :func:`estimate`: with the model, the criterion, the optimizers with their settings and state, the
    precision, the devices and the split of the step. A batch that fits at once runs in one micro-batch. Nothing else of the step
    changes, and nothing is allocated on its devices. Under torchrun every rank calls it, and all get the smallest result.

    Args:
        step: with a :class:`DataParallelModel`, or the model of :func:`parallelize`.
        inputs, targets: an effective batch, as for the step; meta tensors suffice.
        capacity: bytes or text such as ``"24GiB"``, for each device or one for all. ``None`` is the memory that is free now, and
            that of the step's own tensors. For the CPU it must be given.
        lengths: the shortest and the longest row to come, with ``cut=ByCost(...)``. Sets ``step.micro_batch_cost`` in place of
            ``step.micro_batch_size``: the largest budget such that every shard with ``rows x longest`` within it fits.
        trim: the dimension of the lengths, that of all tensors with the batch's length there.

    Returns:
        The report of an update with these micro-batches. With lengths, micro-batches are as many of the longest rows as fit.

    Raises:
        ValueError: not one row fits; the message names the largest holders, and the saving that would help most. Or the model is
            on the CPU and ``capacity`` is not given, or :func:`estimate` refuses the model.

    Example:
        >>> model = DataParallelModel(torch.nn.Linear(256, 256), ["cpu"])
        >>> criterion = DataParallelCriterion(torch.nn.MSELoss())
        >>> step = TrainStep(model, criterion, torch.optim.AdamW(model.parameters()))
        >>> report = fit(step, torch.zeros(4096, 256), torch.zeros(4096, 256), capacity="4MiB")
        >>> step.micro_batch_size, report.micro_batches, report.peak[0] <= 4 * 2**20
        (765, 6, True)
    """
    _check_unit(step, lengths)
    request = request_of_step(step, inputs, targets)
    limits = _limits(step, capacity, request)
    if lengths is not None:
        return _fit_cost(step, request, limits, trace_lengths(dataclasses.replace(request, micro_batches=2), trim, lengths))
    shares = request.split or request.layout.devices_per_process(request.devices)
    traced = request.layout.traced_devices(request.devices)
    at_once = trace_exactly(request, request.rows)
    if all(at_once.reserved(traced[i], None, limit) is not None for i, limit in enumerate(limits)):
        rows, lines = max(split_sizes(request.rows, shares)), at_once
    else:
        several = dataclasses.replace(request, micro_batches=2)
        coupled = is_coupled(request.criterion)  # takes two passes, with all outputs, for two micro-batches and more
        half = -(-request.rows // (8 if coupled else 2) // request.row_step) * request.row_step
        exact, lines = lines_of(several, half)
        if coupled:
            most = _most_of(several, lines, limits, request.rows // 2)
        else:
            most = make_report(several, half, exact, None, lines).largest(limits) if min(limits) > 0 else 0
        rows = _per_device(most, shares)
    if not isinstance(step.model, DataParallelModel):
        rows = -max_over_ranks(-rows)
    if rows == 0:
        raise ValueError(f"not one row fits: {explain(request, limits)}")
    step.micro_batch_size = rows
    count = count_micro_batches(request.rows, rows, shares)
    request, rows = dataclasses.replace(request, micro_batches=count), -(-request.rows // count)
    if count == 1 and lines is at_once:
        return make_report(request, rows, lines, None, lines)
    if request.split or not lines.is_affine:
        return report_of(request, rows)
    asked = -(-rows // request.row_step) * request.row_step
    return make_report(request, rows, lines, [asked] * request.devices, lines)


def _fit_cost(step: TrainStep, request: Request, limits: list[int], traces: LengthTraces) -> MemoryReport:
    """Sets ``step.micro_batch_cost`` to the largest budget that fits."""
    budget = traces.largest_cost(limits) if min(limits) > 0 else 0
    if not isinstance(step.model, DataParallelModel):
        budget = -max_over_ranks(-budget)
    longest = with_length(request, traces.dim, traces.longest)
    if budget == 0:
        raise ValueError(f"not one row of {traces.longest} fits: {explain(longest, limits)}")
    step.micro_batch_cost = budget
    rows = budget // traces.longest * request.row_step
    lines = traces.lines[1]
    report = make_report(dataclasses.replace(longest, micro_batches=2), rows, lines, [rows] * request.devices, lines)
    return dataclasses.replace(report, micro_batch_cost=budget, _lengths=traces)


def _check_unit(step: TrainStep, lengths: tuple[int, int] | None) -> None:
    """Raises an error if the step limits its micro-batches by the other unit."""
    try:
        if lengths is None:
            step.micro_batch_size = step.micro_batch_size
        else:
            step.micro_batch_cost = step.micro_batch_cost
    except ValueError as error:
        what = "lengths=(shortest, longest)" if lengths is None else "TrainStep(cut=ByCost(...)), without micro_batch_size"
        raise ValueError(f"{error}: give {what}") from error


def _limits(step: TrainStep, capacity: int | str | Sequence[int | str] | None, request: Request) -> list[int]:
    """Returns the bytes that each replica may use, or each rank. Replicas on one device have equal parts of it."""
    devices = list(dict.fromkeys(step.model.devices))
    if capacity is not None:
        total = dict(zip(devices, parse_each(capacity, len(devices)), strict=True))
    else:
        if any(device.type == "cpu" for device in devices):
            raise ValueError("the model is on the CPU, which other programs use too: give capacity=, such as '16GiB'")
        used = bytes_in_use(step)
        total = {device: free_bytes(device) + used[device] + kind_of(device).context for device in devices}
    norms = 0 if step.max_grad_norm is None else request.kind.rounds_to * len(list(request.module.parameters()))
    limits = [total[device] // step.model.devices.count(device) - SCALARS - norms for device in step.model.devices]
    return limits * (request.devices // len(limits))


def _most_of(request: Request, lines: Lines, limits: Sequence[int], rows: int) -> int:
    """Returns the most rows of a micro-batch that fit, at most ``rows``."""
    traced = request.layout.traced_devices(request.devices)
    low, high = 0, rows + 1
    while high - low > 1:
        middle = (low + high) // 2
        traced_lines, at = (lines, middle) if lines.is_affine else (trace_exactly(request, middle), None)
        fits = all(traced_lines.reserved(traced[i], at, limit) is not None for i, limit in enumerate(limits))
        low, high = (middle, high) if fits else (low, middle)
    return low


def _per_device(rows: int, shares: int | Sequence[float]) -> int:
    """Returns the largest ``micro_batch_size`` with which no micro-batch has more than ``rows`` rows over all devices."""
    if isinstance(shares, int):
        return rows // shares
    most = max(split_sizes(rows, shares))
    return most - (max(split_sizes(rows + 1, shares)) <= most)


def explain(request: Request, limits: Sequence[int]) -> str:
    """Returns what one row per device needs, the largest holders of it, and the saving that would help most.

    Args:
        limits: bytes of each device.
    """
    rows = request.row_step
    plain = trace_exactly(request, rows)
    options = {each.name: changed for each in SAVINGS if each.result == "exact" and (changed := each.apply(request))}
    traces = dict(zip(options, try_traces([(option, rows) for option in options.values()]), strict=True))
    report = make_report(request, rows, plain, None, plain)
    worst = max(range(len(limits)), key=lambda i: report.reserved[i] - limits[i])
    device = request.layout.traced_devices(request.devices)[worst]
    holders = ", ".join(f"{format_bytes(holder.bytes)} of {holder.part}{_place(holder)}" for holder in report.where[worst][:3])
    saved = {
        name: plain.peak(device) - Lines.exact(trace, request).peak(device)
        for name, trace in traces.items()
        if isinstance(trace, Trace)  # else the model does not take the saving
    }
    best = max(saved, key=lambda name: saved[name], default="")
    advice = f"{best} would save most, {format_bytes(saved[best])}" if saved.get(best, 0) > 0 else "no known saving would help"
    return (
        f"one row per device needs {format_bytes(report.reserved[worst])} of device {worst}, expected at most "
        f"{format_bytes(limits[worst])}. The largest holders are {holders}; {advice}"
    )


def _place(holder: Holder) -> str:
    where = ", ".join(filter(None, (holder.module, holder.line)))
    return f" ({where})" if where else ""
