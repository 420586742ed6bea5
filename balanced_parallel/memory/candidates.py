"""The memory of an option of a plan: its traces, and the rows that fit.

An :class:`Option` is one way to run an effective batch. It is traced with two numbers of rows, for one micro-batch per update and
for several, and becomes a :class:`Choice`: a row of the plan's table, with bytes per device and costs.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..batch.plan import count_micro_batches, split_sizes
from ..diagnostics.reasons import batch_norms
from ..runtime.values import format_bytes
from .errors import UnknownMemory
from .lines import Lines, most_that_fit
from .remedies import OFFLOAD, Saving
from .trace.layouts import Request, is_coupled
from .trace.tracer import run_traces


@dataclass(frozen=True)
class Choice:
    """One row of the table. Sizes are bytes, one entry per device.

    Attributes:
        micro_batch_size: the most rows of a device in one forward; 0 if not even one row fits.
        micro_batches: number per update.
        split: the weight of each device; None for equal shares.
        checkpoint: names of the modules whose activations are recomputed in the backward.
        peak: maximum in use. ``reserved`` is the memory that the allocator takes from the device for it.
        saved: bytes below the peak of plain replicas that run the whole batch at once.
        recomputed: operations that run twice, as a fraction of those of a step without recomputation.
        traffic: bytes to and from the busiest device per update, for parameters and gradients.
        changes_result: the loss and the gradients are computed in another precision.
        statistics: rows that batch norm takes its statistics from: ``"replica"`` or ``"micro-batch"``; None for all rows.
        optimizer: name of an optimizer in the place of the given one, which makes this an alternative that is never chosen.
        savings: names of the functions of ``balanced_parallel.savings`` that :meth:`MemoryPlan.apply` calls.
    """

    name: str
    precision: str
    balanced_optimizer: bool
    checkpoint: tuple[str, ...]
    micro_batch_size: int
    micro_batches: int
    split: tuple[float, ...] | None
    peak: tuple[int, ...]
    reserved: tuple[int, ...]
    saved: int
    recomputed: float
    traffic: int
    changes_result: bool
    fits: bool
    statistics: str | None = None
    optimizer: str | None = None
    savings: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """True if loss, gradients and update are those of the plain program on the whole batch, up to rounding."""
        return not self.changes_result and self.statistics is None and self.optimizer is None

    @property
    def cost(self) -> tuple[Any, ...]:
        """Orders choices: exact ones first, then by operations, micro-batches and traffic."""
        return self.optimizer is not None, self.changes_result, self.recomputed, self.micro_batches, self.traffic


def row_of(choice: Choice) -> list[str]:
    """Returns the cells of a choice in the table of a plan: sizes of each of unequal devices, or the largest."""
    differences = ["other arithmetic"] * choice.changes_result + ["another optimizer"] * (choice.optimizer is not None)
    differences += [f"batch norm by {choice.statistics}"] if choice.statistics else []
    rows = " + ".join(f"{weight:.0f}" for weight in choice.split) if choice.split else f"{choice.micro_batch_size} per device"
    return [
        choice.name,
        f"{rows} x {choice.micro_batches}" if choice.micro_batches else "not one row",
        *(" + ".join(map(format_bytes, sizes if choice.split else [max(sizes)])) for sizes in (choice.peak, choice.reserved)),
        format_bytes(choice.saved),
        f"{choice.recomputed:.0%}",
        format_bytes(choice.traffic),
        ", ".join(differences) or "exact",
        "yes" if choice.fits else "no",
    ]


SCALARS = 4096  # bytes for the loss sums and weights of TrainStep, which no trace has
BASE = 2  # rows per device in the first of two traces


def statistics_of(module: nn.Module, devices: int, micro_batches: int) -> str | None:
    """Returns which rows the batch norms of ``module`` take statistics from; None for all rows of the batch."""
    if devices > 1 and batch_norms(module, over_all_rows=False):
        return "replica"
    if micro_batches > 1 and any(batch_norms(module, over_all_rows=over_all) for over_all in (False, True)):
        return "micro-batch"
    return None


class Option:
    """Savings that are applied together to updates of ``batch_size`` rows, on devices of ``capacity`` bytes.

    Their memory is lines in the rows: for one micro-batch per update and for several (1 and 2 in ``traced``).
    """

    def __init__(self, savings: Sequence[Saving], request: Request, capacity: Sequence[int], batch_size: int) -> None:
        self.savings, self.batch_size = savings, batch_size
        self.request = dataclasses.replace(request, micro_batches=1, update_rows=batch_size)
        self.limits = [size - SCALARS for size in capacity]  # bytes for what a trace has
        self.share = -(-batch_size // request.devices)  # rows of a device per update
        self.traced: dict[int, Lines] = {}

    @property
    def name(self) -> str:
        """The savings as text."""
        return ", ".join(saving.option for saving in self.savings) or "replicas"

    @property
    def optimizer(self) -> str | None:
        """The name of an optimizer in the place of the given one."""
        return next((saving.option for saving in self.savings if saving.result == "another optimizer"), None)

    def lines(self, micro_batches: int) -> Lines:
        """Returns the lines for a number of micro-batches per update, traced at the first call."""
        several = min(micro_batches, 2)  # with replicas, one that adds and reduces is enough
        if several not in self.traced:
            measure([self], several)
        return self.traced[several]

    def flops(self, micro_batches: int) -> float:
        """Operations per row of an update. Those of several micro-batches differ if each runs its forward twice."""
        if not is_coupled(self.request.criterion):
            first = next(iter(self.traced.values())).first
            return first.flops / (first.rows * first.micro_batches)
        lines = self.lines(micro_batches)
        assert lines.second is not None
        (rows, flops), (more, more_flops) = (
            (trace.rows * trace.micro_batches, trace.flops) for trace in (lines.first, lines.second)
        )
        per_row = (more_flops - flops) / (more - rows)
        return per_row + (flops - per_row * rows) / self.batch_size  # the loss of all rows is computed once

    def most_rows(self, micro_batches: int, share: int) -> list[int]:
        """Returns the rows that fit on each device in one forward, at most ``share``."""
        lines = self.lines(micro_batches)

        def fits(device: int, rows: int) -> bool:
            return lines.reserved(device, rows * self.request.devices, self.limits[device]) is not None

        return [most_that_fit(functools.partial(fits, device), share) for device in range(self.request.devices)]

    def may_fit_at_once(self, several: int) -> bool:
        """Returns False if the lines for ``several`` micro-batches show that no option runs the batch in one micro-batch.

        One micro-batch needs less memory than several, and sharding saves more. Both save at most the bytes of the gradients.
        """
        gradients: int = 2 * sum(parameter.nbytes for parameter in self.request.module.parameters())
        devices = self.request.devices
        return (
            sum(self.lines(several).allocated_by_device(self.share * devices))
            <= sum(self.limits) + (gradients + SCALARS) * devices
        )

    def fits_at_once(self) -> bool:
        """Returns True if the whole batch fits equal devices in one micro-batch."""
        return self.lines(1).fit(self.limits, self.share * self.request.devices)

    def _rows(self) -> tuple[list[int], bool]:
        """Returns the most rows of each device in a forward, in as few micro-batches as fit, and True for unequal shares."""
        unequal = len(set(self.limits)) > 1
        most_share = self.batch_size if unequal else self.share
        if 1 in self.traced and not unequal and self.fits_at_once():
            return [self.share for _ in self.limits], False
        # a loss whose rows depend on each other needs less memory in two passes, which one micro-batch does not take
        rows = self.most_rows(2, max(most_share // 2, 1) if is_coupled(self.request.criterion) else most_share)
        unequal = unequal and min(rows) < self.share  # else equal shares fit
        untried = 1 not in self.traced or unequal
        if untried and not self._holds(rows, unequal) and self.may_fit_at_once(2):
            at_once = self.most_rows(1, most_share)
            rows = at_once if self._holds(at_once, unequal) else rows
        return rows, unequal

    def _holds(self, rows: list[int], unequal: bool) -> bool:
        return (sum(rows) if unequal else min(rows) * len(rows)) >= self.batch_size

    def choose(self, plain: "Option") -> Choice:
        """Returns the choice with the fewest micro-batches in which the batch fits."""
        rows, unequal = self._rows()
        devices, fits = len(rows), all(rows)
        split = tuple(map(float, rows)) if unequal and fits else None
        most = max(rows) if split else min(*rows, self.share)
        count = count_micro_batches(self.batch_size, most, split or devices) if fits else 0
        largest = split_sizes(-(-self.batch_size // count), split or devices) if fits else [1] * devices
        lines = self.lines(count or 2)
        read = [(device, max(rows, 1) * devices) for device, rows in enumerate(largest)]
        operations = plain.flops(1)  # 0 if all operators are fused, which are not counted
        parameters: int = sum(parameter.nbytes for parameter in self.request.module.parameters())
        # a reduce-scatter and an all-gather, or the first device's copies and gradients of the others
        traffic = 4 * (devices - 1) * parameters // devices if self.request.balanced else 2 * (devices - 1) * parameters
        if fits and OFFLOAD in self.savings:  # to the host and back
            traffic += 2 * count * lines.bytes_on_host(max(largest) * devices)
        return Choice(
            name=self.name,
            precision=self.request.precision,
            balanced_optimizer=self.request.balanced,
            checkpoint=self.request.blocks,
            micro_batch_size=most if fits else 0,
            micro_batches=count,
            split=split,
            peak=tuple(lines.allocated(device, at) for device, at in read),
            reserved=tuple(lines.reserved(device, at) or 0 for device, at in read),
            saved=0,
            recomputed=max(0.0, self.flops(count or 2) / operations - 1) if operations else 0.0,
            traffic=traffic,
            changes_result=any(saving.result == "other arithmetic" for saving in self.savings),
            fits=fits,
            statistics=statistics_of(self.request.module, devices, count),
            optimizer=self.optimizer,
            savings=self.request.savings,
        )


def measure_what_decides(options: Sequence[Option], plain: Option) -> None:
    """Traces each of ``options``, for one micro-batch per update or for several.

    One micro-batch comes first if the batch may fit at once, and several only if it does not. Several come first on unequal
    devices, where the rows of each depend on the traces. The same holds if plain replicas did not fit and are not among
    ``options``: the whole batch is unlikely to fit then.
    """
    if len(set(plain.limits)) > 1 or plain not in options:
        measure(options, 2)
        return
    plain.lines(1)
    if plain.may_fit_at_once(1):
        measure([each for each in options if each is not plain], 1)
    measure([each for each in options if 1 not in each.traced or not each.fits_at_once()], 2)


def measure(options: Sequence[Option], several: int) -> None:
    """Traces all of ``options`` together, for ``several`` micro-batches (1 or 2) per update."""
    if not options:
        return
    requests = [dataclasses.replace(option.request, micro_batches=several) for option in options]
    jobs = [(request, count * BASE * request.devices) for request in requests for count in (1, 2)]
    try:
        traces = run_traces(jobs)
    except UnknownMemory:
        raise
    except Exception as error:
        raise ValueError(
            f"with {jobs[0][1]} to {jobs[-1][1]} rows over {jobs[0][0].devices} devices is {type(error).__name__}: {error}; "
            "a plan needs a module, a criterion and an optimizer that take any number of rows"
        ) from error
    for option, request, first, second in zip(options, requests, traces[::2], traces[1::2], strict=True):
        option.traced[several] = lines = Lines(request, first, second)
        if not lines.is_affine:
            raise ValueError(
                "with twice the rows the module runs other operators, so that no plan can be made: see memory.estimate for each "
                "number of rows"
            )
