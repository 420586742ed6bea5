"""The known tricks against running out of memory, each with the bytes that it saves for one model."""

import dataclasses
import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

from ..runtime.byte_sizes import format_bytes
from .estimation import report_of
from .report import MemoryReport
from .request import make_request
from .small_optimizers import smaller_optimizers
from .trace.coupled_update import plain_criterion
from .trace.inplace_names import with_inplace_activations
from .trace.strategies import Replicas
from .trace.traced_request import Request
from .trace.tracer import Job
from .trick_rows import Comparison, Trick, measure_rows
from .trick_variants import (
    change,
    checkpoint_sequential,
    evaluation,
    half_input,
    in_bfloat16,
    keeping,
    with_zeroed_gradients,
    without_logits,
)

__all__: list[str] = []


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
    layout = "single" if devices == 1 else Replicas.name
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
    twice = change(request, layout=Replicas, devices=2 * request.devices)
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
