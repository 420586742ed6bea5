"""``memory.estimate``: the memory of an update on each device, predicted without a device.

module, criterion, batch  ->  Request  ->  traces of n and 2 n rows  ->  Lines  ->  MemoryReport
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from .. import Precision
from ..batch.containers import describe
from ..batch.plan import count_micro_batches
from ..runtime import values
from ..runtime.torch_private import is_compiled
from ..strategies.tracing import TracedBatch, check_module
from .devices import KIND_SOURCES, find_kind
from .lines import Lines
from .operators import CONVOLUTIONS, RECURRENT_LAYERS, UnknownMemory
from .problem import LossFunction, Problem, Request
from .report import PARTS, KindComparison, MemoryReport, OtherBatches, holders_of
from .savings import sorted_names
from .trace.layouts import LAYOUTS, OptimizerChoice, wrap
from .trace.quantized import FOUR_BITS, is_four_bit
from .trace.tracer import run_traces

MakeOptimizer = Callable[..., torch.optim.Optimizer]
T = TypeVar("T")
MODES = "train", "evaluate"


@values.naming_arguments
def estimate(
    module: nn.Module,
    criterion: LossFunction,
    inputs: object,
    targets: object,
    *,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    precision: values.PrecisionName = "fp32",
    micro_batch_size: int | None = None,
    layout: str = "single",
    devices: int = 1,
    balanced_optimizer: bool = False,
    savings: Iterable[str] = (),
    device_kind: str | None = None,
    split: Sequence[float] | None = None,
    dim: int = 0,
    scalar: float | None = None,
    whole_gradients: bool = False,
    expandable_segments: bool = False,
    mode: str = "train",
    keeps_outputs: bool = False,
    keeps_gradients: bool | None = None,
) -> MemoryReport:
    """Predicts the memory of an update on each device.

    Two updates run on fake tensors, in processes of their own, and every allocation is counted.
    Objects of the caller do not change. The update is ``criterion(module(inputs),
    targets).backward()`` and ``optimizer.step()``. A tuple of inputs is spread over the arguments
    of the module, a mapping over its keyword arguments, and a tuple of targets over the arguments
    of the criterion after the output.

    Args:
        module: on any device, ``meta`` included.
        criterion: a module or a function of output and targets; a loss of all rows is
            ``DataParallelCriterion(..., whole=True)``.
        inputs, targets: real, meta or fake tensors with rows along ``dim``: the batch of an update,
            in one process.
        optimizer: a class of ``torch.optim``, a ``functools.partial`` of one, or a function of the
            parameters.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``: autocast, as in :class:`TrainStep`.
        micro_batch_size: rows per device in one forward. ``None`` is a device's whole share.
        layout: ``"single"``, the plain program on one device; ``"replicas"``,
            :class:`DataParallelModel`; ``"ddp"`` and ``"fsdp"``, one rank of several, with
            ``inputs`` of its own. Rows of the report are those of all ranks. ``"step"``, an update
            in your own words: the criterion is ``update(module, optimizer, *inputs, *targets)``,
            which runs every forward, backward and ``step()``, and ``optimizer`` is a function of
            the module, which returns what ``update`` gets.
        devices: number of devices, or of ranks.
        balanced_optimizer: uses :class:`BalancedOptimizer`. With ddp and fsdp, the rank is the one
            that owns the most whole parameters; elementwise optimizers of fsdp need none.
        savings: names of functions of ``balanced_parallel.savings``, such as
            ``["checkpoint_activations"]``, with their default settings. They are applied to the
            copies that are traced. Those that change a module may also be applied before.
        device_kind: ``"h200"``, ``"a100"``, ..., ``"cpu"``, or ``"sim"`` for the devices of
            :func:`simulate`. ``None`` is the accelerator of this machine, else ``"h200"``.
        split: the weight of each device, as in :class:`DataParallelModel`.
        dim: the dimension of the rows in inputs, outputs and targets.
        scalar: the result where the module reads a value of a tensor (``.item()``, ``if``). Without
            it such a read is an error.
        whole_gradients: with ``layout="fsdp"`` and several micro-batches, gradients are reduced
            once, in the last. ``TrainStep`` does this where they fit into half of the free memory.
        expandable_segments: the allocator has this setting, as
            ``PYTORCH_ALLOC_CONF=expandable_segments:True`` makes it.
        mode: ``"train"``, or ``"evaluate"``: ``criterion(module(inputs), targets)`` after
            ``module.eval()`` under ``torch.no_grad()``, without gradients and an optimizer.
            Outputs stay on their devices: those that a program gathers are not counted.
        keeps_outputs: a variable of the loop has the outputs until the next forward has returned.
            Otherwise they are released after their loss. The report tells the difference.
        keeps_gradients: the loop calls ``zero_grad()`` after the forward, and not before. ``None``
            is True with ``layout="single"`` and one micro-batch, as in most loops, and False
            elsewhere, as in :class:`TrainStep`.

    Raises:
        ValueError: a setting is out of its range; the inputs have no rows; the memory of an
            operator depends on values.
        BaseException: the module, the criterion or the optimizer raised it on these shapes.

    Example:
        >>> net = torch.nn.Linear(256, 10)
        >>> batch = torch.zeros(8, 256), torch.zeros(8, dtype=torch.int64)
        >>> report = estimate(net, torch.nn.CrossEntropyLoss(), *batch, device_kind="cpu")
        >>> report.parts[0]["parameters"], report.parts[0]["optimizer state"]
        (10280, 20568)
    """
    settings = {**locals()}
    names = "module", "criterion", "inputs", "targets", "dim", "scalar"
    request = make_request(Problem(*map(settings.pop, names)), **settings)
    return make_report(request, -(-request.rows // request.micro_batches))


@values.naming_arguments
def compare_kinds(
    module: nn.Module,
    criterion: LossFunction,
    inputs: object,
    targets: object,
    *,
    device_kind: Sequence[str],
    **settings: Any,
) -> KindComparison:
    """Predicts the memory of an update on GPUs of several kinds, from one pair of traces.

    Args:
        module, criterion, inputs, targets, settings: as for :func:`estimate`.
        device_kind: names of GPUs, such as ``["a100", "rtx4090"]``.

    Returns:
        A :class:`MemoryReport` for each name, as a dictionary. Printed, it is a table: whether the
        batch fits, the bytes that are left, and the most rows of a micro-batch.

    Raises:
        ValueError: as for :func:`estimate`, or a kind is not a GPU.

    Example:
        >>> batch = torch.zeros(8, 256), torch.zeros(8, 256)
        >>> found = compare_kinds(torch.nn.Linear(256, 256), torch.nn.MSELoss(), *batch, device_kind=["t4", "a100"])
        >>> found["a100"].at(8).fits, found["a100"].nvidia_smi > found["t4"].nvidia_smi
        (True, True)
    """
    kinds = {name: find_kind(name) for name in device_kind}
    others = [name for name, kind in kinds.items() if not kind.is_gpu]
    if others or not kinds:
        raise ValueError(f"device_kind={others}, expected names of GPUs, such as 'a100'")
    largest = max(kinds, key=lambda name: kinds[name].workspace)
    report = estimate(module, criterion, inputs, targets, device_kind=largest, **settings)
    traced = report.batches
    rows = traced.exact.first.rows
    source = traced.lines if traced.lines.first.rows == rows else traced.exact
    comparison = KindComparison()
    for name, kind in kinds.items():
        kind = dataclasses.replace(kind, expandable=traced.request.kind.expandable)
        of_kind = dataclasses.replace(traced.request, kind=kind)
        comparison[name] = make_report(of_kind, rows, Lines(of_kind, source.first, source.second))
    return comparison


_CALLS = {
    "criterion": "a module or a function: the arguments are (module, criterion, inputs, targets)",
    "optimizer": "a class, or a function of the parameters: torch.optim.AdamW, or functools.partial(torch.optim.AdamW, lr=...)",
}


def make_request(
    problem: Problem,
    *,
    batch: TracedBatch | None = None,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    precision: values.PrecisionName = "fp32",
    micro_batch_size: int | None = None,
    layout: str = "single",
    devices: int = 1,
    balanced_optimizer: bool = False,
    savings: Iterable[str] = (),
    device_kind: str | None = None,
    split: Sequence[float] | None = None,
    expandable_segments: bool = False,
    keeps_gradients: bool | None = None,
    **fields: Any,
) -> Request:
    """Checks the arguments of :func:`estimate`, and makes a request of them. ``fields`` are its own.

    ``batch`` is that of the problem, where inputs and targets have their rows in two dimensions.
    """
    check_module(problem.module)
    _refuse_quantized(problem.module)
    for name, function in {"criterion": problem.criterion, "optimizer": optimizer}.items():
        if not callable(function):
            raise TypeError(f"the {name} is {describe(function)}, expected {_CALLS[name]}")
    kind = dataclasses.replace(find_kind(device_kind), expandable=expandable_segments)
    Precision(precision)
    values.check_positive(devices=devices, micro_batch_size=micro_batch_size or 1)
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}, expected one of {', '.join(LAYOUTS)}")
    batch = batch or problem.batch
    wrapped = wrap(problem.criterion)
    couples_rows = wrapped.kind.couples_rows and layout != "step"
    request = Request(
        module=problem.module,
        # Layouts wrap a loss of rows again.
        criterion=problem.criterion if couples_rows or layout == "step" else wrapped.module,
        batch=batch,
        scalar=problem.scalar,
        optimizer=OptimizerChoice(optimizer),
        precision=precision,
        micro_batches=count_micro_batches(
            batch.rows or 0,
            micro_batch_size,
            split or (1 if LAYOUTS[layout].is_distributed else devices),
        ),
        layout=LAYOUTS[layout],
        devices=devices,
        balanced=balanced_optimizer,
        split=None if split is None else tuple(split),
        kind=kind,
        couples_rows=couples_rows,
        savings=sorted_names(savings),
        keeps_gradients=layout == "single" if keeps_gradients is None else keeps_gradients,
        **fields,
    )
    _check_layout(request, micro_batch_size)
    return request


def _check_layout(request: Request, micro_batch_size: int | None) -> None:
    name, mode, devices = request.layout.name, request.mode, request.devices
    if name in ("single", "step") and (devices > 1 or request.balanced):
        setting = f"devices={devices}" if devices > 1 else "balanced_optimizer=True"
        raise ValueError(
            f"{setting} with layout={name!r}, expected layout='replicas', 'ddp' or 'fsdp'"
        )
    if request.whole_gradients and name != "fsdp":
        raise ValueError(f"whole_gradients=True with layout={name!r}, expected layout='fsdp'")
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}, expected one of {', '.join(MODES)}")
    if name == "step" and (mode == "evaluate" or micro_batch_size):
        raise ValueError(
            f"layout='step' with mode={mode!r}, micro_batch_size={micro_batch_size}, expected neither: the step runs whole"
        )
    if mode == "evaluate" and (request.balanced or request.whole_gradients):
        raise ValueError(
            "mode='evaluate' has no gradients, expected balanced_optimizer and whole_gradients with mode='train'"
        )


def _refuse_quantized(module: nn.Module) -> None:
    """Raises :class:`UnknownMemory` for weights of bitsandbytes and torchao, but for those of four
    bits of bitsandbytes: no trace knows their kernels.
    """
    for name, part in module.named_modules():
        if is_four_bit(part):
            continue
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            kind = type(tensor)
            if kind.__module__.startswith(("bitsandbytes", "torchao")):
                raise UnknownMemory(
                    f"{name} ({type(part).__name__}) has a weight of {kind.__module__}.{kind.__name__}, whose kernels "
                    "take memory that depends on values, such as the number of outliers: give the model before its quantization, "
                    "with the plain weights in bf16 (eight bits need about a byte less for each of them), or 4-bit layers of "
                    "bitsandbytes, which are known"
                )


def lines_of(request: Request, rows: int) -> OtherBatches:
    """Traces micro-batches of ``rows`` rows, and of twice as many.

    If the module refuses the larger numbers of rows, only this number has lines.
    """
    # one row is a special case for torch: broadcasting, strides
    base = request.round_up(max(rows, 2))
    counts = sorted({rows, base, 2 * base})
    reason = ""
    if request.couples_rows and request.micro_batches == 1:
        counts = counts[:1]
        reason = "the loss of all rows may need memory for each pair of them"
    try:
        traces = run_traces([(request, count) for count in counts])
    except UnknownMemory:
        raise
    except Exception as error:  # noqa: BLE001 - a module may raise anything
        reason = f"with {counts[-1]} rows the module raises {type(error).__name__}: {error}"
        # raises again if the number of rows is not the cause
        traces = run_traces([(request, counts[0])])
    exact = Lines(request, traces[0])
    lines = Lines(request, *traces[-2:]) if len(traces) > 1 else exact
    if not lines.is_affine:
        reason = reason or f"twice the rows ran {lines.difference}"
        warnings.warn(
            f"{reason}, so memory is not affine in the rows: at() and largest() trace each number of rows",
            stacklevel=4,
        )
    return OtherBatches(request, exact, lines)


def make_report(
    request: Request,
    rows: int,
    source: Lines | None = None,
    asked: Sequence[int] | None = None,
) -> MemoryReport:
    """Makes the report of micro-batches of ``rows`` rows of a process, from the lines of ``source``
    or from traces.

    The lines are read there, or at the rows ``asked`` for.
    """
    batches = OtherBatches(request, source, source) if source else lines_of(request, rows)
    exact = batches.exact
    read = list(zip(request.traced_devices, asked or [rows] * request.devices, strict=True))
    context = request.kind.context

    def each(value: Callable[[int, int], T]) -> tuple[T, ...]:
        """Returns a value of each device."""
        return tuple(value(device, at) for device, at in read)

    reserved = each(lambda i, at: exact.reserved(i, at) or 0)
    upper = each(lambda i, at: exact.reserved(i, at, upper=True) or 0)
    return MemoryReport(
        mode=request.mode,
        layout=request.layout.name,
        device_kind=request.kind.name,
        precision=request.precision,
        devices=request.devices,
        rows=rows * request.processes,
        micro_batches=request.micro_batches,
        allocated=each(exact.allocated),
        reserved=reserved,
        nvidia_smi=tuple(size + context for size in reserved),
        at_most=tuple(size + context for size in map(max, reserved, upper)),
        parts=each(partial(parts_at_peak, exact)),
        assumed=_assumed(request, exact, read[0][1]),
        timeline=each(lambda i, at: tuple(exact.levels(i, at).tolist())),
        where=each(partial(holders_of, exact)),
        phases={
            name: place - exact.start
            for name, place in exact.first.marks.items()
            if name in ("backward", "update")
        },
        flops=exact.flops(rows) * request.micro_batches // exact.request.traced_micro_batches,
        affine=batches.lines.is_affine,
        batches=batches,
    )


def _assumed(request: Request, lines: Lines, rows: int) -> dict[str, str]:
    """Returns the sources of what a report assumes."""
    assumed = request.kind.remarks(request.precision)
    if request.kind.context:
        assumed |= KIND_SOURCES
        operators = " ".join({block.operator for block in lines.first.blocks})
        if any(isinstance(module, nn.RNNBase) for module in request.module.modules()):
            assumed["recurrent layers"] = RECURRENT_LAYERS
        if "aten.convolution" in operators:
            assumed["convolutions"] = CONVOLUTIONS
    if request.micro_batches == 1 and request.mode == "train" and not request.layout.is_whole:
        assumed |= _assumed_of_loop(request, lines, rows)
    if any(map(is_four_bit, request.module.modules())):
        assumed["4-bit weights"] = FOUR_BITS
    if any(map(is_compiled, request.module.modules())):
        assumed["compiled"] = (
            "the module is compiled, and this is the estimate of the uncompiled module: fused operators may need less, or more"
        )
    return assumed


def _assumed_of_loop(request: Request, lines: Lines, rows: int) -> dict[str, str]:
    """Returns what a loop is assumed to keep, and what it needs if it keeps more."""
    assumed = {}
    if request.keeps_gradients:
        assumed["zero_grad"] = (
            "assumed: after the forward; a loop that calls it before has keeps_gradients=False"
        )
    elif more := lines.more_if_kept(0, rows, lines.kinds == "gradients"):
        assumed["zero_grad"] = (
            f"assumed: before the forward; a loop that calls it after needs {values.format_bytes(more)} more"
        )
    if not request.keeps_outputs and (more := lines.more_if_kept(0, rows, lines.is_output)):
        assumed["outputs"] = (
            "assumed: released after the loss; a loop that keeps them until the next forward needs "
            f"{values.format_bytes(more)} more (keeps_outputs=True)"
        )
    return assumed


def parts_at_peak(lines: Lines, device: int, rows: int) -> dict[str, int]:
    """Returns the bytes of a device's peak by purpose."""
    kind = lines.request.kind
    parts = dict.fromkeys(PARTS, 0)
    for block in lines.blocks_at_peak(device, rows):
        parts[block.kind] += -(-block.size // kind.rounds_to) * kind.rounds_to
    return parts | {"rounding": lines.allocated(device, rows) - sum(parts.values())}
