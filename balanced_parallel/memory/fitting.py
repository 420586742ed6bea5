"""``memory.fit``: the most rows of a micro-batch with which an existing step fits its devices."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..batch.containers import leaves, map_leaves
from ..batch.plan import count_micro_batches, split_sizes
from ..loss.criterion import DataParallelCriterion
from ..optim.balanced import BalancedOptimizer
from ..replicas.model import DataParallelModel
from ..runtime.collectives import max_over_ranks, world_size
from ..runtime.devices import free_bytes
from ..runtime.torch_private import storage_id
from ..runtime.values import format_bytes, parse_each
from ..savings.optimizer_offloading import OFFLOAD_OPTIMIZER, is_offloaded
from ..savings.saving import savings_of
from ..savings.settings import SHARDED
from ..strategies.fsdp import ShardedModel
from ..training.step import TrainStep
from ..training.update import each_optimizer
from .candidates import BASE, SCALARS
from .devices import DeviceKind, find_kind
from .estimation import lines_of, make_report, make_request
from .lines import Lines, most_that_fit, trace_exactly
from .remedies import saved_bytes
from .report import Holder, MemoryReport, OtherBatches
from .trace.layouts import Request, copies_of, gradients_of, is_coupled, states_of
from .trace.optimizers import ExistingOptimizers, inner_optimizers
from .trace.tracer import run_traces

CONFIRMED = 5  # shards of the largest cost that are traced in the end


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
        >>> step.micro_batch_size, report.micro_batches, report.nvidia_smi[0] <= 4 * 2**20
        (765, 6, True)
    """
    _check_unit(step, lengths)
    request = request_of_step(step, inputs, targets)
    limits = _limits(step, capacity, request)
    if lengths is not None:
        return _fit_cost(step, dataclasses.replace(request, micro_batches=2), limits, trim, lengths)
    shares = request.split or request.layout.devices_per_process(request.devices)
    lines = trace_exactly(request, request.rows)
    if lines.fit(limits):
        rows = max(split_sizes(request.rows, shares))
    else:
        most, lines = _most_rows(dataclasses.replace(request, micro_batches=2), limits)
        rows = _per_device(most, shares)
    rows = _smallest_of_ranks(step, rows)
    if rows == 0:
        raise ValueError(f"not one row fits: {explain(request, limits)}")
    step.micro_batch_size = rows
    count = count_micro_batches(request.rows, rows, shares)
    request, rows = dataclasses.replace(request, micro_batches=count), -(-request.rows // count)
    if count == 1 and lines.second is None:
        return make_report(request, rows, lines, lines)
    if request.split or not lines.is_affine:
        return make_report(request, rows, *lines_of(request, rows))
    return make_report(request, rows, lines, lines, [request.round_up(rows)] * request.devices)


def _most_rows(request: Request, limits: Sequence[int]) -> tuple[int, Lines]:
    """Returns the most rows of one of several micro-batches that fit, over all devices, and the lines that show it."""
    coupled = is_coupled(request.criterion)  # takes two passes, with all outputs, for two micro-batches and more
    exact, lines = lines_of(request, request.round_up(-(-request.rows // (8 if coupled else 2))))
    batches = OtherBatches(request, exact, lines)
    if coupled:
        return most_that_fit(lambda rows: batches.fits(rows, limits), request.rows // 2), lines
    return batches.largest(limits) if min(limits) > 0 else 0, lines


def _fit_cost(step: TrainStep, request: Request, limits: list[int], dim: int, lengths: tuple[int, int]) -> MemoryReport:
    """Sets ``step.micro_batch_cost`` to the largest budget that fits, a number of the longest rows.

    The bytes of a block grow as ``rows * (a + b * length + c * length ** 2)``: embeddings with the length, attention scores with
    its square. With ``rows = budget / length`` that is convex in the length, so few of the longest rows or many of the shortest
    need the most. Two numbers of rows are traced at both ends. Traces of some shards in between confirm the result.
    """
    _check_lengths(request, dim, lengths)
    shortest, longest = lengths
    counts = BASE * request.row_step, 2 * BASE * request.row_step
    traces = run_traces([(_with_length(request, dim, length), count) for length in lengths for count in counts])
    ends = Lines(request, *traces[:2]), Lines(request, *traces[2:])
    if not all(lines.is_affine for lines in ends):
        raise ValueError(
            f"the module runs other operators with {counts[0]} and {counts[1]} rows, so that its memory for other numbers is not "
            "known: see memory.estimate for a batch of each length"
        )

    def ends_fit(rows: int) -> bool:
        sizes = rows * longest // shortest, rows
        return all(lines.fit(limits, size * request.row_step) for lines, size in zip(ends, sizes, strict=True))

    def shards_fit(rows: int) -> bool:
        sizes = np.unique(np.geomspace(rows, rows * longest // shortest, CONFIRMED).astype(np.int64)).tolist()
        jobs = [(_with_length(request, dim, min(longest, rows * longest // size)), size * request.row_step) for size in sizes]
        return all(Lines(request, trace).fit(limits) for trace in run_traces(jobs))

    rows = most_that_fit(ends_fit) if min(limits) > 0 else 0  # of the longest, per device
    while rows and not shards_fit(rows):
        rows -= max(1, rows // 1000)
    rows, of_longest = _smallest_of_ranks(step, rows), _with_length(request, dim, longest)
    if rows == 0:
        raise ValueError(f"not one row of {longest} fits: {explain(of_longest, limits)}")
    step.micro_batch_cost = rows * longest
    rows *= request.row_step
    return make_report(of_longest, rows, ends[1], ends[1], [rows] * request.devices)


def _check_lengths(request: Request, dim: int, lengths: tuple[int, int]) -> None:
    if len(lengths) != 2 or lengths[0] < 1 or lengths[0] + 2 > lengths[1]:
        raise ValueError(f"lengths={lengths!r}, expected (shortest, longest), such as (1, 512), with a difference of 2 or more")
    if dim == request.dim or not _with_dim(request, dim):
        raise ValueError(f"trim={dim}, expected the dimension of the lengths: in some tensor, and not that of the rows")
    if request.split is not None:
        raise ValueError(f"split={request.split} with lengths={lengths!r}, expected equal devices: cost is spread evenly")


def _with_length(request: Request, dim: int, length: int) -> Request:
    """Returns the request for rows of another length, in all tensors that have the batch's length along ``dim``."""
    whole = max(tensor.size(dim) for tensor in _with_dim(request, dim))

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() <= dim or leaf.size(dim) != whole:
            return leaf
        return leaf.new_empty([*leaf.shape[:dim], length, *leaf.shape[dim + 1 :]], device="meta")

    inputs, targets = map_leaves(resize, (request.inputs, request.targets))
    return dataclasses.replace(request, inputs=inputs, targets=targets)


def _with_dim(request: Request, dim: int) -> list[Tensor]:
    return [leaf for _, leaf in leaves((request.inputs, request.targets)) if isinstance(leaf, Tensor) and dim < leaf.dim()]


def _smallest_of_ranks(step: TrainStep, number: int) -> int:
    return number if isinstance(step.model, DataParallelModel) else -max_over_ranks(-number)


def _check_unit(step: TrainStep, lengths: tuple[int, int] | None) -> None:
    """Raises an error if the step limits its micro-batches by the other unit."""
    unit = "micro_batch_size" if lengths is None else "micro_batch_cost"
    try:
        setattr(step, unit, getattr(step, unit))
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


def _per_device(rows: int, shares: int | Sequence[float]) -> int:
    """Returns the largest ``micro_batch_size`` with which no micro-batch has more than ``rows`` rows over all devices."""
    if isinstance(shares, int):
        return rows // shares
    most = max(split_sizes(rows, shares))
    return most - (max(split_sizes(rows + 1, shares)) <= most)


def explain(request: Request, limits: Sequence[int]) -> str:
    """Returns what one row per device needs, the largest holders of it, and the saving that would help most."""
    rows = request.row_step
    plain = trace_exactly(request, rows)
    report = make_report(request, rows, plain, plain)
    worst = max(range(len(limits)), key=lambda i: report.nvidia_smi[i] - limits[i])
    holders = ", ".join(f"{format_bytes(holder.bytes)} of {holder.part}{_place(holder)}" for holder in report.where[worst][:3])
    savings = [saving for saving in savings_of("exact", "layout") if saving is not SHARDED]
    measured = saved_bytes(request, rows, max(report.allocated), savings)
    size, best = max(((size, saving.name) for saving, size in measured.items() if isinstance(size, int)), default=(0, ""))
    advice = f"{best} would save most, {format_bytes(size)}" if size > 0 else "no known saving would help"
    return (
        f"one row per device needs {format_bytes(report.nvidia_smi[worst])} of device {worst}, expected at most "
        f"{format_bytes(limits[worst])}. The largest holders are {holders}; {advice}"
    )


def _place(holder: Holder) -> str:
    where = ", ".join(filter(None, (holder.module, holder.line)))
    return f" ({where})" if where else ""


def request_of_step(step: TrainStep, inputs: Any, targets: Any) -> Request:
    """Returns the request of one update of a step, with the whole batch in one micro-batch."""
    model: Any = step.model
    criterion = step.criterion
    is_local = isinstance(model, DataParallelModel)
    if isinstance(model, ShardedModel):
        raise ValueError(
            "the model is sharded, and its parameters are parts on each rank: call memory.estimate(layout='fsdp') with the "
            "module before parallelize, and set step.micro_batch_size"
        )
    if model.in_dims is not None or criterion.in_dims is not None or criterion.dim not in (None, model.dim):
        raise ValueError(
            "the rows of the inputs and the targets are in different dimensions (in_dims=), expected one dim= for all: call "
            "memory.estimate with a function of one batch, and set step.micro_batch_size"
        )
    kind = kind_of(model.devices[0])
    optimizers = each_optimizer(step.optimizer)
    request = make_request(
        model.module,
        criterion if is_local or is_coupled(criterion) else criterion.module,
        inputs,
        targets,
        precision=next((each.name for each in (model.precision, step.precision) if each.name != "fp32"), "fp32"),
        layout="replicas" if is_local else "ddp",
        devices=len(model.devices) if is_local else world_size(),
        device_kind=kind.name,
        dim=model.dim,
        balanced_optimizer=any(isinstance(optimizer, BalancedOptimizer) for optimizer in optimizers),
        split=model.split,
    )
    existing = ExistingOptimizers(optimizers, foreach=kind.like_cuda)
    return dataclasses.replace(
        request, optimizer=existing, savings=(OFFLOAD_OPTIMIZER.name,) if all(map(is_offloaded, optimizers)) else ()
    )


def kind_of(device: torch.device) -> DeviceKind:
    """Returns the kind of a device."""
    return find_kind("cpu" if device.type == "cpu" else None)


def bytes_in_use(step: TrainStep) -> Counter[torch.device]:
    """Returns the bytes of a step's tensors on each device: parameters, copies, buffers, gradients and optimizer state."""
    storages = {(tensor.device, storage_id(storage := tensor.untyped_storage())): storage for tensor in _tensors_of(step)}
    total: Counter[torch.device] = Counter()
    for (device, _), storage in storages.items():
        unit = kind_of(device).rounds_to
        total[device] += -(-storage.nbytes() // unit) * unit
    return total


def _tensors_of(step: TrainStep) -> list[Tensor]:
    parts: list[Any] = [step.model, step.criterion]
    optimizers = each_optimizer(step.optimizer)
    updated = [each for inner in inner_optimizers(optimizers) for group in inner.param_groups for each in group["params"]]
    tensors = [*updated, *(tensor for part in parts for tensor in (*part.parameters(), *part.buffers()))]
    replicas = [part.replicas for part in parts if isinstance(part, (DataParallelModel, DataParallelCriterion))]
    others = [*copies_of(replicas), *gradients_of(tensors, replicas, optimizers), *states_of(optimizers)]
    return tensors + [other for other in others if isinstance(other, Tensor)]
