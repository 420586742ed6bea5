"""The savings that a plan can apply: the one list that ``plan``, ``fit`` and the table of tricks read.

Each changes the request of a step, which is then traced and compared with the plain one. The table has also micro-batches, and a
:class:`LinearCrossEntropy` for a model that ends in a linear layer before a cross-entropy loss: a change of the user's code.
"""

import copy
import dataclasses
import functools
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tabulate import tabulate
from torch import nn

from ..runtime.values import format_bytes
from ..savings.checkpointing import find_blocks
from ..savings.linear_cross_entropy import LinearCrossEntropy
from .estimation import make_request, report_of
from .lines import Lines
from .report import MemoryReport
from .trace.layouts import ReplicaLayout, Request, SingleDevice, plain_criterion
from .trace.optimizers import OptimizerChoice
from .trace.tracer import Trace, try_traces


@dataclass(frozen=True)
class Saving:
    """A way to need less memory: ``name`` is the function, the class or the setting, ``option`` its name in a plan.

    ``apply`` returns the request with it, or None if it does not suit the request or is applied already.
    """

    name: str
    option: str
    cost: str
    apply: Callable[[Request], Request | None]
    result: Literal["exact", "other arithmetic", "another optimizer"] = "exact"


def with_savings(request: Request, savings: Iterable[Saving]) -> Request | None:
    """Returns the request with all of ``savings``, or None if one of them does not suit it."""
    for saving in savings:
        changed = saving.apply(request)
        if changed is None:
            return None
        request = changed
    return request


def _leave_out_logits(request: Request) -> Request | None:
    return _with_saving("replace_lm_head", request) if "labels" in request.inputs.kwargs else None


def _balance(request: Request) -> Request | None:
    is_possible = request.devices > 1 and request.layout.takes_balanced_optimizer and not request.balanced
    return dataclasses.replace(request, balanced=True) if is_possible else None


def _checkpoint(request: Request) -> Request | None:
    blocks = () if request.blocks else find_blocks(request.module)
    return dataclasses.replace(request, blocks=blocks) if blocks else None


def _with_saving(name: str, request: Request) -> Request | None:
    return None if name in request.savings else dataclasses.replace(request, savings=(*request.savings, name))


def _use_bf16(request: Request) -> Request | None:
    return dataclasses.replace(request, precision="bf16") if request.precision == "fp32" else None


# in the order in which their names are put together
LOGITS = Saving("replace_lm_head", "loss without logits", "nothing; the logits do not exist", _leave_out_logits)
BALANCED = Saving("BalancedOptimizer", "BalancedOptimizer", "traffic of the updated parameters", _balance)
CHECKPOINT = Saving("checkpoint_activations", "checkpointed blocks", "operations that run twice", _checkpoint)
_offload = functools.partial(_with_saving, "offload_activations")
OFFLOAD = Saving("offload_activations", "offloaded activations", "traffic to the host and back", _offload)
BF16 = Saving('precision="bf16"', "bf16", "other arithmetic", _use_bf16, "other arithmetic")
SAVINGS = (LOGITS, BALANCED, CHECKPOINT, OFFLOAD, BF16)


def other_optimizers(choice: Any) -> list[Saving]:
    """Returns optimizers with less state than that of a request, the smallest first, as savings."""
    savings = []
    for other in smaller_optimizers(choice) if isinstance(choice, OptimizerChoice) else ():
        change = functools.partial(dataclasses.replace, optimizer=other)
        savings.append(Saving(f"another optimizer: {other.name}", other.name, "another result", change, "another optimizer"))
    return savings


def AdamW8bit(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    """Makes the optimizer of torchao. It compiles its update; a trace runs the operators one by one, which need more memory."""
    make: Callable[..., torch.optim.Optimizer] = importlib.import_module("torchao.optim").AdamW8bit
    return make(parameters, **settings)


def smaller_optimizers(choice: OptimizerChoice) -> list[OptimizerChoice]:
    """Returns optimizers with less state than the given one, the smallest first.

    SGD has none. Adafactor has a row and a column for each matrix. The 8-bit AdamW of torchao, where that is installed, has two
    bytes per element.
    """
    if choice.name == "SGD" and not choice.plain([torch.nn.Parameter(torch.zeros(1))])[0].param_groups[0]["momentum"]:
        return []
    makers: list[Callable[..., torch.optim.Optimizer]] = [torch.optim.SGD, torch.optim.Adafactor]
    if importlib.util.find_spec("torchao") is not None:
        makers.append(AdamW8bit)
    names = [getattr(maker, "__name__", "") for maker in makers]
    if choice.name in names[1:]:
        makers = makers[: names.index(choice.name)]
    return [OptimizerChoice(maker, choice.foreach) for maker in makers]


@dataclass(frozen=True)
class Trick:
    """One row of the table: bytes of the busiest device at its peak, or None if the trick does not apply to this model."""

    name: str
    saves: int | None
    cost: str


@dataclass(frozen=True)
class TrickTable:
    """The tricks for one model. ``peak`` (bytes of the busiest device) and ``report`` are those of the plain program."""

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
    """Traces a step of the plain program, and the same step with each saving. Several devices are replicas.

    ``settings`` are ``optimizer``, ``precision``, ``device_kind``, ``dim`` and ``scalar``, as for :func:`estimate`.
    """
    layout = (SingleDevice if devices == 1 else ReplicaLayout).name
    request = make_request(module, plain_criterion(criterion), inputs, targets, layout=layout, devices=devices, **settings)
    report = report_of(request, request.rows)
    peak = max(report.allocated)
    options = [(saving, saving.apply(request)) for saving in _savings_of(request)]
    jobs = [(option, option.round_up(option.rows_per_micro_batch)) for _, option in options if option]
    traces = iter(try_traces(jobs))
    tricks = []
    for saving, option in options:
        trace = next(traces) if option else ""
        if option and isinstance(trace, Trace):
            tricks.append(Trick(saving.name, peak - max(Lines(option, trace).allocated_by_device()), saving.cost))
        else:
            tricks.append(Trick(saving.name, None, f"not for this model: {str(trace)[:80]}" if option else "not for this model"))
    return TrickTable(peak, tuple(tricks), report)


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
