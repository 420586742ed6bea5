"""``memory.fit``: the most rows of a micro-batch with which an existing step fits its devices."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..batch.microbatches import count_micro_batches
from ..batch.splits import split_sizes
from ..replicas.model import DataParallelModel
from ..runtime.byte_sizes import format_bytes, parse_each
from ..runtime.collectives import max_over_ranks
from ..runtime.devices import free_bytes
from ..training.step import TrainStep
from .candidates import SCALARS
from .estimation import report_of
from .remedies import best_remedy
from .report import Holder, MemoryReport
from .request import Request
from .step_request import bytes_in_use, kind_of, request_of_step

__all__: list[str] = []


def fit(step: TrainStep, inputs: Any, targets: Any, *, capacity: int | str | Sequence[int | str] | None = None) -> MemoryReport:
    """Sets ``step.micro_batch_size`` to the most rows per device that fit in one forward, before the first step runs.

    One update is traced as by :func:`estimate`: with the model, the criterion, the optimizers with their settings and state, the
    precision, the devices and the split of the step. A batch that fits at once runs in one micro-batch. Nothing else of the step
    changes, and nothing is allocated on its devices. Under torchrun every rank calls it, and all get the smallest result.

    Args:
        step: with a :class:`DataParallelModel`, or the model of :func:`parallelize`.
        inputs, targets: an effective batch, as for the step; meta tensors suffice.
        capacity: bytes or text such as ``"24GiB"``, for each device or one for all. ``None`` is the memory that is free now, and
            that of the step's own tensors. The CPU has none of its own, so that its capacity must be given.

    Returns:
        The report of an update with these micro-batches.

    Raises:
        ValueError: not one row fits; the message names the largest holders, and the saving that would help most. Or the model is
            on the CPU and ``capacity`` is not given, or :func:`estimate` refuses the model.

    Example:
        >>> model = DataParallelModel(torch.nn.Linear(256, 256), ["cpu"])
        >>> criterion = DataParallelCriterion(torch.nn.MSELoss())
        >>> step = TrainStep(model, criterion, torch.optim.AdamW(model.parameters()))
        >>> report = fit(step, torch.zeros(4096, 256), torch.zeros(4096, 256), capacity="4MiB")
        >>> step.micro_batch_size, report.micro_batches, report.peak[0] <= 4 * 2**20
        (744, 6, True)
    """
    request = request_of_step(step, inputs, targets)
    limits = _limits(step, capacity, request)
    shares = request.split or request.layout.devices_per_process(request.devices)
    report = report_of(request, request.rows)
    if all(size <= limit for size, limit in zip(report.reserved, limits, strict=True)):
        rows = max(split_sizes(request.rows, shares))
    else:
        report = report_of(dataclasses.replace(request, micro_batches=2), -(-request.rows // 2))
        rows = _per_device(report.largest(limits) if min(limits) > 0 else 0, shares)
    if not isinstance(step.model, DataParallelModel):
        rows = -max_over_ranks(-rows)
    if rows == 0:
        raise ValueError(_explain(request, limits))
    step.micro_batch_size = rows
    count = count_micro_batches(request.rows, rows, shares)
    if count != report.micro_batches:
        report = report_of(dataclasses.replace(request, micro_batches=count), -(-request.rows // count))
    return report


def _limits(step: TrainStep, capacity: int | str | Sequence[int | str] | None, request: Request) -> tuple[int, ...]:
    """Returns the bytes that the tensors of a trace may use on each device."""
    devices = list(dict.fromkeys(step.model.devices))
    if capacity is not None:
        limits = list(parse_each(capacity, len(devices)))
    else:
        if any(device.type == "cpu" for device in devices):
            raise ValueError("the model is on the CPU, which other programs use too: give capacity=, such as '16GiB'")
        used = bytes_in_use(step)
        limits = [free_bytes(device) + used[device] + kind_of(device).context for device in devices]
    clipping = 0 if step.max_grad_norm is None else request.kind.rounds_to * len(list(step.model.parameters()))  # norms
    limits = [limit - SCALARS - clipping for limit in limits]
    return tuple(limits * (len(request.traced_devices) // len(limits)))


def _per_device(rows: int, shares: int | Sequence[float]) -> int:
    """Returns the largest ``micro_batch_size`` with which no micro-batch has more than ``rows`` rows over all devices."""
    if isinstance(shares, int):
        return rows // shares
    most = max(split_sizes(rows, shares))
    return most - (max(split_sizes(rows + 1, shares)) <= most)


def _explain(request: Request, limits: Sequence[int]) -> str:
    """Returns the message for a step of which not one row fits: the largest holders, and the best saving."""
    report = report_of(request, request.row_step)
    worst = max(range(len(limits)), key=lambda i: report.reserved[i] - limits[i])
    holders = ", ".join(f"{format_bytes(one.bytes)} of {one.part}{_place(one)}" for one in report.where[worst][:3])
    remedy = best_remedy(request)
    return (
        f"not one row fits: one row per device needs {format_bytes(report.reserved[worst])} on device {worst}, which has "
        f"{format_bytes(limits[worst])}. The largest holders are {holders}; "
        + ("no known saving helps" if remedy is None else f"{remedy[0]} would save most: {format_bytes(remedy[1])}")
    )


def _place(holder: Holder) -> str:
    where = ", ".join(filter(None, (holder.module, holder.line)))
    return f" ({where})" if where else ""
