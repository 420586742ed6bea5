"""``memory.fit``: the most rows of a micro-batch with which an existing step fits its devices; and
the bytes that savings save.

Each saving is traced by itself, for the command ``tricks``, and for the advice in the error of a
row that does not fit.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import BalancedOptimizer, DataParallelModel, TrainStep
from ..batch.plan import count_micro_batches, split_sizes
from ..runtime import values
from ..runtime.collectives import max_over_ranks, world_size
from ..runtime.devices import free_bytes
from ..runtime.torch_private import is_sharded
from ..savings.offloading import is_offloaded
from ..strategies.tracing import TracedBatch
from .candidates import SCALARS
from .estimation import lines_of, make_report, make_request
from .lines import Lines, most_that_fit, trace_exactly
from .problem import Problem, Request
from .report import Capacity, MemoryReport, parse_each
from .savings import ON_HOST, SHARDS, PlannedSaving, savings_of, with_savings
from .trace.allocations import Trace
from .trace.layouts import ExistingOptimizers, inner_optimizers
from .trace.private import storage_id
from .trace.tracer import copies_of, gradients_of, groups_of, states_of, try_traces


@values.naming_arguments
def fit(
    step: TrainStep,
    inputs: object,
    targets: object,
    *,
    capacity: Capacity | None = None,
) -> MemoryReport:
    """Sets ``step.micro_batch_size`` to the most rows per device that fit in one forward, before
    the first step runs.

    One update is traced as by :func:`estimate`: with the model, the criterion, the optimizers with
    their settings and state, the precision, the devices and the split of the step. A batch that
    fits at once runs in one micro-batch. Nothing else of the step changes, and nothing is allocated
    on its devices. What ``surround=`` of the step saves is not counted. Under torchrun every rank
    calls it, and all get the smallest result.

    Args:
        step: with a :class:`DataParallelModel`, or the model of :func:`parallelize`.
        inputs, targets: an effective batch, as for the step; meta tensors suffice.
        capacity: bytes or text such as ``"24GiB"``, for each device or one for all. ``None`` is the
            memory that is free now, and that of the step's own tensors. For the CPU it must be
            given.

    Returns:
        The report of an update with these micro-batches.

    Raises:
        ValueError: not one row fits; the message names the largest holders, and the saving that
            would help most. Or the model is on the CPU and ``capacity`` is not given, or
            :func:`estimate` refuses the model.

    Example:
        >>> model = DataParallelModel(torch.nn.Linear(256, 256), ["cpu"])
        >>> criterion = DataParallelCriterion(torch.nn.MSELoss())
        >>> step = TrainStep(model, criterion, torch.optim.AdamW(model.parameters()))
        >>> report = fit(step, torch.zeros(4096, 256), torch.zeros(4096, 256), capacity="4MiB")
        >>> step.micro_batch_size, report.micro_batches, report.nvidia_smi[0] <= 4 * 2**20
        (765, 6, True)
    """
    values.check_type("step", step, TrainStep, "a TrainStep: fit(step, inputs, targets)")
    if step.cut is not None and step.micro_batch_size is None:
        raise ValueError(
            "the step is limited by cost, expected a limit of rows: micro_batch_size='auto' finds a cost that fits as it trains"
        )
    request = request_of_step(step, inputs, targets)
    step.micro_batch_size, report = fit_request(request, _limits(step, capacity, request))
    return report


def fit_request(request: Request, limits: Sequence[int]) -> tuple[int, MemoryReport]:
    """Returns the most rows per device that fit in one forward, and the report of an update with
    them.
    """
    shares = request.split or request.row_step
    lines = trace_exactly(request, request.rows)
    if lines.fit(limits, request.rows):
        rows = max(split_sizes(request.rows, shares))
    else:
        most, lines = _most_rows(dataclasses.replace(request, micro_batches=2), limits)
        # No micro-batch may have more than so many rows over all devices.
        rows = max(split_sizes(most, shares))
        rows -= max(split_sizes(most + 1, shares)) <= rows
    if request.layout.is_distributed:
        rows = -max_over_ranks(-rows)  # the smallest of all ranks
    if rows == 0:
        raise ValueError(f"not one row fits: {explain(request, limits)}")
    count = count_micro_batches(request.rows, rows, shares)
    size = rows
    request, rows = dataclasses.replace(request, micro_batches=count), -(-request.rows // count)
    shows_rows = lines.first.rows == rows or (lines.is_affine and not request.split)
    return size, make_report(request, rows, lines if shows_rows else None)


def _most_rows(request: Request, limits: Sequence[int]) -> tuple[int, Lines]:
    """Returns the most rows of one of several micro-batches that fit, over all devices, and the
    lines that show it.
    """
    # A loss that couples rows takes two passes for several micro-batches, with all outputs.
    batches = lines_of(
        request, request.round_up(-(-request.rows // (8 if request.couples_rows else 2)))
    )
    if request.couples_rows:
        most = most_that_fit(lambda rows: batches.fits(rows, limits), request.rows // 2)
    else:
        most = batches.largest(limits) if min(limits) > 0 else 0
    return most, batches.lines


def _limits(step: TrainStep, capacity: Capacity | None, request: Request) -> list[int]:
    """Returns the bytes that each replica may use, or each rank.

    Replicas on one device have equal parts of it.
    """
    devices = list(dict.fromkeys(step.model.devices))
    if capacity is not None:
        total = dict(zip(devices, parse_each(capacity, len(devices)), strict=True))
    else:
        if any(device.type == "cpu" for device in devices):
            raise ValueError(
                "the model is on the CPU, which other programs use too: give capacity=, such as '16GiB'"
            )
        used = bytes_in_use(step, request.kind.rounds_to)
        total = {
            device: free_bytes(device) + used[device] + request.kind.context for device in devices
        }
    norms = 0
    if step.max_grad_norm is not None:
        norms = request.kind.rounds_to * len(list(request.module.parameters()))
    limits = [
        total[device] // step.model.devices.count(device) - SCALARS - norms
        for device in step.model.devices
    ]
    return limits * (request.devices // len(limits))


def explain(request: Request, limits: Sequence[int]) -> str:
    """Returns what one row per device needs, the largest holders of it, and the saving that would
    help most.
    """
    rows = request.row_step
    plain = trace_exactly(request, rows)
    report = make_report(request, rows, plain)
    worst = max(range(len(limits)), key=lambda i: report.nvidia_smi[i] - limits[i])
    holders = ", ".join(map(str, report.where[worst][:3]))
    savings = [saving for saving in savings_of("exact", "layout") if saving is not SHARDS]
    measured = saved_bytes(request, rows, max(report.allocated), savings)
    size, best = max(
        ((size, planned.saving.name) for planned, size in measured.items()), default=(0, "")
    )
    advice = (
        f"{best} would save most, {values.format_bytes(size)}"
        if size > 0
        else "no known saving would help"
    )
    return (
        f"one row per device needs {values.format_bytes(report.nvidia_smi[worst])} of device {worst}, expected at most "
        f"{values.format_bytes(limits[worst])}. The largest holders are {holders}; {advice}"
    )


def request_of_step(step: TrainStep, inputs: object, targets: object) -> Request:
    """Returns the request of one update of a step, with the whole batch in one micro-batch."""
    model: Any = step.model
    criterion = step.criterion
    is_local = isinstance(model, DataParallelModel)
    if any(map(is_sharded, model.parameters())):
        raise ValueError(
            "the model is sharded, and its parameters are parts on each rank: call memory.estimate(layout='fsdp') with the "
            "module before parallelize, and set step.micro_batch_size"
        )
    batch = TracedBatch.of(inputs, targets, model.dim, criterion.dim or 0)
    dim = criterion.dim_of_targets(batch.targets, model.out_dims)
    if criterion.kind.couples_rows and not model.out_dims == dim == model.dim:
        raise ValueError(
            f"the rows of the outputs are in dimension {model.out_dims!r}, those of inputs and targets in {model.dim} and {dim}: "
            "expected one dim= for all with a loss whose rows depend on each other, or memory.estimate and step.micro_batch_size"
        )
    optimizers = _optimizers(step)
    request = make_request(
        Problem(model.module, criterion, inputs, targets, model.dim),
        batch=batch,
        precision=next(
            (each.name for each in (model.precision, step.precision) if each.name != "fp32"), "fp32"
        ),
        layout="replicas" if is_local else "ddp",
        devices=len(model.devices) if is_local else world_size(),
        device_kind="cpu" if model.devices[0].type == "cpu" else None,
        balanced_optimizer=any(
            isinstance(optimizer, BalancedOptimizer) for optimizer in optimizers
        ),
        split=model.split,
    )
    return dataclasses.replace(
        request,
        criterion=criterion if is_local else request.criterion,
        optimizer=ExistingOptimizers(optimizers),
        savings=(ON_HOST.saving.name,) if all(map(is_offloaded, optimizers)) else (),
    )


def _optimizers(step: TrainStep) -> list[Optimizer]:
    optimizers = step.optimizer
    return [optimizers] if isinstance(optimizers, Optimizer) else [*optimizers]


def bytes_in_use(step: TrainStep, unit: int) -> Counter[torch.device]:
    """Returns the bytes of a step's tensors on each device, in multiples of a unit.

    They are parameters, copies, buffers, gradients and optimizer state.
    """
    parts: list[Any] = [step.model, step.criterion]
    optimizers = inner_optimizers(_optimizers(step))
    tensors = [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]
    for group in groups_of(optimizers):
        tensors += group["params"]
    replicas = [part.replicas for part in parts if getattr(part, "replicas", None) is not None]
    tensors += [
        *copies_of(replicas),
        *gradients_of(tensors, replicas, optimizers),
        *states_of(optimizers),
    ]
    storages = [each.untyped_storage() for each in tensors if isinstance(each, Tensor)]
    total = Counter[torch.device]()
    for storage in {storage_id(each): each for each in storages}.values():
        total[storage.device] += -(-storage.nbytes() // unit) * unit
    return total


def saved_bytes(
    request: Request,
    rows: int,
    peak: int,
    savings: Iterable[PlannedSaving],
) -> dict[PlannedSaving, int]:
    """Traces ``rows`` rows with each of ``savings`` that suits the request.

    Returns the bytes that each takes off ``peak``.
    """
    options = {saving: option for saving in savings if (option := with_savings(request, [saving]))}
    jobs = []
    for option in options.values():  # Each rank has a part of the rows.
        parts = option.micro_batches * option.processes // request.processes
        jobs.append((option, option.round_up(-(-rows * request.micro_batches // parts))))
    traces = try_traces(jobs)
    return {
        saving: peak - max(Lines(option, trace).allocated_by_device(trace.rows))
        for (saving, option), trace in zip(options.items(), traces, strict=True)
        if isinstance(trace, Trace)
    }
