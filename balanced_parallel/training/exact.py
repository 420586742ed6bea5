"""``reproducible="bits"``: an update has the same bits on any number of devices and ranks.

An effective batch is cut into groups of ``micro_batch_size`` rows. A group is one forward and one
backward of one replica, in memory of its own, so its loss and its gradients have the same bits
wherever it runs. The sums over groups are exact, so no order of them matters::

    group 0   forward, backward ---> gradients ---> integers --+
    group 1   forward, backward ---> gradients ---> integers --+--> sum ---> gradients of the batch
    group 2   forward, backward ---> gradients ---> integers --+

A gradient is counted in units, powers of two that follow from its own largest element. Gradients of
one unit add up as integers of 64 bits. Most gradients of a parameter have one unit, and few have
two. Nothing is agreed on before, and no group runs again.

Losses and weights are added by ``math.fsum``, which rounds once.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch.containers import map_tensors
from ..batch.rows import Cut, ParallelModel, Shard, move_leaves
from ..loss.criterion import DataParallelCriterion
from ..loss.kinds import Kind
from ..loss.sums import LossSum, Weight, add_numbers, power_of_two, run_backward, widen
from ..optim.balanced import BalancedOptimizer, is_elementwise
from ..replicas.batchnorm import meets_others
from ..replicas.buckets import accumulate
from ..runtime.devices import Devices
from ..runtime.values import scaled
from .settings import Settings
from .sync import GroupReport, GroupSync
from .update import Accumulation, BatchRun, Compute, Forwards, Limit, Reduced

_BITS = 52  # of the largest element of a gradient, and at least 44
_STEP = 8  # The exponents of the units are this far apart.
_SMALLEST = -124  # the smallest exponent: float32 has no smaller normal number
_NOT_FINITE = 2000  # stands for the unit of a gradient that is not finite
_MOST_GROUPS = 2 ** (63 - _BITS)  # Sums of them fit into 64 bits.
_ELEMENTS = 2**22  # of a gradient, whose squares are in memory at a time


class ExactSum:
    """An exact sum of gradients of one parameter, as integers by the exponent of their unit."""

    def __init__(self) -> None:
        self.integers: dict[int, Tensor] = {}

    def add(self, gradient: Tensor, largest: float) -> None:
        """Adds a gradient whose largest magnitude is ``largest``. Parts of a unit are lost."""
        if not math.isfinite(largest):
            self._add(_NOT_FINITE, torch.zeros_like(gradient, dtype=torch.int64))
        elif largest:
            _, exponent = math.frexp(largest)
            unit = max(-(-exponent // _STEP) * _STEP - _BITS, _SMALLEST)
            counts = widen(gradient) * 2.0**-unit
            self._add(unit, counts.to(torch.int64, memory_format=torch.contiguous_format))

    def merge(self, other: "ExactSum", device: torch.device) -> None:
        """Adds another sum, on a device."""
        for unit, integers in other.integers.items():
            self._add(unit, integers.to(device))

    def complete(self, units: Iterable[int], like: Tensor) -> None:
        """Adds zeros of the units that only other ranks have. All ranks have one order then."""
        for unit in units:
            if unit not in self.integers:
                self.integers[unit] = torch.zeros_like(like, dtype=torch.int64)
        self.integers = dict(sorted(self.integers.items(), reverse=True))

    def write(self, gradient: Tensor) -> None:
        """Writes the sum to a tensor: nan if a gradient was not finite."""
        total = torch.zeros(gradient.shape, dtype=torch.float64, device=gradient.device)
        for unit, integers in self.integers.items():
            size = math.nan if unit == _NOT_FINITE else 2.0**unit
            total.add_(integers, alpha=size)
        gradient.copy_(total)

    def _add(self, unit: int, integers: Tensor) -> None:
        if unit in self.integers:
            self.integers[unit] += integers
        else:
            self.integers[unit] = integers


def largest_of(tensors: Sequence[Tensor]) -> list[float]:
    """Returns the largest magnitude in each tensor. The host waits once."""
    if not tensors:
        return []
    home = tensors[0].device
    norms = []
    for tensor in tensors:
        norm = torch.zeros((), dtype=torch.float64)
        if tensor.numel():
            norm = torch.linalg.vector_norm(tensor, math.inf).double()
        norms.append(norm.to(home))
    return torch.stack(norms).tolist()


def clip_exactly(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """Clips gradients as ``torch.nn.utils.clip_grad_norm_`` does.

    Their norm is the same for any cut of them into tensors, and for any order.
    """
    gradients = [_real(each.grad) for each in parameters if each.grad is not None]
    norm = torch.tensor(_norm(gradients), dtype=torch.float64)
    if gradients:
        norm = norm.to(gradients[0])
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _norm(gradients: Sequence[Tensor]) -> float:
    """Returns the norm. Squares, over that of the largest element, are integers of 62 bits."""
    magnitudes = largest_of(gradients)
    largest = max(magnitudes, default=0.0)
    if not all(map(math.isfinite, magnitudes)):
        return sum(magnitudes)
    if not largest:
        return 0.0
    _, exponent = math.frexp(largest)
    scale = 2.0 ** min(-exponent, 1000)
    sums = []
    for gradient in gradients:
        for part in gradient.reshape(-1).split(_ELEMENTS):
            squares = (part.double() * scale).square_().mul_(2.0**31)
            high = squares.floor()
            low = squares.sub_(high).mul_(2.0**31)
            sums += [high.long().sum(), low.long().sum()]
    total = 0
    home = gradients[0].device
    for high, low in torch.stack([each.to(home) for each in sums]).view(-1, 2).tolist():
        total += (high << 31) + low
    return math.sqrt(total / 2**62) / scale


class ExactAccumulation(Accumulation):
    """Exact sums of losses and gradients over the groups of an update, on one rank."""

    def __init__(
        self,
        forwards: Forwards,
        trained: Mapping[str, Tensor],
        sync: GroupSync,
        kind: Kind,
        limit: Limit,
        weight_before: float,
    ) -> None:
        super().__init__(forwards, trained, sync, kind, limit, weight_before)
        _check_determinism(forwards.model.devices)
        self._groups = sync
        self._rows = int(limit.value or 1)  # of a group
        self._trained = list(trained.values())
        self._factor = power_of_two(weight_before) if kind.is_mean else 1.0
        # The loss and the weight of each group, and weights of whole batches.
        self._losses: list[Tensor] = []
        self._weights: list[Weight] = []
        self._sums: dict[torch.device, dict[Tensor, ExactSum]] = {}
        self._has_graph = False

    def add(self, run: BatchRun) -> None:
        """Runs forward and backward of each group."""
        plan = self.plan(run)
        shards = itertools.chain(*plan)
        targets = [move_leaves(shard.targets.inputs, None) for shard in shards]
        kind = self.kind.of_batch(targets or run.batch.counted_targets, is_whole=run.is_whole)
        self._weights.append(kind.weight)
        self._is_mean = self._is_mean and kind.is_mean
        self.run(run, plan, kind.sums)

    def run(self, run: BatchRun, plan: list[list[Shard]], compute: Compute) -> None:
        """Runs forward and backward of each group of a plan."""
        if self._groups.take(self._trained):
            raise RuntimeError(
                "parameters have gradients of another backward, expected none before apply(): call optimizer.zero_grad()"
            )
        with self._groups.accumulating():
            for shards in plan:
                # No variable keeps the losses, and their graph, during the next forward.
                self._run_backwards(shards, self.forwards.run(shards, compute, run.outputs))

    def plan(self, run: BatchRun) -> list[list[Shard]]:
        """Returns groups of rows, one for each device at a time."""
        rows = run.batch.rows
        if rows is None:
            raise ValueError(
                "reproducible='bits' with inputs that have no rows, expected rows, which are put into groups"
            )
        devices = self.forwards.model.devices
        plan: list[list[Shard]] = []
        for number, start in enumerate(range(0, rows, self._rows)):
            place = number % len(devices)
            if place == 0:
                plan.append([])
            group = range(start, min(start + self._rows, rows))
            shard = run.batch.shard(group, devices[place])
            plan[-1].append(run.surround(shard) if run.surround else shard)
        return plan

    def finish(self, settings: Callable[[], Settings]) -> Reduced:
        """Adds up everything on all ranks."""
        if self._losses and not self._has_graph:
            run_backward([], 1.0)  # raises an error that says what is missing
        present = settings()
        sums = self._join_devices()
        reports = self._groups.gather(self._report(sums, present.digest()))
        _check_reports(reports)
        self._set_gradients(sums, [report.units for report in reports])
        digests = zip(*(report.digest for report in reports), strict=True)
        present.check(*map(sum, digests))
        total = add_numbers([loss for report in reports for loss in report.losses])
        weight = add_numbers([weight for report in reports for weight in report.weights])
        weight = max(weight, self.kind.least)
        true_divisor = weight if self._is_mean and weight else 1.0
        mean = total / true_divisor if weight else math.nan
        loss = torch.tensor(mean, dtype=self._dtype)
        factor = self._factor / true_divisor
        loss = loss.to(self._device)
        return Reduced(loss, weight, factor, self.sync, self.kind, self._logged)

    reduce = finish

    def _run_backwards(self, shards: Sequence[Shard], losses: list[LossSum]) -> None:
        """Runs the backward of each group. Those of one device run one after the other."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for shard, loss in zip(shards, losses, strict=True):
            by_device.setdefault(shard.device, []).append(loss.total)
            if loss.logged:
                self._logged.append(loss.logged)
            self._losses.append(loss.total.detach())
            # A sum counts, but is not divided.
            self._weights.append(1.0 if loss.weight is None else loss.weight)
        for turn in itertools.zip_longest(*by_device.values()):
            roots = [loss for loss in turn if loss is not None and loss.requires_grad]
            if roots:
                self._has_graph = True
                roots = [scaled(root, self._scaler) for root in roots]
                self._groups.backward(roots, self._factor, None)
                self._count_gradients()

    @torch.no_grad()
    def _count_gradients(self) -> None:
        """Adds the gradients of one group on each device."""
        by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for parameter, gradient in self._groups.take(self._trained):
            by_device.setdefault(gradient.device, []).append((parameter, _real(gradient)))
        for device, pairs in by_device.items():
            sums = self._sums.setdefault(device, {})
            magnitudes = largest_of([gradient for _, gradient in pairs])
            for (parameter, gradient), largest in zip(pairs, magnitudes, strict=True):
                sums.setdefault(parameter, ExactSum()).add(gradient, largest)

    @torch.no_grad()
    def _join_devices(self) -> list[ExactSum | None]:
        """Returns the sum of each parameter, None without one. The devices have none any more."""
        totals: list[ExactSum | None] = []
        for parameter in self._trained:
            total = ExactSum()
            has_any = False
            for sums in self._sums.values():
                if parameter in sums:
                    has_any = True
                    total.merge(sums.pop(parameter), parameter.device)
            totals.append(total if has_any else None)
        return totals

    def _report(self, sums: Sequence[ExactSum | None], digest: Sequence[float]) -> GroupReport:
        calls = self.forwards.copies.collectives
        is_alone = not (calls.is_used or any(self.forwards.model.runs.values()))
        return GroupReport(
            [*map(float, self._losses)],
            [*map(float, self._weights)],
            [None if each is None else [*each.integers] for each in sums],
            digest,
            "" if is_alone else "the module or the criterion communicates with other ranks",
        )

    @torch.no_grad()
    def _set_gradients(
        self, sums: list[ExactSum | None], units: Sequence[Sequence[Sequence[int] | None]]
    ) -> None:
        """Adds the sums of all ranks, and makes them gradients, one after the other."""
        totals: list[tuple[Tensor, ExactSum]] = []
        for number, parameter in enumerate(self._trained):
            of_ranks = [of_rank[number] for of_rank in units]
            if all(each is None for each in of_ranks):
                continue  # No rank has a gradient.
            total = sums[number] or ExactSum()
            everywhere = set(itertools.chain(*filter(None, of_ranks)))
            total.complete(everywhere, _real(parameter))
            totals.append((parameter, total))
        sums.clear()
        integers: list[Tensor] = []
        for _, total in totals:
            integers += total.integers.values()
        self._groups.reduce(integers)
        integers.clear()
        while totals:  # Integers are freed as gradients take their place.
            parameter, total = totals.pop()
            gradient = torch.empty_like(parameter)
            total.write(_real(gradient))
            accumulate([parameter], {0: gradient})
            del total


def _check_reports(reports: Sequence[GroupReport]) -> None:
    """Raises an error on all ranks if one has failed, or if there are too many groups."""
    failures = [report for report in reports if report.failure]
    if failures:
        first = failures[0]
        kind = torch.OutOfMemoryError if first.is_out_of_memory else RuntimeError
        raise kind(
            f"{len(failures)} of {len(reports)} ranks failed ({first.failure}), expected none: repeat the step, nothing was "
            "updated"
        )
    groups = sum(len(report.losses) for report in reports)
    if groups > _MOST_GROUPS:
        raise ValueError(
            f"reproducible='bits' with {groups} micro-batches, expected {_MOST_GROUPS} at most: give a larger micro_batch_size"
        )


def check_exact(
    model: ParallelModel,
    criterion: DataParallelCriterion,
    optimizers: Sequence[torch.optim.Optimizer],
    micro_batch_size: object,
    cut: Cut | None,
) -> None:
    """Raises ``ValueError`` for settings of a step whose bits depend on the layout."""
    whole = {*model.parameters(), *criterion.parameters()}
    names = sorted({_name_of(device) for device in model.devices})
    refused = ""
    if not isinstance(micro_batch_size, int):
        refused = (
            f"micro_batch_size={micro_batch_size!r}, expected a number of rows, the same for any devices: groups of that size "
            "have the same bits wherever they run"
        )
    elif cut is not None:
        refused = f"cut={type(cut).__name__}(...), expected groups of equal rows: leave it out"
    elif model.split is not None:
        refused = f"split={model.split!r}, expected None: each device runs whole groups"
    elif meets_others(model) or criterion.copies.collectives.sums_rows:
        refused = "batch norm or sum_over_rows over all rows, expected layers that need the rows of a group alone, as group norm"
    elif len(names) > 1:
        refused = (
            f"{' and '.join(names)}, expected devices of one kind: others round in another way"
        )
    elif any(_depends_on_cut(optimizer, whole) for optimizer in optimizers):
        refused = (
            "BalancedOptimizer(shard='elements') that is fused or has 16-bit parameters, whose rounding on the CPU depends on "
            "the cut, expected shard='parameters'"
        )
    if refused:
        raise ValueError(f"reproducible='bits' with {refused}")


def describe_machine(devices: Devices) -> dict[str, Hashable]:
    """Returns what the bits of an operator depend on. The ranks compare it."""
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "device": _name_of(devices[0]),
        "instructions of the CPU": torch.backends.cpu.get_cpu_capability(),
    }


def own_memory(shard: Shard) -> Shard:
    """Returns a shard with copies of the tensors that are on its device.

    The rows of a group may be aligned in another way in another batch, which kernels may look at.
    """

    def copied(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.device == shard.device else tensor

    inputs: Any = map_tensors(copied, shard.inputs)
    targets: Any = map_tensors(copied, shard.targets)
    return shard._replace(inputs=inputs, targets=targets)


@contextlib.contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Casts a weight in each use, in this block.

    The cache is for leaves alone, so a weight with several uses would sum its gradients in another
    dtype on the first device than on others.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _check_determinism(devices: Devices) -> None:
    """Raises ``RuntimeError`` if kernels of GPUs may sum in any order."""
    is_set = torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    if devices[0].type == "cuda" and not is_set:
        raise RuntimeError(
            "reproducible='bits' on GPUs, whose kernels may sum in any order, expected torch.use_deterministic_algorithms(True), "
            "torch.backends.cudnn.benchmark = False, and CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment"
        )


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _depends_on_cut(optimizer: torch.optim.Optimizer, whole: Collection[Tensor]) -> bool:
    """Returns True if kernels of the CPU round the last elements of a piece in another way."""
    if not isinstance(optimizer, BalancedOptimizer) or optimizer.shard == "parameters":
        return False
    if not is_elementwise(optimizer.recipe.optimizer_class):
        return False
    for group in optimizer.param_groups:
        is_fused = bool(group.get("fused"))
        for piece in group["params"]:
            is_piece = piece not in whole and not piece.is_cuda
            if is_piece and (is_fused or piece.itemsize < 4):
                return True
    return False


def _real(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided:
        raise TypeError(
            "reproducible='bits' with a sparse gradient, expected dense ones: set sparse=False in the embedding"
        )
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
