"""``memory.plan``: the cheapest way to fit an effective batch on given devices, with the lines to
write.

:class:`Search` traces combinations of savings, the cheapest first, until one of them fits and is
fast::

    as it is  ->  loss without logits  ->  checkpoints  ->  offloaded activations  ->  the same in bf16, and with bf16 parameters
        |
        '-- each of them also with BalancedOptimizer and FSDP2, on several devices

Each trace is logged before it starts (``logging``, level ``INFO``), since a search may take long.
"""

import dataclasses
import html
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from .. import BalancedOptimizer, DataParallelCriterion, TrainStep, parallelize
from ..batch.plan import split_sizes
from ..runtime import values
from ..savings.saving import Savings
from ..strategies.parallelize import detect_ranks
from .candidates import HEADERS, TAKES_ANY_ROWS, WIDTHS, Choice, Option, Search, row_of
from .estimation import MakeOptimizer, make_report, make_request
from .problem import LossFunction, Problem
from .report import Capacity, MemoryReport, json_of, parse_each, verdict_of, write_page
from .savings import PLANNED, PlannedSaving, savings_of
from .trace.layouts import OptimizerChoice, trained, wrap
from .trace.stacks import find_stack
from .trace.tracer import keeping_processes

_NOTES = {
    "replica": "batch norm uses the statistics of each replica's rows, so the result is not that of the whole batch: "
    "convert_sync_batchnorm(module) makes it use all rows of a forward",
    "micro-batch": "batch norm uses the statistics of each micro-batch, so the result is not that of the whole batch: "
    "a norm within each row, such as LayerNorm, has none",
}
_UNKNOWN_DIVISOR = (
    "the divisor of the loss is not known before it runs: a function of sums is exact, another loss needs weight= in plan.apply, "
    "as in DataParallelCriterion"
)
MATERIALIZE = 'module.to_empty(device="cpu")  # it is on meta, without values: load them here'
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_IMPORTED = "BalancedOptimizer", "TrainStep", "parallelize", "savings"
_SHARDS = (
    "fsdp: a tenth of a GPU stays free, since published programs of FSDP need more than is predicted: "
    "of FSDP1 3 to 45 %"
)
_RESERVED = (
    "reserved: what the allocator takes from the device after it gave back its cache; this must fit"
)


@dataclass(frozen=True)
class MemoryPlan:
    """The way to run an effective batch within the capacity of each device.

    The example of :func:`plan` makes one.

    Attributes:
        batch_size: rows per update.
        capacity: bytes of each device, over all hosts.
        choices: all that were traced. The chosen one is the first, if any fits. Those with another
            optimizer are the last.
        fits: the first choice fits.
        lines: a program that applies the chosen one to ``module``, ``criterion``, ``inputs`` and
            ``targets``.
        needs: if none fits, the capacity in bytes that one row per device needs, and the number of
            devices that would suffice (None if no number would).
        hosts: number of hosts.
        dim: the dimension of the rows.
        untried: names of options that were not traced, since a cheaper one fits, or one that needs
            less memory does not.
        skipped: names of options that could not be traced, with the reasons.
        remarks: savings that no trace has, as text.
        unknown_divisor: the loss needs a ``weight=`` if it is not a function of sums.
        kind_capacity: bytes of a device of this kind; None for no limit.
        assumed: what a user may not expect of the devices.
        report: the estimate of the chosen one.
    """

    batch_size: int
    capacity: tuple[int, ...]
    device_kind: str
    choices: tuple[Choice, ...]
    fits: bool
    lines: tuple[str, ...] = ()
    needs: tuple[int, int | None] | None = None
    hosts: int = 1
    dim: int = 0
    untried: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    remarks: tuple[str, ...] = ()
    unknown_divisor: bool = False
    kind_capacity: int | None = None
    assumed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    report: MemoryReport | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def chosen(self) -> Choice:
        """The cheapest choice that fits. Raises ``ValueError`` if there is none."""
        if not self.fits:
            raise ValueError(self.verdict)
        return self.choices[0]

    @property
    def devices(self) -> int:
        """The number of devices, over all hosts."""
        return len(self.capacity)

    @property
    def micro_batch_size(self) -> int:
        """The most rows of a device in one forward."""
        return self.chosen.micro_batch_size

    @property
    def verdict(self) -> str:
        """The first line: what fits, or the nearest that would."""
        size = max(self.capacity)
        most = self.kind_capacity or size
        if size <= most:
            return self._fit
        return f"{self._fit}; but {self.device_kind} has {values.format_bytes(most)} and not {values.format_bytes(size)}"

    @property
    def _fit(self) -> str:
        if self.fits:
            forwards = _count(self.chosen.micro_batches, "micro-batch", "micro-batches")
            # Ranks are alike.
            sizes = zip(self.chosen.reserved, self.capacity, strict=False)
            return verdict_of(sizes, f"{self._rows} in {forwards}, ")
        assert self.needs is not None
        size, count = self.needs
        of_size = f"devices of {values.format_bytes(max(self.capacity))}"
        nearest = f"{count} {of_size}" if count is not None else "larger devices"
        others = [choice.optimizer for choice in self.choices if choice.fits and choice.optimizer]
        instead = f"; or optimizer={others[0]}, which makes another result" if others else ""
        what = "this update" if self.choices[0].is_whole else "one row per device"
        return f"does not fit: needs {values.format_bytes(size)} for {what}, nearest that does: {nearest}{instead}"

    @property
    def _rows(self) -> str:
        if self.chosen.split:
            return f"{' + '.join(f'{weight:.0f}' for weight in self.chosen.split)} rows at most"
        rows = -(-self.batch_size // (self.devices * self.chosen.micro_batches))
        return f"{_count(rows, 'row', 'rows')} per device"

    def apply(
        self,
        module: nn.Module,
        criterion: LossFunction,
        *,
        optimizer: MakeOptimizer = torch.optim.AdamW,
        device_ids: Sequence[int | str | torch.device] | None = None,
        weight: Callable[..., torch.Tensor] | None = None,
        max_grad_norm: float | None = None,
        **defaults: Any,
    ) -> tuple[Any, DataParallelCriterion, torch.optim.Optimizer, TrainStep]:
        """Makes the model, the criterion, the optimizer and the step of the plan.

        The savings change ``module`` in place.

        A plan for ranks (``chosen.layout``) is applied by each of them, under torchrun.

        Args:
            module, criterion: those of the plan. A :class:`DataParallelCriterion` stays as it is.
            optimizer: its class. ``defaults`` are its settings: ``lr`` and so on.
            device_ids: as many as in the plan. ``None`` takes the first of the visible devices, or
                that of the rank.
            weight, max_grad_norm: as in :class:`DataParallelCriterion` and :class:`TrainStep`.

        Raises:
            ValueError: nothing fits, or the number of devices is not that of the plan.
        """
        chosen = self.chosen
        if chosen.is_whole:
            raise ValueError(
                "a plan of layout='step' has no TrainStep, expected its lines to be run"
            )
        if not chosen.is_distributed:
            if device_ids is None and torch.accelerator.is_available():
                device_ids = list(range(self.devices))
            if device_ids is not None and len(device_ids) != self.devices:
                raise ValueError(
                    f"device_ids has {len(device_ids)} devices, expected the {self.devices} that were planned for"
                )
        else:
            environment = detect_ranks(chosen.layout)
            if environment is not None and environment.world_size != self.devices:
                raise ValueError(
                    f"{environment.world_size} ranks are running, expected the {self.devices} that were planned for"
                )
        savings = Savings(chosen.savings)
        savings.change_module(module)
        if not isinstance(criterion, DataParallelCriterion):
            criterion = DataParallelCriterion(criterion, dim=self.dim, weight=weight)
        model, criterion = parallelize(module, criterion, device_ids, **_parallel_settings(self))
        learned = [*model.parameters(), *criterion.parameters()]
        kind: Any = optimizer
        trained = (
            BalancedOptimizer(model, kind, learned, **defaults)
            if chosen.balanced_optimizer
            else kind(learned, **defaults)
        )
        savings.change_optimizers([trained])
        step = TrainStep(
            model,
            criterion,
            trained,
            max_grad_norm=max_grad_norm,
            surround=savings.around_update,
            **_step_settings(chosen),
        )
        return model, criterion, trained, step

    def save_html(self, path: Path | str) -> None:
        """Writes the page of :meth:`MemoryReport.save_html` about the chosen way, with a table of
        all choices.

        Raises:
            ImportError: plotly is not installed.
            ValueError: nothing fits, or this plan was read from JSON.
        """
        if self.report is None:
            raise ValueError(
                f"there is no report to show: {'this plan was read from JSON' if self.fits else self.verdict}"
            )
        write_page(
            path,
            self.report,
            self.capacity[: self.report.devices],
            self.verdict,
            self._repr_html_(),
        )

    def to_json(self) -> str:
        """Returns the plan as JSON, without its report."""
        return json_of(vars(self) | {"verdict": self.verdict}, "report")

    @classmethod
    def from_json(cls, text: str) -> "MemoryPlan":
        """Returns the plan that :meth:`to_json` wrote."""
        values = _with_tuples(json.loads(text))
        del values["verdict"]
        return cls(**values | {"choices": tuple(Choice(**choice) for choice in values["choices"])})

    def __str__(self) -> str:
        return self.describe()

    def describe(self, *, verbose: bool = False) -> str:
        """Returns the plan as text of at most 100 columns; ``verbose`` with what was not tried, and
        savings by hand.
        """
        notes = [textwrap.fill(note, 100, break_long_words=False) for note in self._notes(verbose)]
        program = ["\n".join(f"    {line}".rstrip() for line in self.lines)] if self.lines else []
        return "\n\n".join(
            [self.verdict, *program, self._title, self._table("simple", WIDTHS), *notes]
        )

    def _repr_html_(self) -> str:
        """Returns the plan as HTML, for notebooks."""
        verdict, title, *notes = (
            f"<p>{html.escape(text)}</p>" for text in (self.verdict, self._title, *self._notes())
        )
        program = f"<pre>{html.escape(chr(10).join(self.lines))}</pre>" if self.lines else ""
        return "".join([verdict, program, title, self._table("html"), *notes])

    def _table(self, style: str, widths: Sequence[int | None] | None = None) -> str:
        rows = map(row_of, self.choices)
        return tabulate(rows, HEADERS, style, disable_numparse=True, maxcolwidths=widths)

    @property
    def _title(self) -> str:
        devices = f"{self.devices // self.hosts} x {self.device_kind}"
        if self.hosts > 1:
            devices = f"{self.hosts} hosts of {devices}"
        count = self.devices if len(set(self.capacity)) > 1 else 1
        capacity = " + ".join(map(values.format_bytes, self.capacity[:count]))
        return f"{self.batch_size} rows per update on {devices} with {capacity}"

    def _notes(self, verbose: bool = False) -> Iterator[str]:
        yield _RESERVED
        yield from (f"{name}: {remark}" for name, remark in self.assumed.items())
        if note := _NOTES.get(self.choices[0].statistics or ""):
            yield note
        if self.choices[0].layout == "fsdp":
            yield _SHARDS
        if self.unknown_divisor:
            yield _UNKNOWN_DIVISOR
        for name, reason in self.skipped:
            yield f"skipped: {name}: {reason}"
        if self.remarks and (verbose or not self.fits):
            yield f"by hand: {'; '.join(self.remarks)}"
        if self.untried and verbose:
            yield f"not tried (`tricks` measures each saving): {'; '.join(self.untried)}"


def _count(number: int, singular: str, plural: str) -> str:
    """Returns a number of things as text."""
    return f"{number} {singular if number == 1 else plural}"


def _parallel_settings(plan: MemoryPlan) -> dict[str, Any]:
    """Returns the settings of :func:`parallelize` besides its devices."""
    chosen = plan.chosen
    if not chosen.is_distributed:
        return {"split": chosen.split, "dim": plan.dim}
    return {"dim": plan.dim, "strategy": chosen.layout, "precision": chosen.precision}


def _step_settings(chosen: Choice) -> dict[str, Any]:
    return {"micro_batch_size": chosen.micro_batch_size, "precision": chosen.precision}


def _with_tuples(value: Any) -> Any:
    """Returns what was read from JSON with tuples in place of lists."""
    if isinstance(value, dict):
        return {name: _with_tuples(each) for name, each in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


@values.naming_arguments
def plan(
    module: nn.Module,
    criterion: LossFunction,
    inputs: object,
    targets: object,
    *,
    batch_size: int,
    capacity: Capacity | None = None,
    devices: int = 1,
    hosts: int = 1,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    precision: values.PrecisionName = "fp32",
    device_kind: str | None = None,
    dim: int = 0,
    scalar: float | None = None,
    layout: str | None = None,
    seconds: float = math.inf,
) -> MemoryPlan:
    """Plans the cheapest way to fit an effective batch on the devices of one host, or of several.

    The plan chooses the layout (replicas, :class:`BalancedOptimizer`, FSDP2; on one device, the
    optimizer on the host), the number of micro-batches, the split over unequal devices, the loss of
    a language model without its logits, checkpointing of the module's repeated blocks, and
    offloaded activations. If none of these suffices, it tries the same in bf16, which changes the
    result. The cheapest choice takes the least time, where a byte of traffic takes as long as 3,000
    operations, or 300 in fp32. If nothing fits, optimizers with less state are shown as
    alternatives. An option that cannot be traced is skipped, and named with the reason. Each option is
    logged (``logging``, ``INFO``).

    Args:
        module, criterion, inputs, targets, optimizer, device_kind, dim, scalar: as for
            :func:`estimate`. Inputs and targets give the shapes; their number of rows does not
            matter.
        batch_size: rows per update over all devices. Any number, also one that does not divide
            evenly.
        capacity: bytes or text such as ``"24GiB"``, for each device of a host or one for all.
            ``None`` is that of the kind.
        devices: number of devices of a host.
        hosts: number of hosts with as many devices each. With several, every device has a rank of
            torchrun.
        precision: the precision to try first.
        layout: ``"step"`` for an update in your own words, as for :func:`estimate`. It runs whole
            on one device: only savings that need no knowledge of it are tried.
        seconds: time for the search. After it, and after Ctrl-C, the best option so far is the
            plan.

    Raises:
        ValueError: a setting is out of its range, :func:`estimate` refuses it, or no option can be
            traced.
        TimeoutError: no option that fits was found in ``seconds``.

    Example:
        >>> net, batch = torch.nn.Linear(256, 256), (torch.zeros(8, 256), torch.zeros(8, 256))
        >>> found = plan(net, torch.nn.MSELoss(), *batch, batch_size=4096, capacity="6MiB", devices=2, device_kind="cpu")
        >>> found.fits, found.chosen.micro_batches
        (True, 2)
        >>> model, criterion, optimizer, step = found.apply(net, torch.nn.MSELoss(), device_ids=["cpu"] * 2, lr=1e-3)
        >>> step(torch.zeros(4096, 256), torch.zeros(4096, 256)).shape
        torch.Size([])
        >>> MemoryPlan.from_json(found.to_json()) == found
        True
    """
    values.check_positive(devices=devices, hosts=hosts, batch_size=batch_size)
    if layout not in (None, "step"):
        raise ValueError(f"layout={layout!r}, expected 'step', or None: the plan chooses it")
    request = make_request(
        Problem(module, criterion, inputs, targets, dim, scalar),
        optimizer=optimizer,
        precision=precision,
        layout=layout or ("replicas" if hosts == 1 else "ddp"),
        devices=devices * hosts,
        device_kind=device_kind,
    )
    if capacity is None and (capacity := request.kind.capacity) is None:
        raise ValueError(
            f"capacity=None with device_kind={request.kind.name!r}, which has none: expected a size, as '24GiB'"
        )
    limits = parse_each(capacity, devices) * hosts
    request = dataclasses.replace(request, stack=find_stack(module))
    with keeping_processes(request, seconds):
        search = Search(request, limits, batch_size)
        search.run()
        if not search.choices:
            name, reason = next(iter(search.skipped.items()))
            raise ValueError(f"{name}: {reason}; {TAKES_ANY_ROWS}")
        ranked = sorted(
            search.choices.items(),
            key=lambda pair: (pair[1].optimizer is not None, not pair[1].fits, pair[1].cost),
        )
        how, best = ranked[0]
        needs = None if best.fits else search.what_would_fit()
    result = MemoryPlan(
        batch_size=batch_size,
        capacity=limits,
        device_kind=request.kind.name,
        choices=tuple(choice for _, choice in ranked),
        fits=best.fits,
        needs=needs,
        hosts=hosts,
        dim=dim,
        untried=tuple(search.untried()),
        skipped=tuple(search.skipped.items()),
        remarks=tuple(
            f"{planned.saving.name} ({planned.saving.cost})"
            for planned in savings_of("by hand", "optimizer")
            if not planned.change
        ),
        unknown_divisor=not (best.is_whole or wrap(criterion).kind.knows_divisor),
        kind_capacity=request.kind.capacity,
        assumed=request.kind.remarks(best.precision),
    )
    if not best.fits:
        return result
    lines = write_program(result, module, criterion, optimizer)
    return dataclasses.replace(result, lines=lines, report=_report(how, best))


def _report(option: Option, choice: Choice) -> MemoryReport:
    """Makes the report from the traces of the plan.

    Unequal shares, and less than two rows per device, are traced again.
    """
    count = choice.micro_batches
    rows = -(-option.rows // count)
    request = dataclasses.replace(option.request, micro_batches=count, split=choice.split)
    if choice.split or rows < 2 * option.step:
        return make_report(request, rows)
    lines = option.lines(count)
    sizes = (
        None
        if option.is_distributed
        else [size * option.step for size in split_sizes(rows, request.devices)]
    )
    return make_report(request, rows, lines, sizes)


def write_program(
    plan: MemoryPlan,
    module: nn.Module,
    criterion: LossFunction,
    make: MakeOptimizer,
) -> tuple[str, ...]:
    """Returns the lines that apply a plan to its problem, as :meth:`MemoryPlan.apply` does."""
    chosen = plan.chosen
    applied = [planned for planned in PLANNED if planned.saving.name in chosen.savings]
    if chosen.is_whole:
        program = _lines_of_step(chosen, applied)
    else:
        program = _lines_of_update(plan, applied, criterion, make)
        if any(parameter.is_meta for parameter in module.parameters()):
            program.insert(0, MATERIALIZE)
    text = "\n".join(program)
    names = [name for name in _IMPORTED if name in text]
    if names:
        program = [f"from balanced_parallel import {', '.join(names)}", "", *program]
    program.insert(0, "import torch")
    if chosen.is_distributed:
        hosts = f" --nnodes={plan.hosts}" if plan.hosts > 1 else ""
        command = f"torchrun{hosts} --nproc-per-node={plan.devices // plan.hosts} train.py"
        program.insert(0, f"# {command}; every rank passes its own rows, {plan.batch_size} in all")
    return tuple(program)


def _lines_of_step(chosen: Choice, applied: Sequence[PlannedSaving]) -> list[str]:
    """Returns the lines around an update in the user's own words."""
    around = _lines_of(applied, "surround")
    if chosen.precision != "fp32":
        around.insert(0, f'with torch.autocast("cuda", torch.{_DTYPES[chosen.precision]}):')
    return [
        *_lines_of(applied, "change_module"),
        "optimizer = make_optimizer(module)",
        *(f"{line}  # each of several" for line in _lines_of(applied, "change_optimizer")),
        *indented([*around, "update(module, optimizer, *inputs, *targets)"]),
    ]


def _lines_of_update(
    plan: MemoryPlan,
    applied: Sequence[PlannedSaving],
    criterion: LossFunction,
    make: MakeOptimizer,
) -> list[str]:
    """Returns the lines that make a step and run it."""
    chosen = plan.chosen
    arguments = [planned.saving.name for planned in applied if not planned.line]
    devices = {"device_ids": list(range(plan.devices))} if chosen.split else {}
    parallel = {name: value for name, value in _parallel_settings(plan).items() if value}
    return [
        *_lines_of(applied, "change_module"),
        f"model, criterion = parallelize(module, criterion{_text(devices | parallel)})",
        f"optimizer = {_optimizer(chosen, criterion, make, arguments)}",
        *_lines_of(applied, "change_optimizer"),
        f"step = TrainStep(model, criterion, optimizer{_text(_step_settings(chosen))})",
        *indented([*_lines_of(applied, "surround"), "loss = step(inputs, targets)"]),
    ]


def _lines_of(applied: Sequence[PlannedSaving], change: str) -> list[str]:
    return [planned.line for planned in applied if planned.line and getattr(planned.saving, change)]


def indented(lines: Iterable[str]) -> Iterator[str]:
    """Yields lines that are inside of each other."""
    for depth, line in enumerate(lines):
        yield "    " * depth + line


def _optimizer(
    chosen: Choice,
    criterion: object,
    make: MakeOptimizer,
    settings: Sequence[str],
) -> str:
    """Returns the call that makes the optimizer. ``settings`` are those that save memory."""
    maker = OptimizerChoice(make)
    is_of_torch = getattr(torch.optim, maker.name, None) is maker.plain_make
    name = f"torch.optim.{maker.name}" if is_of_torch else maker.name
    learned = "model.parameters()"
    if isinstance(criterion, nn.Module) and trained(criterion.parameters()):
        learned = "[*model.parameters(), *criterion.parameters()]"
    call = f"BalancedOptimizer(model, {name}, " if chosen.balanced_optimizer else f"{name}("
    return f"{call}{', '.join([learned + _text(maker.settings), *settings])})"


def _text(settings: Mapping[str, object]) -> str:
    """Returns keyword arguments as they are written, without those that have their defaults."""
    return "".join(
        f", {name}={json.dumps(value) if isinstance(value, str) else repr(value)}"
        for name, value in settings.items()
        if value != "fp32"
    )
