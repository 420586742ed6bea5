"""The memory of an option of a plan: its traces, and the rows that fit.

An :class:`Option` is one way to run an effective batch. It is traced with two numbers of rows, for
one micro-batch per update and for several, and becomes a :class:`Choice`: a row of the plan's
table, with bytes per device and costs.
"""

import bisect
import contextlib
import functools
import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from ..batch.plan import count_micro_batches, split_sizes
from ..diagnostics.reasons import statistics_of
from ..runtime.values import format_bytes
from ..savings.saving import BF16_PARAMETERS
from .lines import Lines, most_that_fit
from .problem import Request
from .savings import (
    CHECKPOINTS,
    OFFLOADED,
    ON_HOST,
    SHARDS,
    SPREAD,
    PlannedSaving,
    Stage,
    savings_of,
    with_savings,
)
from .trace.layouts import LAYOUTS, trained
from .trace.stacks import find_repeated
from .trace.tracer import ProgramError, try_traces

_log = logging.getLogger(__name__)
Combination = tuple[PlannedSaving, ...]


@dataclass(frozen=True)
class Choice:
    """One row of the table. Sizes are bytes, one entry per device.

    Attributes:
        layout: ``"replicas"`` in one process; ``"ddp"`` or ``"fsdp"`` under torchrun.
        micro_batch_size: the most rows of a device in one forward; 0 if not even one row fits.
        micro_batches: number per update.
        split: the weight of each device; None for equal shares.
        allocated: maximum in use. ``reserved`` is the memory that the process takes from the device
            for it, as ``nvidia-smi`` shows it: the segments of the allocator, after it has given
            back its cache where the device is full, and the context. In a choice that fits it is at
            most the capacity.
        operations: of matrix products, convolutions and attention per update, on each device.
        recomputed: operations that run twice, as a fraction of those of a step without
            recomputation.
        traffic: bytes per update between the busiest device and others, for parameters and
            gradients.
        host_traffic: bytes per update between the busiest device and the host, for the optimizer
            and offloaded activations.
        changes_result: the loss and the gradients are computed in another precision.
        statistics: rows that batch norm takes its statistics from: ``"replica"`` or
            ``"micro-batch"``; None for all rows.
        optimizer: name of an optimizer in the place of the given one, which makes this an
            alternative that is never chosen.
        savings: names of the functions of ``balanced_parallel.savings`` that
            :meth:`MemoryPlan.apply` calls.
    """

    name: str
    layout: str
    precision: str
    balanced_optimizer: bool
    micro_batch_size: int
    micro_batches: int
    split: tuple[float, ...] | None
    allocated: tuple[int, ...]
    reserved: tuple[int, ...]
    operations: int
    recomputed: float
    traffic: int
    host_traffic: int
    changes_result: bool
    fits: bool
    statistics: str | None
    optimizer: str | None
    savings: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """True if loss, gradients and update are those of the plain program on the whole batch, up
        to rounding.
        """
        return not self.changes_result and self.statistics is None and self.optimizer is None

    @property
    def is_distributed(self) -> bool:
        """True if each device has a rank of torchrun."""
        return LAYOUTS[self.layout].is_distributed

    @property
    def is_whole(self) -> bool:
        """True for an update in the user's own words."""
        return LAYOUTS[self.layout].is_whole

    @property
    def work(self) -> int:
        """Operations that take as long as this choice: traffic counts as many per byte as a device
        has on average.
        """
        moved = self.traffic + self.host_traffic
        return self.operations + moved * OPERATIONS_PER_BYTE[self.precision]

    @property
    def cost(self) -> tuple[bool, int, int, int]:
        """Orders choices: exact ones first, then by time, micro-batches, and number of savings."""
        return self.changes_result, self.work, self.micro_batches, self.name.count(",")


# Operations in the time of a byte of traffic, roughly. Peak over link, as NVIDIA states them, is
# 800 (V100 with NVLink) to 11,000 (L40S with PCIe 4.0) with bf16 and fp16, and 100 to 2,600 in
# fp32. One number orders choices of language models, which differ by a factor of ten and more.
OPERATIONS_PER_BYTE = {"fp32": 300, "bf16": 3000, "fp16": 3000}
HEADERS = ("", "rows", "allocated", "reserved", "flops", "devices", "host", "result")
# The columns have at most these widths. A line of the table has at most 100 characters.
WIDTHS = (18, 8, 9, 9, None, 10, 10, 12)


def row_of(choice: Choice) -> list[str]:
    """Returns the cells of a choice in the table of a plan: sizes of each of unequal devices, or
    the largest.
    """
    differences = {
        "other arithmetic": choice.changes_result,
        "another optimizer": choice.optimizer,
        f"batch norm by {choice.statistics}": choice.statistics,
    }
    result = ", ".join(name for name, is_true in differences.items() if is_true) or "exact"
    rows = " + ".join(f"{weight:.0f}" for weight in choice.split or [choice.micro_batch_size])
    sizes = [
        " + ".join(map(format_bytes, each if choice.split else [max(each)]))
        for each in (choice.allocated, choice.reserved)
    ]
    return [
        choice.name,
        f"{rows} x {choice.micro_batches}" if choice.micro_batches else "not one",
        *sizes,
        f"{1 + choice.recomputed:.2f} x",
        format_bytes(choice.traffic),
        format_bytes(choice.host_traffic),
        result,
    ]


TAKES_ANY_ROWS = "a plan needs a module, a criterion and an optimizer that take any number of rows"
SCALARS = 4096  # bytes for the loss sums and weights of TrainStep, which no trace has
MARGIN_OF_SHARDS = 0.1  # published programs of FSDP need more than is predicted
_COSTLY = {CHECKPOINTS, OFFLOADED}  # savings that take time
BASE = 2  # rows per device in the first of two traces


class MicroBatches(NamedTuple):
    """Number of micro-batches of an update, weights of unequal shares, and most rows of each device
    in one.

    If not even one row fits, the number is 0, and each device has one row.
    """

    number: int
    split: tuple[float, ...] | None
    rows: list[int]


def bytes_of(parameters: Iterable[nn.Parameter], is_half: bool) -> int:
    """Returns the bytes of parameters, or those of the same in bf16."""
    return sum(
        each.numel() * (min(each.itemsize, 2) if is_half else each.itemsize) for each in parameters
    )


class Option:
    """Savings that are applied together to updates of ``batch_size`` rows, on devices of
    ``capacity`` bytes.

    Their memory is lines in the rows: for one micro-batch per update and for several (1 and 2 in
    ``traced``). With ranks, the trace is that of one of them, and ``capacity`` has an entry per
    rank.
    """

    def __init__(
        self,
        savings: Combination,
        request: Request,
        capacity: tuple[int, ...],
        batch_size: int,
    ) -> None:
        self.savings = savings
        self.batch_size = batch_size
        self.capacity = capacity
        self.is_distributed = request.layout.is_distributed
        self.is_whole = request.layout.is_whole
        self.step = request.row_step
        self.context = request.kind.context
        self.share = -(-batch_size // len(capacity))  # rows of a device per update
        self.rows = self.share if self.is_distributed else batch_size  # The batch of a process.
        self.request = replace(request, micro_batches=1, update_rows=self.rows)
        sizes = [min(capacity)] * request.devices if self.is_distributed else capacity
        has_margin = request.layout.is_sharded and request.kind.is_gpu
        self.part = 1 - MARGIN_OF_SHARDS * has_margin  # This part of a device may be full.
        # bytes for what a trace has
        self.limits = [int(size * self.part) - SCALARS for size in sizes]
        # Devices of several sizes in one process may have unequal shares.
        self.may_differ = not self.is_distributed and len(set(sizes)) > 1
        self.learned = trained(request.module.parameters())
        is_half = BF16_PARAMETERS.name in request.savings
        self.parameters = bytes_of(request.module.parameters(), is_half)
        self.gradients = bytes_of(self.learned, is_half)
        self.traced: dict[int, Lines] = {}

    @property
    def held(self) -> int:
        """Bytes of parameters, gradients and optimizer state on a device, if shards are equal."""
        request = self.request
        state: int = request.optimizer.state_bytes(self.gradients)
        buffers: int = sum(buffer.nbytes for buffer in request.module.buffers())
        whole = self.parameters + buffers + self.gradients
        if request.layout.is_sharded:
            return (whole + state) // request.devices
        return whole + (state // request.devices if request.balanced else state)

    @property
    def name(self) -> str:
        """The savings as text."""
        # The optimizer needs whole parameters.
        shards = f"{SHARDS.saving.option}, {SPREAD.saving.option}"
        names = {SHARDS: shards} if self.request.balanced else {}
        texts = [names.get(each, each.saving.option) for each in self.savings]
        return ", ".join(texts) or self.request.layout.name

    def lines(self, micro_batches: int) -> Lines:
        """Returns the lines for a number of micro-batches per update, traced at the first call, or
        raises ``ValueError``.
        """
        # One that adds and reduces is enough with replicas.
        several = 1 if self.is_whole else min(micro_batches, 2)
        if several not in self.traced:
            request = replace(self.request, micro_batches=several)
            traces = []
            for trace in try_traces([(request, count * BASE * self.step) for count in (1, 2)]):
                if isinstance(trace, ValueError):
                    raise trace
                traces.append(trace)
            lines = Lines(request, *traces)
            if not lines.is_affine:
                raise ValueError(
                    f"with twice the rows the module runs {lines.difference}: see memory.estimate for each number of rows"
                )
            self.traced[several] = lines
        return self.traced[several]

    def flops(self, micro_batches: int) -> float:
        """Operations per row of an update.

        Those of several micro-batches differ if each runs its forward twice.
        """
        if not self.request.couples_rows:
            lines = next(iter(self.traced.values()))
            return lines.first.flops / (lines.first.rows * lines.request.traced_micro_batches)
        lines = self.lines(micro_batches)
        return lines.flops(self.batch_size // lines.request.traced_micro_batches) / self.batch_size

    def needs(self) -> int:
        """Returns the bytes that one row per device reserves, or a step that runs whole, on the
        device that needs the most.
        """
        rows = [self.share if self.is_whole else 1] * self.request.devices
        return int((max(self.reserved(2, rows, fits=False)) + SCALARS) / self.part)

    def reserved(self, micro_batches: int, rows: Sequence[int], *, fits: bool) -> list[int]:
        """Returns the bytes that each device reserves for its rows in one forward, within its limit
        if they fit.
        """
        lines = self.lines(micro_batches)
        limits = self.limits if fits else [None] * len(self.limits)
        return [
            self.context + (lines.reserved(device, rows[device] * self.step, limits[device]) or 0)
            for device in self.request.traced_devices
        ]

    def most_rows(self, micro_batches: int, share: int) -> list[int]:
        """Returns the rows that fit on each device in one forward, at most ``share``.

        Of equal shares, only the sizes of equal micro-batches are tried.
        """
        lines = self.lines(micro_batches)
        if self.may_differ:

            def most(device: int, limit: int) -> int:
                return most_that_fit(
                    lambda rows: lines.reserved(device, rows * self.step, limit) is not None, share
                )

            return list(itertools.starmap(most, enumerate(self.limits)))
        equal = {-(-self.share // count) for count in range(1, self.share + 1)}
        sizes = [0, *sorted(equal.intersection(range(share + 1)))]
        place = most_that_fit(
            lambda place: lines.fit(self.limits, sizes[place] * self.step), len(sizes) - 1
        )
        return [sizes[place]] * len(self.limits)

    def _cut(self) -> MicroBatches:
        """Cuts the batch into the fewest micro-batches that fit, in equal shares if these fit."""
        share = self.batch_size if self.may_differ else self.share
        if self.is_whole:
            rows = self.most_rows(1, share)
            return MicroBatches(1 if min(rows) == share else 0, None, [share])
        # A loss that couples rows needs less memory in two passes, which one micro-batch does not
        # take.
        most = self.most_rows(2, max(share // 2, 1) if self.request.couples_rows else share)
        unequal = self.may_differ and min(most) < self.share
        cut = self._cut_at(most, unequal)
        peaks = [
            self.context + self.lines(2).at_least_at_once(device, self.share * self.step)
            for device in self.request.traced_devices
        ]
        # The two passes of a loss that couples rows may keep more than one of them.
        slack = 2 * self.gradients * self.request.couples_rows
        if cut.number != 1 and sum(peaks) <= sum(self.limits) + slack * len(peaks):
            at_once = self._cut_at(self.most_rows(1, share), unequal)
            return at_once if at_once.number == 1 else cut
        return cut

    def _cut_at(self, most: list[int], unequal: bool) -> MicroBatches:
        """Cuts the batch into micro-batches with at most so many rows on each device."""
        if not all(most):
            return MicroBatches(0, None, [1] * len(most))
        split = tuple(map(float, most)) if unequal else None
        shares = split or self.step
        count = count_micro_batches(
            self.rows, max(most) if split else min(*most, self.share), shares
        )
        sizes = split_sizes(-(-self.rows // count), shares)
        return MicroBatches(count, split, [max(size, 1) for size in sizes])

    def choose(self, plain: "Option") -> Choice:
        """Returns the choice with the fewest micro-batches in which the batch fits.

        ``plain`` recomputes nothing.
        """
        self._trace_few_blocks()
        request = self.request
        count, split, rows = self._cut()
        several = count or 2
        lines = self.lines(several)
        reserved = self.reserved(several, rows, fits=count > 0)
        allocated = [
            lines.allocated(device, rows[device] * self.step) for device in request.traced_devices
        ]
        performed = self.flops(several)
        operations = plain.flops(1)
        whole = self.whole_gradients(count, max(reserved))
        of_host = self.host_traffic_of_optimizer
        if request.savings:  # Offloaded activations go to the host and come back.
            of_host += 2 * count * lines.bytes_on_host(max(rows) * self.step)
        results = {each.saving.result: each.saving.option for each in self.savings}
        return Choice(
            name=f"{self.name}, gradients reduced once" if whole else self.name,
            layout=request.layout.name,
            precision=request.precision,
            balanced_optimizer=request.balanced,
            micro_batch_size=int(max(split or rows)) if count else 0,
            micro_batches=count,
            split=split,
            allocated=tuple(size + whole for size in allocated),
            reserved=tuple(size + whole for size in reserved),
            operations=int(performed * self.batch_size / len(self.capacity)),
            recomputed=max(0.0, performed / operations - 1) if operations else 0.0,
            traffic=self.traffic(count, whole),
            host_traffic=of_host,
            changes_result="other arithmetic" in results,
            fits=count > 0,
            statistics=statistics_of(request.module, len(self.capacity), count),
            optimizer=results.get("another optimizer"),
            savings=request.savings,
        )

    def _trace_few_blocks(self) -> None:
        """Takes traces of few blocks in place of traces of all, if they show that not one row fits,
        or if buckets are small beside a device, as those of adapters.

        With a bucket for each gradient, blocks repeat that do not otherwise. Larger buckets need
        more memory: at most twice the gradients. A device that is half empty without activations
        likely has room for a row.
        """
        request = replace(self.request, bucket_bytes=0)
        has_small = self.gradients < max(self.capacity) // 100
        is_empty = self.held < max(self.capacity) // 2
        if is_empty and not has_small:
            return
        if find_repeated(self.request) or not find_repeated(request):
            return
        rough = Option(self.savings, request, self.capacity, self.batch_size)
        if has_small:
            self.limits = [limit - 2 * self.gradients for limit in self.limits]
        elif all(rough.most_rows(2, 1)):
            return
        self.request = rough.request
        self.traced = rough.traced

    def whole_gradients(self, count: int, reserved: int) -> int:
        """Returns the bytes of gradients of sharded parameters that stay whole until the last of
        ``count`` micro-batches.

        They do if they fit into half of what is free: the rule of ``strategies/fsdp.py``. They are
        reduced once then.
        """
        whole: int = 4 * sum(parameter.numel() for parameter in self.learned)
        stays = (
            self.request.layout.is_sharded
            and count > 1
            and whole <= (min(self.capacity) - reserved) // 2
        )
        return whole if stays else 0

    @property
    def host_traffic_of_optimizer(self) -> int:
        """Bytes per update of gradients and parameters that go to an optimizer on the host, and of
        parameters that come back.
        """
        return 3 * self.gradients * (ON_HOST.saving.name in self.request.savings)

    def traffic(self, count: int, whole: int = 0) -> int:
        """Returns the bytes per update between the busiest device and others.

        Frozen values stay where they are, unless they are gathered for each forward.
        """
        request = self.request
        devices = len(self.capacity)
        if request.layout.is_sharded:
            gathered = bytes_of(request.module.parameters(), request.precision == "bf16")
            reductions = 1 if whole else count
            # values and gradients to all ranks, values from owners
            learned = (2 * reductions + 6 * request.balanced) * self.gradients
            return (4 * gathered * count + learned) * (devices - 1) // devices
        moved = 2 * (devices - 1) * self.gradients
        # a reduce-scatter and an all-gather, or from and to the first device
        is_ring = request.balanced or self.is_distributed
        return 2 * moved // devices if is_ring else moved


class Search:
    """Traces options, cheapest first, until one fits and takes at most 1.5 times the fastest.

    Savings are put together in their order, first those that leave the result as it is. Each
    combination is a step of a ladder, and has several layouts over the devices. If the last two
    steps of a ladder with other arithmetic do not fit, no other of it is traced.

    Attributes:
        choices: the options that were traced.
        skipped: names of options that were not or could not be traced, with the reasons.

    Args:
        request: the plain program.
        capacity: bytes of each device, over all hosts.
    """

    def __init__(
        self,
        request: Request,
        capacity: Sequence[int],
        batch_size: int,
    ) -> None:
        self.request = request
        self.capacity = tuple(capacity)
        self.batch_size = batch_size
        self.choices: dict[Option, Choice] = {}
        self.skipped: dict[str, str] = {}
        self._refused = set[Option]()  # No trace could run them.
        self._failing = set[PlannedSaving]()
        self._option = functools.cache(self._make_option)
        suited = self._suited("layout")
        others = [(saving,) for saving in suited if saving is not ON_HOST]
        layouts: list[Combination] = [(), *others]
        # The layouts of a group are tried together. Shards over several devices need no more of
        # each than an optimizer on the host.
        self._groups = [layouts]
        if len(capacity) == 1 and ON_HOST in suited:
            self._groups.append([(ON_HOST,)])
        self._last = self._groups[-1][-1]
        self._traffic = min(option.traffic(1) for option in self._make(layouts))

    def run(self) -> None:
        """Traces options until the end, Ctrl-C or ``TimeoutError``, which is raised if none fits."""
        try:
            self._trace()
        except (KeyboardInterrupt, TimeoutError):
            if not self._any_fits():
                raise
            _log.warning("the search was stopped: a cheaper option may fit")

    def _trace(self) -> None:
        """Traces options. If none fits, optimizers with less state are traced as well."""
        ladders = self._ladders()
        if any(self._climb(layouts, ladder) for ladder in ladders for layouts in self._groups):
            return
        exact = [saving for saving in ladders[0][-1] if saving not in self._failing]
        for option in self._make(
            (saving, *self._groups[0][-1], *exact) for saving in self._suited("optimizer")
        ):
            self._fits(option)

    def untried(self) -> list[str]:
        """Returns the names of options that were not traced."""
        options = self._make(
            (*layout, *step)
            for step in itertools.chain(*self._ladders())
            for layout in itertools.chain(*self._groups)
        )
        return [option.name for option in options if self._is_new(option)]

    def _is_new(self, option: Option) -> bool:
        return option not in self.choices and option.name not in self.skipped

    def _suited(self, stage: Stage) -> list[PlannedSaving]:
        """Returns the savings of a stage that suit the request."""
        return [saving for saving in savings_of(stage) if saving.apply(self.request)]

    def _fits(self, option: Option) -> bool:
        """Traces an option that has a chance to fit."""
        if self._is_new(option) and self._has_a_chance(option):
            _log.info("trying: %s", option.name)
            try:
                choice = option.choose(next(iter(self.choices), option))
                self.choices[option] = choice
                first = min(self.choices.values(), key=lambda each: (not each.fits, each.cost))
                if choice.fits and choice is first:
                    _log.info("the best so far: %s", ", ".join(row_of(choice)))
            except ValueError as error:
                self.skipped[option.name] = str(error)
                self._refused.add(option)
                if isinstance(error, ProgramError) and not self.choices:
                    raise ProgramError(f"{option.name}: {error}; {TAKES_ANY_ROWS}") from error
        return option in self.choices and self.choices[option].fits

    def _has_a_chance(self, option: Option) -> bool:
        """Returns False if an option fits at once without savings that cost time, if its tensors
        leave less than a fifth of a device, which an update needs, or if another layout misses by
        more than this one takes off the tensors.

        On one device a fused optimizer, which needs nothing, comes before the host. The last layout
        is traced where it needs the least memory.
        """
        savings = set(option.savings)
        for other, choice in self.choices.items():
            less = set(other.savings)
            if choice.micro_batches == 1 and less < savings <= less | _COSTLY:
                return False
        is_last = savings.issuperset(self._last)
        size = max(self.capacity)
        share = 1.0 if len(self.capacity) == 1 else 0.8
        if option.held > min(share * size, size - option.context) and not is_last:
            self.skipped[option.name] = (
                f"parameters, gradients and optimizer state take {format_bytes(option.held)} per device"
            )
            return False
        plain = self._option(tuple(each for each in option.savings if each.stage != "layout"))
        if plain is option or plain not in self.choices or (is_last and savings & _COSTLY):
            return True
        assert plain is not None
        missing = plain.lines(2).at_least(0, plain.step) + plain.context - max(option.limits)
        return missing <= plain.held - option.held + 4 * plain.gradients

    def _is_fast(self, choice: Choice) -> bool:
        """Returns True if a choice fits whose time is within a half of the least: no recomputation,
        in one micro-batch.
        """
        first = next(iter(self.choices.values()))
        least = replace(first, traffic=self._traffic, host_traffic=0, precision=choice.precision)
        return choice.fits and choice.work <= 1.5 * least.work

    def _ladders(self) -> list[list[Combination]]:
        """Returns combinations of savings: exact ones, and the same with each that computes
        otherwise.
        """
        steps: list[Combination] = [()]
        for saving in self._suited("exact"):
            others = [each for each in steps[-1] if each.saving is not saving.instead_of]
            steps.append((*others, saving))
        # Offloaded activations alone may need less than with blocks that run twice.
        if len(steps[-1]) > 1:
            steps.append(steps[-1][-1:])
        arithmetic = self._suited("arithmetic")
        return [
            [(*step, *arithmetic[:count]) for step in steps] for count in range(len(arithmetic) + 1)
        ]

    def _climb(self, layouts: list[Combination], ladder: list[Combination]) -> bool:
        """Traces a ladder until a step fits and is fast. Returns True if one fits.

        Of the steps that cost no time, the last needs the least memory. If it is slow, so are those
        before it, which are left out.
        """
        fit_fast = functools.partial(self._fit_fast, layouts)
        # Few are traced where nothing fits.
        least = [option for step in ladder[-2:] for option in self._options(layouts[-1:], step)]
        if ladder[0] and not any(map(self._fits, least)) and self._refused.isdisjoint(least):
            return False
        if fit_fast(ladder[0]):
            return True
        free = list(itertools.takewhile(_COSTLY.isdisjoint, ladder))
        if fit_fast(free[-1]):
            bisect.bisect_left(free, True, key=fit_fast)  # Fewer of them may suffice.
            return True
        return any(map(fit_fast, ladder[len(free) :])) or self._any_fits()

    def _any_fits(self) -> bool:
        return any(choice.fits for choice in self.choices.values())

    def _fit_fast(self, layouts: list[Combination], step: Combination) -> bool:
        """Traces a step of a ladder with some layouts until a choice is fast.

        A saving that cannot be traced is left out.
        """
        options = self._options(layouts, step)
        if any(self._fits(option) and self._is_fast(self.choices[option]) for option in options):
            return True
        if options and self._refused.issuperset(options):
            traceable = [saving for saving in step if saving not in self._failing]
            self._failing.update(traceable[-1:])
        return False

    def _options(self, layouts: Iterable[Combination], step: Combination) -> list["Option"]:
        """Returns a step of a ladder with some layouts, without savings that cannot be traced."""
        combination = [saving for saving in step if saving not in self._failing]
        return self._make((*layout, *combination) for layout in layouts)

    def _make(self, combinations: Iterable[Combination]) -> list[Option]:
        """Returns an option for each of the combinations that suit the request."""
        return list(filter(None, map(self._option, dict.fromkeys(combinations))))

    def _make_option(self, savings: Combination) -> Option | None:
        request = with_savings(self.request, savings)
        if request is None:
            return None
        return Option(savings, request, self.capacity, self.batch_size)

    def what_would_fit(self) -> tuple[int, int | None]:
        """Returns the capacity at which one row per device fits, and the number of these devices
        that suffices, or None.

        If the state is spread or sharded, each of ``n`` devices needs ``fixed + spread / n``. Two
        traces give both terms. Traces near the result correct it, since shards are rounded up.
        """
        traced = [option for option, choice in self.choices.items() if choice.optimizer is None]
        least = min(traced, key=Option.needs)
        size = least.needs()
        layout = SPREAD if SHARDS.saving.option in self.skipped else SHARDS
        savings = (layout, *(saving for saving in least.savings if saving.stage != "layout"))
        capacity = max(self.capacity)
        devices = len(self.capacity)

        def needs(count: int) -> int:
            request = with_savings(replace(self.request, devices=count), savings)
            assert request is not None
            return Option(savings, request, (capacity,) * count, count).needs()

        if least.is_whole:
            return size, None
        _log.info("trying: more devices, at most 5 numbers of them")
        # A layout may have no trace, and the time for traces ends.
        with contextlib.suppress(ValueError, TimeoutError):
            few = needs(2 * devices)
            many = needs(4 * devices)
            spread = 4 * devices * (few - many)
            free = capacity - (2 * many - few)
            if spread > 0 and free > 0:
                solved = max(devices + 1, -(-spread // free))
                counts = range(max(devices + 1, solved - 3), solved + 4)
                place = bisect.bisect_left(counts, True, key=lambda count: needs(count) <= capacity)
                return size, counts.start + place
        return size, None
