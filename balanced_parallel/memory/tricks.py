"""The known tricks against running out of memory, each with the bytes that it saves for one model.

Rows of the table of tricks, and the comparisons of two steps that they need.

Variants of a step for the table of tricks: what a trick would leave out is put in, or what it needs is changed.
"""

import copy
import dataclasses
import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from ..batch.containers import map_leaves
from ..batch.rows import Arguments
from ..runtime.values import format_bytes
from ..savings.checkpointing import checkpoint_activations
from ..savings.linear_cross_entropy import LinearCrossEntropy
from .estimation import report_of
from .lines import Lines
from .planning import smaller_optimizers
from .report import MemoryReport
from .request import make_request
from .trace.layouts import ReplicaLayout, Request, compute_loss, plain_criterion
from .trace.optimizers import OptimizerChoice
from .trace.savings import with_inplace_activations
from .trace.tracer import Job, Trace, reason_of, try_traces

__all__: list[str] = []


@dataclass(frozen=True)
class Trick:
    """One row of the table.

    Attributes:
        saves: bytes of the busiest device at its peak; None if the trick does not apply to this model.
        cost: what is lost.
    """

    name: str
    saves: int | None
    cost: str


@dataclass(frozen=True)
class Comparison:
    """A row whose bytes are the difference of two peaks.

    Attributes:
        make: returns the step without the trick and the step with it, each to be traced, or its peak if that is known.
    """

    name: str
    cost: str
    make: Callable[[], list[Job | int]]

    def steps(self) -> list[Job | int] | str:
        """Returns the two steps, or the reason why the model does not take the trick."""
        try:
            return self.make()
        except Exception as error:  # noqa: BLE001 - a model may raise anything where a trick does not suit it
            return reason_of(error)


def measure_rows(rows: Sequence[Trick | Comparison]) -> Iterator[Trick]:
    """Traces all comparisons together."""
    all_steps = [[] if isinstance(row, Trick) else row.steps() for row in rows]
    jobs = [step for steps in all_steps if isinstance(steps, list) for step in steps if isinstance(step, tuple)]
    peaks = iter(list(map(_peak, jobs, try_traces(jobs))))
    for row, steps in zip(rows, all_steps, strict=True):
        if isinstance(row, Trick):
            yield row
            continue
        found = [next(peaks) if isinstance(step, tuple) else step for step in steps] if isinstance(steps, list) else [steps]
        reason = next((one for one in found if isinstance(one, str)), None)
        if reason is not None:
            yield Trick(row.name, None, f"not for this model: {reason[:80]}")
        else:
            before, after = found
            yield Trick(row.name, int(before) - int(after), row.cost)


def _peak(job: Job, trace: Trace | str) -> int | str:
    """Returns the peak of the busiest device, or the reason why it is not known."""
    if isinstance(trace, str):
        return trace
    request, _ = job
    lines = Lines.exact(trace, request)
    return max(lines.peak(i) for i in request.layout.traced_devices(request.devices))


@dataclass(frozen=True)
class TrickTable:
    """The tricks for one model.

    Attributes:
        peak: bytes of the plain program, on the busiest device.
        report: of the plain program.
    """

    peak: int
    tricks: tuple[Trick, ...]
    report: MemoryReport = dataclasses.field(repr=False)

    def to_json(self) -> str:
        """Returns the table as JSON."""
        return json.dumps({"peak": self.peak, "tricks": [dataclasses.asdict(trick) for trick in self.tricks]}, indent=2)

    def rows(self) -> list[list[str]]:
        """Returns the cells of the table: the name, bytes, their part of the peak, and the cost."""
        return [
            [one.name, "-", "", one.cost]
            if one.saves is None
            else [one.name, format_bytes(one.saves), f"{one.saves / self.peak:.0%}", one.cost]
            for one in self.tricks
        ]

    def __str__(self) -> str:
        table = tabulate(self.rows(), ["trick", "saves", "of the peak", "cost"], "simple", disable_numparse=True)
        return f"peak without tricks: {format_bytes(self.peak)} on the busiest device\n\n{table}"


def measure_tricks(module: Any, criterion: Any, inputs: Any, targets: Any, *, devices: int = 1, **settings: Any) -> TrickTable:
    """Traces a step of the plain program, and the same step with each trick.

    Args:
        module, criterion, inputs, targets: as for :func:`estimate`.
        devices: more than one are replicas.
        settings: ``optimizer``, ``precision``, ``device_kind``, ``dim`` and ``scalar``, as for :func:`estimate`.

    Raises:
        ValueError: :func:`estimate` refuses the plain program.
    """
    settings = {"optimizer": torch.optim.AdamW, "precision": "fp32", "device_kind": None, "dim": 0, "scalar": None, **settings}
    layout = "single" if devices == 1 else ReplicaLayout.name
    request = make_request(module, plain_criterion(criterion), inputs, targets, layout=layout, devices=devices, **settings)
    report = report_of(request, request.rows)
    peak = max(report.peak)
    return TrickTable(peak, tuple(measure_rows(list(_rows(request, report, peak)))), report)


def _rows(request: Request, report: MemoryReport, peak: int) -> Iterator[Trick | Comparison]:
    def job(request: Request, rows: int) -> Job:
        return request, -(-rows // request.row_step) * request.row_step

    def less(
        name: str, cost: str, make: Callable[[], Request], rows: int = request.rows, beside: Request | None = None
    ) -> Comparison:
        """Compares a variant that needs less."""
        return Comparison(name, cost, lambda: [peak if beside is None else job(beside, rows), job(make(), rows)])

    def more(name: str, cost: str, make: Callable[[], Request]) -> Comparison:
        """Compares a variant that needs more: a program without the trick."""
        return Comparison(name, cost, lambda: [job(make(), request.rows), peak])

    yield from _of_activations(request, less, more)
    yield from _of_the_model(request, report, less)
    half = math.ceil(request.rows / 2)
    yield less("fewer rows: half of them", "another batch size", lambda: request, half)
    several = change(request, micro_batches=2)
    yield less("split batches: 2 accumulated micro-batches", "smaller kernels; the same result", lambda: several, half)
    yield less("split batches: as many as there are rows", "one row at a time", lambda: several, request.row_step)
    yield more("clearing gradients (zero_grad to None)", "nothing: torch's default", lambda: _zeroed(request))
    released = "release_gradients_in_backward"
    yield less(released, "no clipping, no accumulation", lambda: _saving(request, released))
    with_graph = evaluation(request, with_graph=True)
    yield less("no_grad in evaluation", "nothing", lambda: evaluation(request, with_graph=False), beside=with_graph)
    for choice in smaller_optimizers(request.optimizer):  # type: ignore[arg-type]
        yield less(f"another optimizer: {choice.name}", "another result", functools.partial(change, request, optimizer=choice))
    cached = format_bytes(max(report.reserved) - max(report.peak))
    yield Trick("emptying the cache, collecting garbage", 0, f"time; at the peak nothing is free, and the cache is {cached}")
    twice = change(request, layout=ReplicaLayout, devices=2 * request.devices)
    if request.rows >= 2 * request.devices:
        yield less("twice as many GPUs", "GPUs", lambda: twice)
        yield less("twice as many GPUs, BalancedOptimizer", "GPUs; traffic", lambda: change(twice, balanced=True))
    yield Trick("a larger GPU", None, f"a GPU of more than {format_bytes(max(report.reserved))}")


Compare = Callable[..., Comparison]


def _of_activations(request: Request, less: Compare, more: Compare) -> Iterator[Comparison]:
    yield less("in-place activations", "nothing", lambda: with_inplace_activations(request))
    criterion = request.criterion
    yield more(
        "`del` of the output after the loss", "nothing", lambda: change(request, criterion=keeping(criterion, outputs=True))
    )
    yield more("running loss without its graph", "nothing", lambda: change(request, criterion=keeping(criterion, outputs=False)))
    recomputed = "operations that run twice"
    yield less("checkpoint_activations", recomputed, lambda: _saving(request, "checkpoint_activations"))
    yield less("checkpoint_sequential, 2 segments", recomputed, lambda: checkpoint_sequential(request))
    yield less("offload_activations", "traffic to the host and back", lambda: _saving(request, "offload_activations"))
    yield less("LinearCrossEntropy", "nothing; the logits do not exist", lambda: without_logits(request))


def _of_the_model(request: Request, report: MemoryReport, less: Compare) -> Iterator[Trick | Comparison]:
    held: Counter[str] = Counter()
    for holder in report.where[0]:
        held[holder.module] += holder.bytes * bool(holder.module)
    name, size = held.most_common(1)[0] if held else ("", 0)
    yield Trick(f"smaller layers: half of {name or 'the largest'}", size // 2, "another model; at most")
    yield less("smaller input: half the height and width, or length", "another result", lambda: half_input(request))
    yield Trick("down-sampling in the first layer", None, "another model; the bytes of a smaller input, less the first layer")
    yield less("mixed precision (autocast to bf16)", "other arithmetic", lambda: change(request, precision="bf16"))
    yield less("half precision (all in bf16)", "other arithmetic, also in the update", lambda: in_bfloat16(request))


def _zeroed(request: Request) -> Request:
    return change(request, optimizer=with_zeroed_gradients(request.optimizer))  # type: ignore[arg-type]


def _saving(request: Request, name: str) -> Request:
    return change(request, savings=(name,))


def keeping(criterion: Callable[..., Any], *, outputs: bool) -> Callable[..., Any]:
    """Returns a criterion that keeps the outputs of the model, or its losses with their graph, until the next call."""
    kept: list[Any] = []

    def call(output: Any, *targets: Any) -> Tensor:
        kept.clear()
        loss = compute_loss(criterion, output, targets)
        kept.append(output if outputs else loss)
        return loss

    return call


class ZeroedGradients(torch.optim.Optimizer):
    """Fills gradients with zeros in the place of releasing them, as ``zero_grad(set_to_none=False)`` does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def step(self, closure: Any = None) -> Any:
        """Steps the optimizer."""
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Fills gradients with zeros."""
        self.inner.zero_grad(set_to_none=False)


def with_zeroed_gradients(choice: OptimizerChoice) -> OptimizerChoice:
    """Returns the choice of an optimizer that keeps gradients as zeros."""
    return OptimizerChoice(lambda parameters: ZeroedGradients(choice(parameters)), foreach=False)


class Evaluation(nn.Module):
    """An evaluation of a module as a step: the loss has no gradient, and one parameter of its own is trained.

    Args:
        with_graph: keeps the graph, as without ``torch.no_grad()``.
    """

    def __init__(self, module: nn.Module, with_graph: bool) -> None:
        super().__init__()
        self.inner, self.with_graph = module, with_graph
        self.trained = nn.Parameter(torch.zeros(()))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        with torch.set_grad_enabled(self.with_graph):
            return self.trained, self.inner(*inputs, **kwargs)


def evaluation(request: Request, *, with_graph: bool) -> Request:
    """Returns the request of an evaluation, without gradients of parameters and without a state of the optimizer."""
    criterion = request.criterion

    def call(trained: Tensor, output: Any, *targets: Any) -> Tensor:
        with torch.set_grad_enabled(with_graph):
            loss = compute_loss(criterion, output, targets)
        return trained + loss.detach()

    optimizer = OptimizerChoice(lambda parameters: torch.optim.SGD(list(parameters)[:1], lr=0.0), foreach=False)
    return change(request, module=Evaluation(request.module, with_graph), criterion=call, optimizer=optimizer)


def in_bfloat16(request: Request) -> Request:
    """Returns the request of a model whose parameters and inputs are in bfloat16."""
    convert = functools.partial(_convert, dtype=torch.bfloat16)
    inputs = Arguments(map_leaves(convert, request.inputs.inputs), map_leaves(convert, request.inputs.kwargs))
    of_outputs = request.targets if isinstance(request.criterion, nn.CrossEntropyLoss) else map_leaves(convert, request.targets)
    return change(request, module=copy.deepcopy(request.module).to(torch.bfloat16), inputs=inputs, targets=of_outputs)


def half_input(request: Request) -> Request:
    """Returns the request with half the height and width of images, or half the length of sequences.

    Raises:
        ValueError: the inputs are vectors.
    """
    tensors = [one for one in request.inputs.inputs if isinstance(one, Tensor)]
    if not tensors or tensors[0].dim() < 2 or (tensors[0].dim() == 2 and tensors[0].is_floating_point()):
        raise ValueError("the inputs are vectors")
    dims = range(2, tensors[0].dim()) if tensors[0].dim() > 3 else (1,)
    sizes = {tensors[0].size(dim) for dim in dims}

    def halve(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        first, *others = leaf.shape
        per_row = first // request.rows  # flattened targets have several entries per row
        return leaf.new_empty(
            [first // 2 if per_row in sizes else first, *(size // 2 if size in sizes else size for size in others)]
        )

    inputs = Arguments(map_leaves(halve, request.inputs.inputs), map_leaves(halve, request.inputs.kwargs))
    return change(request, inputs=inputs, targets=map_leaves(halve, request.targets))


def checkpoint_sequential(request: Request) -> Request:
    """Returns the request with every outermost ``nn.Sequential`` in segments.

    Raises:
        ValueError: the model has none.
    """
    module = copy.deepcopy(request.module)
    names: list[str] = []
    for name, child in module.named_modules():
        is_outermost = not any(name.startswith(f"{other}." if other else "") for other in names)
        if is_outermost and type(child) is nn.Sequential and len(child) > 2:
            names.append(name)
    if not names:
        raise ValueError("there is no nn.Sequential")
    checkpoint_activations(module, blocks=names, segments=2)
    return change(request, module=module)


def without_logits(request: Request) -> Request:
    """Returns the request with the last linear layer in a :class:`LinearCrossEntropy`.

    Raises:
        ValueError: the model does not end in a linear layer, or the loss is another one.
    """
    module, criterion = copy.deepcopy(request.module), request.criterion
    linear = [name for name, child in module.named_modules() if type(child) is nn.Linear]
    if type(criterion) is not nn.CrossEntropyLoss or not linear:
        raise ValueError("there is no linear layer before a cross-entropy loss")
    *path, name = linear[-1].split(".")
    head: Any = module.get_submodule(linear[-1])
    setattr(module.get_submodule(".".join(path)), name, nn.Identity())
    fused = LinearCrossEntropy(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
    return change(request, module=module, criterion=fused)


def change(request: Request, **changes: Any) -> Request:
    """Returns a copy of the request."""
    values = {**vars(request), **changes}
    return Request(**values)


def _convert(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
