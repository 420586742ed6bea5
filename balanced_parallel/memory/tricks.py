"""The table of tricks: what each saving of a plan alone would save of one model's peak, and what it costs.

The rows are the list of savings in :mod:`remedies`, with micro-batches, and with a :class:`LinearCrossEntropy` for a model that
ends in a linear layer before a cross-entropy loss, which is a change of the user's code. Each is traced beside the plain step.
"""

import copy
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from ..runtime.values import format_bytes
from ..savings.linear_cross_entropy import LinearCrossEntropy
from .estimation import report_of
from .lines import Lines
from .remedies import BALANCED, LOGITS, SAVINGS, Saving, other_optimizers
from .report import MemoryReport
from .request import make_request
from .trace.layouts import ReplicaLayout, Request, plain_criterion
from .trace.tracer import Trace, try_traces

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

    def __str__(self) -> str:
        rows = [
            [trick.name, "-", "", trick.cost]
            if trick.saves is None
            else [trick.name, format_bytes(trick.saves), f"{trick.saves / self.peak:.0%}", trick.cost]
            for trick in self.tricks
        ]
        table = tabulate(rows, ["trick", "saves", "of the peak", "cost"], "simple", disable_numparse=True)
        return f"peak without tricks: {format_bytes(self.peak)} on the busiest device\n\n{table}"


def measure_tricks(module: Any, criterion: Any, inputs: Any, targets: Any, *, devices: int = 1, **settings: Any) -> TrickTable:
    """Traces a step of the plain program, and the same step with each saving.

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
    options = [(saving, saving.apply(request)) for saving in _savings_of(request)]
    jobs = [(option, -(-option.rows_per_micro_batch // option.row_step) * option.row_step) for _, option in options if option]
    traces = iter(try_traces(jobs))
    tricks = tuple(_trick(saving, next(traces) if option else None, request, peak) for saving, option in options)
    return TrickTable(peak, tricks, report)


def _trick(saving: Saving, trace: Trace | str | None, request: Request, peak: int) -> Trick:
    if not isinstance(trace, Trace):
        return Trick(saving.name, None, f"not for this model: {trace[:80]}" if trace else "not for this model")
    lines = Lines.exact(trace, request)
    after = max(lines.peak(device) for device in request.layout.traced_devices(request.devices))
    return Trick(saving.name, peak - after, saving.cost)


def _savings_of(request: Request) -> Iterator[Saving]:
    yield Saving("2 micro-batches", "", "smaller kernels", lambda plain: dataclasses.replace(plain, micro_batches=2))
    left_out = [LOGITS] if request.devices > 1 else [LOGITS, BALANCED]
    yield from (saving for saving in SAVINGS if saving not in left_out)
    if LOGITS.apply(request):
        yield LOGITS
    else:
        yield Saving("LinearCrossEntropy", LOGITS.option, LOGITS.cost, without_logits)
    yield from other_optimizers(request.optimizer)


def without_logits(request: Request) -> Request | None:
    """Returns the request with the last linear layer in a :class:`LinearCrossEntropy`; None if its loss does not follow one."""
    module = copy.deepcopy(request.module)
    linear = [name for name, child in module.named_modules() if type(child) is nn.Linear and name]
    if type(request.criterion) is not nn.CrossEntropyLoss or not linear:
        return None
    path, _, name = linear[-1].rpartition(".")
    head: Any = module.get_submodule(linear[-1])
    setattr(module.get_submodule(path), name, nn.Identity())
    fused = LinearCrossEntropy(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
    return dataclasses.replace(request, module=module, criterion=fused)
