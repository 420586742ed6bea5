"""The result of a plan: the choices, the chosen one, and the objects that it makes."""

import dataclasses
import functools
import html
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from ..loss.criterion import DataParallelCriterion
from ..replicas.model import DataParallelModel
from ..runtime.byte_sizes import format_bytes
from ..runtime.devices import DeviceLike
from ..savings.activation_checkpointing import checkpoint_blocks
from ..savings.gradient_release import release_gradients_in_backward
from ..savings.language_model_heads import replace_lm_head
from ..training.step import TrainStep
from .choices import Choice, choice_of, row_of
from .html_page import write_page
from .offloading_step import OffloadingStep
from .report import MemoryReport
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
            cost, collate: as in :class:`TrainStep`, for a plan with lengths. The cost of a row is its length. Padded batches,
                without ``collate``, are trimmed.

        Raises:
            ValueError: nothing fits, the number of devices is not that of the plan, a plan with lengths gets no ``cost``, or
                gradients are clipped that the plan releases.
        """
        chosen = self.chosen
        if (cost is None) != (self.micro_batch_cost is None):
            raise ValueError("expected cost= for a plan that was made with lengths=, and only for such a plan")
        if chosen.released and max_grad_norm is not None:
            raise ValueError(
                f"max_grad_norm={max_grad_norm} with a plan that releases gradients in the backward, expected None: give "
                "max_grad_norm to memory.plan too, which then plans without it"
            )
        checkpoint_blocks(module, chosen.checkpoint)
        set_inplace(module, chosen.inplace)
        if chosen.no_logits:
            replace_lm_head(module)
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
        trained = choice.balanced(model, learned) if chosen.balanced_optimizer else choice(learned)
        if chosen.released:
            release_gradients_in_backward(trained)
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
        choices = tuple(choice_of(choice) for choice in values.pop("choices"))
        needs = None if values["needs"] is None else tuple(values["needs"])
        return cls(
            **values
            | {"choices": choices, "capacity": tuple(values["capacity"]), "needs": needs, "untried": tuple(values["untried"])}
        )

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
        table: str = tabulate(map(row_of, self.choices), headers, style, disable_numparse=True)
        return table

    @property
    def _notes(self) -> list[str]:
        last = f"chosen: {self.chosen.name}" if self.fits else f"nothing fits: {self.advice}"
        last += "" if self.micro_batch_cost is None else f", with rows x longest of {self.micro_batch_cost} at most per device"
        note = _NOTES.get(self.choices[0].statistics or "", "")
        untried = f"not tried, because less fits (`tricks` measures each): {'; '.join(self.untried)}" if self.untried else ""
        weight = _UNKNOWN_DIVISOR if self.unknown_divisor else ""
        return [*filter(None, [note, weight, untried]), last]
