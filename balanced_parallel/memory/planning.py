"""``memory.plan``: the cheapest way to fit an effective batch on given devices.

Combinations of savings are traced in stages, the cheapest first, until one of them fits:

    as it is  ->  loss without logits  ->  checkpointed blocks  ->  offloaded activations  ->  the same in bf16
        |
        '-- each of them also with BalancedOptimizer, on several devices

Each stage is logged before it starts (``logging``, level ``INFO``), since a search may take long.
"""

import dataclasses
import functools
import html
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from ..batch.by_cost import ByCost
from ..batch.plan import split_sizes
from ..loss.criterion import DataParallelCriterion
from ..loss.rules import is_known
from ..replicas.model import DataParallelModel
from ..runtime.devices import DeviceLike
from ..runtime.values import check_number, format_bytes, parse_each
from ..savings.checkpointing import checkpoint_blocks
from ..savings.offloading import offload_activations
from ..training.step import TrainStep
from .candidates import SCALARS, Choice, Option, measure_what_decides, row_of
from .estimation import make_report, make_request, report_of
from .lengths import check_lengths, trace_lengths, with_length
from .remedies import BALANCED, BF16, CHECKPOINT, LOGITS, OFFLOAD, Saving, other_optimizers, with_savings
from .report import MemoryReport, write_page
from .trace.layouts import Request, plain_criterion
from .trace.optimizers import OptimizerChoice
from .trace.savings import change_module
from .trace.tracer import Trace, try_traces

_log = logging.getLogger(__name__)
MakeOptimizer = Callable[..., torch.optim.Optimizer]
_NOTES = {
    "replica": "batch norm uses the statistics of each replica's rows, so the result is not that of the whole batch: "
    "convert_sync_batchnorm(module) makes it use all rows of a forward",
    "micro-batch": "batch norm uses the statistics of each micro-batch, so the result is not that of the whole batch: "
    "a norm within each row, such as LayerNorm, has none",
}
_UNKNOWN_DIVISOR = (
    "the divisor of the loss is not known, and without weight= each row counts the same: give weight= to plan.apply, as to "
    "DataParallelCriterion"
)


@dataclass(frozen=True)
class MemoryPlan:
    """The way to run an effective batch within the capacity of each device. The example of :func:`plan` makes one.

    Attributes:
        batch_size: rows per update.
        capacity: bytes of each device.
        choices: all that were traced. The chosen one is the first, if any fits. Those with another optimizer are the last.
        fits: the first choice fits.
        needs: if none fits, the capacity in bytes that one row per device needs, and the number of devices that would suffice
            (None if no number would).
        dim: the dimension of the rows.
        micro_batch_cost: the largest ``rows x longest`` of a device in one forward, if the plan was made for lengths.
        trim: the dimension of the lengths.
        untried: names of options that were not traced. They cost more operations or change the result, and a cheaper one fits.
        unknown_divisor: the loss needs a ``weight=`` to be exact.
        report: the estimate of the chosen one.
    """

    batch_size: int
    capacity: tuple[int, ...]
    device_kind: str
    choices: tuple[Choice, ...]
    fits: bool
    needs: tuple[int, int | None] | None = None
    dim: int = 0
    untried: tuple[str, ...] = ()
    micro_batch_cost: int | None = None
    trim: int = 1
    unknown_divisor: bool = False
    report: MemoryReport | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def chosen(self) -> Choice:
        """The cheapest choice that fits.

        Raises:
            ValueError: nothing fits.
        """
        if not self.fits:
            raise ValueError(f"nothing fits: {self.advice}")
        return self.choices[0]

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.capacity)

    @property
    def micro_batch_size(self) -> int:
        """The most rows of a device in one forward."""
        return self.chosen.micro_batch_size

    @property
    def advice(self) -> str:
        """The capacity and the number of devices that would fit, and another optimizer that would, as text."""
        assert self.needs is not None
        size, count = self.needs
        of_size = f"devices of {format_bytes(max(self.capacity))}"
        more = f"no number of {of_size} would do" if count is None else f"or {count} {of_size}"
        others = [choice.optimizer for choice in self.choices if choice.fits and choice.optimizer]
        instead = f"; with optimizer={others[0]} it fits, which makes another result" if others else ""
        return f"one row per device needs devices of {format_bytes(size)}, {more}{instead}"

    def apply(
        self,
        module: torch.nn.Module,
        criterion: Callable[..., Any],
        *,
        optimizer: MakeOptimizer = torch.optim.AdamW,
        device_ids: Sequence[DeviceLike] | None = None,
        weight: Callable[..., Any] | None = None,
        max_grad_norm: float | None = None,
        cost: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        **defaults: Any,
    ) -> tuple[DataParallelModel, DataParallelCriterion, torch.optim.Optimizer, TrainStep]:
        """Makes the model, the criterion, the optimizer and the step of the plan. The savings change ``module`` in place.

        Args:
            module, criterion: those of the plan. A :class:`DataParallelCriterion` stays as it is.
            optimizer: its class. ``defaults`` are its settings: ``lr`` and so on.
            device_ids: as many as in the plan. ``None`` takes the first of the visible devices.
            weight, max_grad_norm: as in :class:`DataParallelCriterion` and :class:`TrainStep`.
            cost, collate: as in :class:`ByCost`, for a plan with lengths. The cost of a row is its length. Padded batches,
                without ``collate``, are trimmed.

        Raises:
            ValueError: nothing fits, the number of devices is not that of the plan, or a plan with lengths gets no ``cost``.
        """
        chosen = self.chosen
        if (cost is None) != (self.micro_batch_cost is None):
            raise ValueError("expected cost= for a plan that was made with lengths=, and only for such a plan")
        change_module(module, chosen.savings)
        checkpoint_blocks(module, chosen.checkpoint)
        devices = list(range(self.devices)) if device_ids is None and torch.accelerator.is_available() else device_ids
        if devices is not None and len(devices) != self.devices:
            raise ValueError(f"device_ids has {len(devices)} devices, expected the {self.devices} that were planned for")
        model = DataParallelModel(module, devices, dim=self.dim, split=chosen.split)
        is_wrapped = isinstance(criterion, DataParallelCriterion)
        wrapped: Any = criterion if is_wrapped else DataParallelCriterion(criterion, dim=self.dim, weight=weight)
        choice = OptimizerChoice(
            functools.partial(optimizer, **defaults), foreach=False
        )  # torch chooses kernels by itself on real devices
        learned = [*model.parameters(), *wrapped.parameters()]
        (trained,) = choice.balanced(model, learned) if chosen.balanced_optimizer else choice.plain(learned)
        trim = self.trim if collate is None else None
        step = (OffloadingStep if "offload_activations" in chosen.savings else TrainStep)(
            model,
            wrapped,
            trained,
            micro_batch_size=chosen.micro_batch_size if cost is None else None,
            precision=chosen.precision,
            max_grad_norm=max_grad_norm,
            cut=None if cost is None else ByCost(cost, collate=collate, trim=trim, limit=self.micro_batch_cost),
        )
        return model, wrapped, trained, step

    def save_html(self, path: Path | str) -> None:
        """Writes the page of :meth:`MemoryReport.save_html` about the chosen way, with a table of all choices.

        Raises:
            ImportError: plotly is not installed.
            ValueError: nothing fits, or this plan was read from JSON.
        """
        if self.report is None:
            reason = "this plan was read from JSON" if self.fits else f"nothing fits: {self.advice}"
            raise ValueError(f"there is no report to show: {reason}")
        write_page(path, self.report, self.capacity, self._repr_html_())

    def to_json(self) -> str:
        """Returns the plan as JSON, without its report."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "report"}
        return json.dumps(values | {"choices": [dataclasses.asdict(choice) for choice in self.choices]}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "MemoryPlan":
        """Returns the plan that :meth:`to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        choices = tuple(Choice(**_with_tuples(choice)) for choice in values["choices"])
        return cls(**_with_tuples(values) | {"choices": choices})

    def __str__(self) -> str:
        return "\n\n".join([self._title, self._table("simple"), *self._notes])

    def _repr_html_(self) -> str:
        """Returns the plan as HTML, for notebooks."""
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self._notes)
        return f"<p>{html.escape(self._title)}</p>{self._table('html')}{notes}"

    @property
    def _title(self) -> str:
        sizes = self.capacity[:1] if len(set(self.capacity)) == 1 else self.capacity
        shown = " + ".join(map(format_bytes, sizes))
        return f"{self.batch_size} rows per update on {self.devices} x {self.device_kind} with {shown}"

    def _table(self, style: str) -> str:
        headers = ["", "rows at most x micro-batches", "peak", "reserved", "saved", "recomputed", "traffic", "result", "fits"]
        return str(tabulate(map(row_of, self.choices), headers, style, disable_numparse=True))

    @property
    def _notes(self) -> list[str]:
        last = f"chosen: {self.chosen.name}" if self.fits else f"nothing fits: {self.advice}"
        last += "" if self.micro_batch_cost is None else f", with rows x longest of {self.micro_batch_cost} at most per device"
        note = _NOTES.get(self.choices[0].statistics or "", "")
        untried = f"not tried, because less fits (`tricks` measures each): {'; '.join(self.untried)}" if self.untried else ""
        weight = _UNKNOWN_DIVISOR if self.unknown_divisor else ""
        return [*filter(None, [note, weight, untried]), last]


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def plan(
    module: torch.nn.Module,
    criterion: Callable[..., Any],
    inputs: Any,
    targets: Any,
    *,
    batch_size: int,
    capacity: int | str | Sequence[int | str] | None = None,
    devices: int = 1,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    precision: str = "fp32",
    device_kind: str | None = None,
    dim: int = 0,
    scalar: int | float | bool | None = None,
    lengths: tuple[int, int] | None = None,
    trim: int = 1,
) -> MemoryPlan:
    """Plans the cheapest way to fit an effective batch on the devices of one process.

    The plan chooses the number of micro-batches, the split over unequal devices, :class:`BalancedOptimizer`, the loss of a
    language model without its logits, checkpointing of the module's repeated blocks, and offloaded activations. If none of these
    suffices, it tries the same in bf16, which changes the result. The cheapest choice has the fewest operations, then the fewest
    micro-batches, then the least traffic. If nothing fits, optimizers with less state are shown as alternatives.

    Args:
        module, criterion, inputs, targets, optimizer, device_kind, dim, scalar: as for :func:`estimate`. Inputs and targets
            give the shapes; their number of rows does not matter.
        batch_size: rows per update over all devices. Any number, also one that does not divide evenly.
        capacity: bytes or text such as ``"24GiB"``, for each device or one for all. ``None`` is that of the device kind.
        devices: number of devices.
        precision: the precision to try first.
        lengths: the shortest and the longest row. The plan is made for rows of the longest, and has a ``micro_batch_cost``: the
            largest budget such that every shard with ``rows x longest`` within it fits.
        trim: the dimension of the lengths, as for :func:`estimate`.

    Raises:
        ValueError: a setting is out of its range, or :func:`estimate` refuses it.

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
    request = make_request(
        module,
        plain_criterion(criterion),
        inputs,
        targets,
        optimizer=optimizer,
        precision=precision,
        layout="replicas",
        devices=devices,
        device_kind=device_kind,
        dim=dim,
        scalar=scalar,
    )
    if lengths is not None:
        request = with_length(request, trim, check_lengths(request, trim, lengths)[1])
    if capacity is None and (capacity := request.kind.capacity) is None:
        raise ValueError(f"capacity=None with device_kind={request.kind.name!r}, which has none: expected a size, as '24GiB'")
    limits = parse_each(capacity, devices)
    check_number("batch_size", batch_size, "a positive number of rows per update", at_least=1, whole=True)
    stages = [options for options in stages_of(request, limits, batch_size) if options]
    plain = stages[0][0]
    measured: list[Option] = []
    choices: list[Choice] = []
    while stages and not any(choice.fits for choice in choices):
        options = stages.pop(0)
        _log.info("trying: %s", "; ".join(option.name for option in options))
        try:
            measure_what_decides(options, plain)
        except ValueError:
            if not (options[0].optimizer or OFFLOAD in options[0].savings):
                raise
            continue  # an optimizer that cannot be traced here; more rows that are offloaded than others
        measured += options
        choices += [option.choose(plain) for option in options]
    whole = max(plain.lines(1).allocated_by_device(plain.share * devices))
    choices = [dataclasses.replace(choice, saved=whole - max(choice.peak)) for choice in choices]
    ranked = sorted(
        zip(choices, measured, strict=True), key=lambda pair: (pair[0].optimizer is not None, not pair[0].fits, pair[0].cost)
    )
    best, how = ranked[0]
    cost = None
    if lengths is not None and best.fits:
        cost = trace_lengths(dataclasses.replace(how.request, micro_batches=2), trim, lengths).largest_cost(how.limits)
    return MemoryPlan(
        batch_size=batch_size,
        capacity=limits,
        device_kind=request.kind.name,
        choices=tuple(choice for choice, _ in ranked),
        fits=best.fits,
        needs=None if best.fits else what_would_fit([option for option in measured if option.optimizer is None], max(limits)),
        dim=dim,
        untried=tuple(option.name for stage in stages for option in stage),
        micro_batch_cost=cost,
        trim=trim,
        unknown_divisor=_has_unknown_divisor(criterion),
        report=_report(how, best, batch_size) if best.fits else None,
    )


def _has_unknown_divisor(criterion: Any) -> bool:
    if not isinstance(criterion, DataParallelCriterion):
        return not is_known(criterion)
    is_given = criterion.weight is not None or criterion.is_coupled
    return not (is_given or criterion.reduction == "sum" or is_known(criterion.module))


def _report(option: Option, choice: Choice, batch_size: int) -> MemoryReport:
    """Makes the report from the traces of the plan. Unequal shares, and less than two rows per device, are traced again."""
    count, devices = choice.micro_batches, option.request.devices
    rows = -(-batch_size // count)
    request = dataclasses.replace(option.request, micro_batches=count, split=choice.split)
    if choice.split or rows < 2 * devices:
        return report_of(request, rows)
    lines = option.lines(count)
    return make_report(request, rows, lines, lines, [size * devices for size in split_sizes(rows, devices)])


def stages_of(request: Request, capacity: tuple[int, ...], batch_size: int) -> Iterator[list[Option]]:
    """Yields the options, the cheapest first.

    Each stage costs more operations than the one before, or changes the result. It is traced only if nothing before it fits."""

    def options(combinations: Iterable[Sequence[Saving]]) -> list[Option]:
        requests = [(savings, with_savings(request, savings)) for savings in combinations]
        return [Option(savings, changed, capacity, batch_size) for savings, changed in requests if changed is not None]

    # a language model that computes its loss, and of which nothing reads the logits
    changed = with_savings(request, [LOGITS])
    logits = [LOGITS] if changed and isinstance(try_traces([(changed, 2 * request.row_step)])[0], Trace) else []
    blocks = [CHECKPOINT] if with_savings(request, [CHECKPOINT]) else []
    combinations = [(*logits, *blocks[:count], *rest) for count, rest in ((0, ()), (1, ()), (1, (OFFLOAD,)))]
    for savings in dict.fromkeys([(), *combinations, *((*savings, BF16) for savings in combinations)]):
        yield options([savings, (BALANCED, *savings)])
    yield options([other, *logits, *blocks] for other in other_optimizers(request.optimizer))


TRACED_DEVICES = 16  # more take long to trace


def what_would_fit(measured: Sequence[Option], capacity: int) -> tuple[int, int | None]:
    """Returns the capacity at which one row per device fits, and the number of devices at which it fits ``capacity``.

    With :class:`BalancedOptimizer`, the memory of one of ``n`` devices is ``fixed + sharded / n``. Two traces give both terms.
    The result, up to 16 devices, is traced too, with its neighbours. The number is None if no number of devices suffices.
    """

    def lowest(each: Option) -> int:
        devices = each.request.devices
        return max(each.lines(2).reserved(device, devices) or 0 for device in range(devices)) + SCALARS

    least = min(measured, key=lowest)
    savings = tuple({*least.savings, BALANCED})

    @functools.cache
    def lowest_of(count: int) -> int:
        request = dataclasses.replace(least.request, devices=count, balanced=True)
        return lowest(Option(savings, request, (capacity,) * count, request.rows_of_update))

    sharded = (lowest_of(2) - lowest_of(4)) * 4  # 1 / n falls from 1 / 2 to 1 / 4
    free = capacity - (lowest_of(4) - sharded // 4)
    if free <= 0 or sharded <= 0:
        return lowest(least), None
    fewest = least.request.devices + 1
    count = max(fewest, -(-sharded // free))
    while count < TRACED_DEVICES and lowest_of(count) > capacity:
        count += 1
    while fewest < count <= TRACED_DEVICES and lowest_of(count - 1) <= capacity:
        count -= 1
    return lowest(least), count


class OffloadingStep(TrainStep):
    """A :class:`TrainStep` inside of :func:`offload_activations`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Trains on one effective batch."""
        with offload_activations():
            return super().__call__(*args, **kwargs)

    def add(self, inputs: Any, targets: Any = ()) -> None:
        """Accumulates the gradients of some more rows."""
        with offload_activations():
            super().add(inputs, targets)

    def apply(self) -> Tensor:
        """Updates with the gradients of all rows that were added."""
        with offload_activations():
            return super().apply()
