"""``memory.estimate``: the memory of an update on each device, predicted without a device.

The arguments become a :class:`Request`, two numbers of rows are traced, and :class:`Lines` through both give the report:

    module, criterion, batch  ->  Request  ->  traces of n and 2 n rows  ->  Lines  ->  MemoryReport

An existing :class:`TrainStep` becomes a request too, for ``memory.fit``, which also needs the bytes that its tensors use now.
"""

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..loss.criterion import DataParallelCriterion
from ..optim.balanced import BalancedOptimizer
from ..replicas.model import DataParallelModel
from ..runtime.collectives import world_size
from ..runtime.torch_private import get_gradient, leaves_of_tree, storage_id
from ..strategies.fsdp import ShardedModel
from ..training.step import TrainStep
from ..training.update import each_optimizer
from .devices import DeviceKind, find_kind
from .errors import UnknownMemory
from .lengths import trace_lengths
from .lines import Lines
from .operators.recurrent import SOURCE as RECURRENCE
from .report import PARTS, MemoryReport, OtherBatches, holders_of, runs
from .request import make_request
from .trace.layouts import ReplicasOfStep, Request, is_coupled, plain_criterion
from .trace.optimizers import ExistingOptimizers
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
            ``"fsdp"``, one rank of several, with ``inputs`` of its own.
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
            ``report.largest_cost(capacity)``. Takes four more traces.
        trim: the dimension of the lengths, as in :class:`ByCost`: that of all tensors with the batch's length there.

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
    exact, lines = lines_of(request, rows)
    return make_report(request, rows, exact, None, lines)


def lines_of(request: Request, rows: int) -> tuple[Lines, Lines]:
    """Traces micro-batches of ``rows`` rows, and of twice as many. Returns the lines of this number of rows, and of others."""
    step = request.row_step
    base = -(-max(rows, 2) // step) * step  # one row is a special case for torch: broadcasting, strides
    traces, reason = _trace_lines(request, sorted({rows, base, 2 * base}))
    exact = Lines.exact(traces[0], request)
    lines = Lines(traces[-2], traces[-1], request.kind, request.devices, step, request.split) if len(traces) > 1 else exact
    if not lines.is_affine:
        warnings.warn(
            f"{reason}, so memory is not affine in the rows: at() and largest() trace each number of rows", stacklevel=4
        )
    return exact, lines


def make_report(request: Request, rows: int, exact: Lines, asked: Sequence[int] | None, lines: Lines) -> MemoryReport:
    """Makes the report of micro-batches of ``rows`` rows.

    Args:
        exact: the lines of this number of rows.
        asked: for each device, the rows at which to read ``exact``. ``None`` reads at the rows that were traced.
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
        peak=tuple(exact.peak(i, at) for i, at in read),
        reserved=tuple(exact.reserved(i, at) or 0 for i, at in read),
        parts=tuple(_parts(exact, i, at) for i, at in read),
        assumed=_assumed(exact, request.kind),
        timeline=tuple(tuple(exact.levels(i, at)[exact.start :].tolist()) for i, at in read),
        where=tuple(holders_of(exact, i, at) for i, at in read),
        phases={name: exact.first.marks[name] - exact.start for name in ("backward", "update")},
        flops=exact.flops(None if asked is None else rows) * request.micro_batches // exact.first.micro_batches,
        affine=lines.is_affine,
        _batches=OtherBatches(request, exact, read, lines),
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
    for block in lines.blocks_at(device, lines.peak_event(device, rows), rows):
        parts[block.kind] += -(-block.size // unit) * unit
    return parts | {"workspace": lines.kind.workspace, "context": lines.kind.context}


def request_of_step(step: TrainStep, inputs: Any, targets: Any) -> Request:
    """Returns the request of one update of a step, with the whole batch in one micro-batch.

    Raises:
        ValueError: the inputs have no rows, or rows in different dimensions; the model is sharded.
    """
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
    of_model = model.precision.name
    request = make_request(
        model.module,
        criterion if is_local or criterion.is_coupled else criterion.module,
        inputs,
        targets,
        optimizer=torch.optim.SGD,
        precision=step.precision.name if of_model == "fp32" else of_model,
        layout="replicas" if is_local else "ddp",
        devices=len(model.devices) if is_local else world_size(),
        device_kind=kind.name,
        dim=model.dim,
        scalar=None,
        balanced_optimizer=any(isinstance(optimizer, BalancedOptimizer) for optimizer in optimizers),
        split=model.split,
    )
    return dataclasses.replace(
        request,
        optimizer=ExistingOptimizers(optimizers, foreach=kind.like_cuda),
        layout=ReplicasOfStep if is_local else request.layout,
    )


def kind_of(device: torch.device) -> DeviceKind:
    """Returns the kind of a device."""
    return find_kind("cpu" if device.type == "cpu" else None)


def bytes_in_use(step: TrainStep) -> Counter[torch.device]:
    """Returns the bytes of a step's tensors on each device: parameters, copies, buffers, gradients and optimizer state."""
    sizes: dict[tuple[torch.device, int], int] = {}
    for tensor in _tensors_of(step):
        storage = tensor.untyped_storage()
        unit = kind_of(tensor.device).rounds_to
        sizes[tensor.device, storage_id(storage)] = -(-storage.nbytes() // unit) * unit
    total: Counter[torch.device] = Counter()
    for (device, _), size in sizes.items():
        total[device] += size
    return total


def _tensors_of(step: TrainStep) -> Iterator[Tensor]:
    parts: list[Any] = [step.model, step.criterion]
    parameters: list[Tensor] = [parameter for part in parts for parameter in part.parameters()]
    for part in parts:
        yield from part.buffers()
        if isinstance(part, (DataParallelModel, DataParallelCriterion)):
            yield from (copy for copies in part.replicas.copies.by_device.values() for copy in copies)
            for bucket in part.replicas.gradients.buckets:
                yield from (gradient for gradients in bucket.held.values() for gradient in gradients if gradient is not None)
    for optimizer in each_optimizer(step.optimizer):
        inner = optimizer.shards.inner if isinstance(optimizer, BalancedOptimizer) else optimizer
        parameters += [parameter for group in inner.param_groups for parameter in group["params"]]
        yield from (leaf for state in inner.state.values() for leaf in leaves_of_tree(state) if isinstance(leaf, Tensor))
    for parameter in parameters:
        yield parameter
        if parameter.is_leaf and (gradient := get_gradient(parameter)) is not None:
            yield gradient
