"""``memory.plan``: the cheapest way to fit an effective batch on given devices."""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

from ..batch.splits import split_sizes
from ..loss.criterion import DataParallelCriterion
from ..replicas.model import DataParallelModel
from ..runtime.byte_sizes import format_bytes, parse_each
from ..runtime.devices import DeviceLike
from ..savings.activation_checkpointing import checkpoint_blocks
from ..savings.language_model_heads import replace_lm_head
from ..training.step import TrainStep
from .candidates import Measured, measure_what_decides
from .capacity import what_would_fit
from .choices import Choice, choice_of, row_of
from .device_specs import DeviceKind
from .estimation import make_report, report_of
from .length_traces import check_lengths, with_length
from .offloading_step import OffloadingStep
from .plan_stages import stages_of
from .report import MemoryReport
from .request import Request
from .trace.applied_savings import set_inplace
from .trace.optimizer_choice import OptimizerChoice

__all__: list[str] = []

MakeOptimizer = Callable[..., torch.optim.Optimizer]
_NOTES = {
    "replica": "batch norm uses the statistics of each replica's rows, so the result is not that of the whole batch: "
    "convert_sync_batchnorm(module) makes it use all rows of a forward",
    "micro-batch": "batch norm uses the statistics of each micro-batch, so the result is not that of the whole batch: "
    "a norm within each row, such as LayerNorm, has none",
}


@dataclass(frozen=True)
class MemoryPlan:
    """The way to run an effective batch within the capacity of each device.

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
        more = "no number of such devices would do" if count is None else f"or {count} devices"
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
            module, criterion: those of the plan.
            optimizer: its class. ``defaults`` are its settings: ``lr`` and so on.
            device_ids: as many as in the plan. ``None`` takes the first of the visible devices.
            weight, max_grad_norm: as in :class:`DataParallelCriterion` and :class:`TrainStep`.
            cost, collate: as in :class:`TrainStep`, for a plan with lengths. The cost of a row is its length. Padded batches,
                without ``collate``, are trimmed.

        Raises:
            ValueError: nothing fits, the number of devices is not that of the plan, or a plan with lengths gets no ``cost``.
        """
        chosen = self.chosen
        if (cost is None) != (self.micro_batch_cost is None):
            raise ValueError("expected cost= for a plan that was made with lengths=, and only for such a plan")
        checkpoint_blocks(module, chosen.checkpoint)
        set_inplace(module, chosen.inplace)
        if chosen.no_logits:
            replace_lm_head(module)
        devices = list(range(self.devices)) if device_ids is None and torch.accelerator.is_available() else device_ids
        if devices is not None and len(devices) != self.devices:
            raise ValueError(f"device_ids has {len(devices)} devices, expected the {self.devices} that were planned for")
        model = DataParallelModel(module, devices, dim=self.dim, split=chosen.split)
        wrapped = DataParallelCriterion(criterion, dim=self.dim, weight=weight)
        choice = OptimizerChoice(
            functools.partial(optimizer, **defaults), foreach=False
        )  # torch chooses kernels by itself on real devices
        learned = [*model.parameters(), *wrapped.parameters()]
        trained = choice.balanced(model, learned) if chosen.balanced_optimizer else choice(learned)
        step = (OffloadingStep if chosen.offload else TrainStep)(
            model,
            wrapped,
            trained,
            micro_batch_size=chosen.micro_batch_size if cost is None else None,
            precision=chosen.precision,
            max_grad_norm=max_grad_norm,
            cost=cost,
            collate=collate,
            trim=self.trim if cost is not None and collate is None else None,
            micro_batch_cost=self.micro_batch_cost,
        )
        return model, wrapped, trained, step

    def to_json(self) -> str:
        """Returns the plan as JSON, without its report."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "report"}
        return json.dumps(values | {"choices": [dataclasses.asdict(choice) for choice in self.choices]}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "MemoryPlan":
        """Returns the plan that :meth:`to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        choices = tuple(choice_of(choice) for choice in values.pop("choices"))
        needs = None if values["needs"] is None else tuple(values["needs"])
        return cls(
            **values
            | {"choices": choices, "capacity": tuple(values["capacity"]), "needs": needs, "untried": tuple(values["untried"])}
        )

    def __str__(self) -> str:
        shown = ", ".join(map(format_bytes, dict.fromkeys(self.capacity)))
        first = f"{self.batch_size} rows per update on {self.devices} x {self.device_kind} with {shown}\n\n"
        headers = ["", "rows at most x micro-batches", "peak", "reserved", "saved", "recomputed", "traffic", "result", "fits"]
        table = tabulate(map(row_of, self.choices), headers, "simple", disable_numparse=True)
        last = f"chosen: {self.chosen.name}" if self.fits else f"nothing fits: {self.advice}"
        last += "" if self.micro_batch_cost is None else f", with rows x longest of {self.micro_batch_cost} at most per device"
        note = _NOTES.get(self.choices[0].statistics or "", "")
        untried = f"not tried, because less fits: {'; '.join(self.untried)}" if self.untried else ""
        return "\n\n".join([first + table, *filter(None, [note, untried]), last])


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

    The plan chooses the number of micro-batches, the split over unequal devices, :class:`BalancedOptimizer`, activations in
    place, checkpointing of the module's repeated blocks, and offloaded activations. If none of these suffices, it tries the same
    in bf16, which changes the result. The cheapest choice has the fewest operations, then the fewest micro-batches, then the
    least traffic. If nothing fits, optimizers with less state are shown as alternatives.

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
    """
    request = Request.of(
        module,
        criterion,
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
    limits = _capacities(capacity, devices, request.kind)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r}, expected a positive number of rows per update")
    stages = list(stages_of(request))
    measured: list[Measured] = []
    choices: list[Choice] = []
    while stages and not any(choice.fits for choice in choices):
        some = [Measured(request, option, limits, batch_size) for option in stages.pop(0)]
        plain = (measured or some)[0]
        try:
            measure_what_decides(some, batch_size, plain)
        except ValueError:
            if not (some[0].option.optimizer or some[0].option.offload):
                raise
            continue  # an optimizer that cannot be traced here; more rows that are offloaded than others
        measured += some
        choices += [each.choose(batch_size, plain) for each in some]
    whole = max(plain.lines(1).peak(i, -(-batch_size // devices) * devices) for i in range(devices))
    choices = [dataclasses.replace(choice, saved=whole - max(choice.peak)) for choice in choices]
    ranked = sorted(zip(choices, measured, strict=True), key=lambda pair: (_is_other(pair[0]), not pair[0].fits, pair[0].cost))
    best, how = ranked[0]
    return MemoryPlan(
        batch_size=batch_size,
        capacity=limits,
        device_kind=request.kind.name,
        choices=tuple(choice for choice, _ in ranked),
        fits=best.fits,
        needs=None if best.fits else what_would_fit([each for each in measured if not each.option.optimizer], max(limits)),
        dim=dim,
        untried=tuple(option.name for stage in stages for option in stage),
        micro_batch_cost=how.largest_cost(trim, lengths) if lengths is not None and best.fits else None,
        trim=trim,
        report=_report(how, best, batch_size) if best.fits else None,
    )


def _capacities(capacity: int | str | Sequence[int | str] | None, devices: int, kind: DeviceKind) -> tuple[int, ...]:
    if capacity is None:
        if kind.capacity is None:
            raise ValueError(f"capacity=None with device_kind={kind.name!r}, which has none: expected a size, as '24GiB'")
        capacity = kind.capacity
    return parse_each(capacity, devices)


def _is_other(choice: Choice) -> bool:
    return choice.optimizer is not None


def _report(measured: Measured, choice: Choice, batch_size: int) -> MemoryReport:
    """Makes the report from the traces of the plan. Unequal shares, and less than two rows per device, are traced again."""
    count, devices = choice.micro_batches, measured.request.devices
    rows = -(-batch_size // count)
    request = dataclasses.replace(measured.request, micro_batches=count, split=choice.split)
    if choice.split or rows < 2 * devices:
        return report_of(request, rows)
    lines = measured.lines(count)
    return make_report(request, rows, lines, [size * devices for size in split_sizes(rows, devices)], lines)
