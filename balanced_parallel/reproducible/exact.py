"""``reproducible="bits"``: an update has the same bits on any number of devices and ranks.

An effective batch is cut into groups of ``micro_batch_size`` rows. A group is one forward and one
backward of one replica, in memory of its own, so its loss and its gradients have the same bits
wherever it runs. The sums over groups are exact, so no order of them matters::

    group 0   forward, backward ---> gradients ---> integers --+
    group 1   forward, backward ---> gradients ---> integers --+--> sum ---> gradients of the batch
    group 2   forward, backward ---> gradients ---> integers --+

A gradient is counted in units, powers of two that follow from its own largest element. Elements
that are too small for its unit have another one. Gradients of one unit add up as integers of 64
bits. Most gradients of a parameter have one unit, and few have two. Nothing is agreed on before,
and no group runs again.

The gradient of a group is that of its mean, nearly: the loss is divided by the power of two next to
the weight of the group, so half precision does not overflow. The exact sum is multiplied back, and
divided by the weight of the batch in float64. Then it is rounded, once.

Losses and weights are added by ``math.fsum``, which rounds once.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from .. import BalancedOptimizer
from ..batch import containers
from ..batch.rows import Shard
from ..loss import kinds as loss_kinds
from ..loss import sums as loss_sums
from ..optim.balanced import is_elementwise
from ..replicas.batchnorm import meets_others
from ..replicas.buckets import accumulate
from ..runtime import values
from ..strategies.ddp import DDPSync
from ..strategies.replicas import ReplicaSync
from ..training.settings import Settings, Unchecked
from ..training.update import Accumulation, BatchRun, Compute, Forwards, Limit, Reduced
from .groups import DDPGroups, GroupReport, GroupSync, PartUnits, ReplicaGroups
from .kinds import exact_kind
from .numbered_rows import ArithmeticByRow

_BITS = 52  # The largest element of a part has as many, and at least 44.
_LEAST_BITS = 12  # Each element has as many. A smaller one has another unit.
_STEP = 8  # The exponents of the units are this far apart.
_SMALLEST = -1020  # the smallest exponent: its inverse is a number of float64, too
_NOT_FINITE = 2000  # stands for the unit of a gradient that is not finite
_MOST_GROUPS = 2 ** (63 - _BITS)  # Sums of them fit into 64 bits.
_COMMUNICATES = (
    "reproducible='bits' with a module or a criterion that communicates with other ranks, expected one that does not: leave out "
    "its collectives"
)
# Elements of a tensor that are computed at a time. On the CPU they stay in its cache.
_ELEMENTS = 2**22
_ELEMENTS_ON_CPU = 2**16


class ExactSum:
    """An exact sum of gradients of one part of a parameter, as integers by the exponent of their
    unit.
    """

    def __init__(self) -> None:
        self.integers: dict[int, Tensor] = {}

    def add(
        self, gradient: Tensor, largest: float, smallest: float = math.inf, factor: float = 1.0
    ) -> None:
        """Adds a gradient times a power of two. Parts of a unit are lost.

        Magnitudes are between ``largest`` and ``smallest``.
        """
        if not math.isfinite(largest * factor):
            self.complete([_NOT_FINITE], gradient)
            return
        # The factor over a unit is a number of float64, too.
        smallest_unit = _SMALLEST + max(math.frexp(factor)[1], 0)
        bound = math.inf
        while largest:
            _, exponent = math.frexp(largest * factor)
            unit = max(-(-exponent // _STEP) * _STEP - _BITS, smallest_unit)
            least = 2.0 ** (unit + _LEAST_BITS) / factor
            if smallest >= least or unit == smallest_unit:
                least = 0.0
            largest = self._count(unit, gradient, factor, least, bound)
            bound = least

    def merge(self, other: "ExactSum", device: torch.device) -> None:
        """Adds another sum, on a device."""
        for unit, integers in other.integers.items():
            if unit in self.integers:
                self.integers[unit] += integers.to(device)
            else:
                self.integers[unit] = integers.to(device)

    def complete(self, units: Iterable[int], like: Tensor) -> None:
        """Adds zeros of the units that only other ranks have. All ranks have one order then."""
        for unit in units:
            if unit not in self.integers:
                self.integers[unit] = torch.zeros_like(like, dtype=torch.int64)
        self.integers = dict(sorted(self.integers.items(), reverse=True))

    def write(self, result: Tensor, divisor: float) -> None:
        """Writes the sum over a divisor, rounded once: nan if a gradient was not finite."""
        total = torch.zeros_like(result, dtype=torch.float64)
        for unit, integers in self.integers.items():
            total.add_(integers, alpha=math.nan if unit == _NOT_FINITE else 2.0**unit)
        result.copy_(total.div_(divisor))

    def _count(self, unit: int, values: Tensor, factor: float, least: float, bound: float) -> float:
        """Adds values times a power of two, in units, of those between ``least`` and ``bound``.

        Returns the largest magnitude below ``least``.
        """
        counts = values.to(torch.float64, copy=True).mul_(factor * 2.0**-unit)
        largest = 0.0
        if bound < math.inf:
            counts.masked_fill_(values.abs() >= bound, 0)
        if least:
            magnitudes = values.abs()
            is_small = magnitudes < least
            counts.masked_fill_(is_small, 0)
            largest = float(torch.where(is_small, magnitudes, 0).max())
        if unit in self.integers:
            self.integers[unit] += counts.long()
        else:
            self.integers[unit] = counts.long()
        return largest


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """Returns the real view of a tensor in parts of one dimension. Those of a contiguous one are
    views.
    """
    if tensor.layout != torch.strided:
        raise TypeError(
            "reproducible='bits' with a sparse gradient, expected dense ones: set sparse=False in the embedding"
        )
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    parts: Sequence[Tensor] = real.reshape(-1).split(_sizes_of_parts(tensor))
    return parts


def _sizes_of_parts(tensor: Tensor) -> list[int]:
    """Returns the numbers of elements of :func:`_parts`, without an operator that may fail: the
    other ranks wait for so many.
    """
    size = _ELEMENTS_ON_CPU if tensor.is_cpu else _ELEMENTS
    count = tensor.numel() * (2 if tensor.is_complex() else 1)
    return [min(size, count - start) for start in range(0, count, size)]


def magnitudes_of(tensors: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Returns the largest magnitude in each tensor, and the smallest. The host waits once."""
    if not tensors:
        return []
    home = tensors[0].device
    ends = []
    for tensor in tensors:
        smallest, largest = tensor.abs().aminmax()
        ends += [largest.to(home), smallest.to(home)]
    numbers = torch.stack(ends).tolist()
    return [*zip(numbers[::2], numbers[1::2], strict=True)]


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the norm of gradients in float64.

    It is the same for any cut of them into tensors, and for any order.
    """
    norm = _norm([part for gradient in gradients for part in _parts(gradient)])
    home = gradients[0].device if gradients else None
    return torch.tensor(norm, dtype=torch.float64, device=home)


def clip_exactly(parameters: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Clips gradients as ``torch.nn.utils.clip_grads_with_norm_`` does, with a factor of float64."""
    factor = max_norm / (float(norm) + 1e-6)  # nan if the norm is
    if not factor >= 1:
        for gradient in [each.grad for each in parameters if each.grad is not None]:
            gradient.mul_(factor)


def _norm(parts: Sequence[Tensor]) -> float:
    """Returns the norm. Squares, over that of the largest element, are integers of 62 bits."""
    magnitudes = [largest for largest, _ in magnitudes_of(parts)]
    largest = max(magnitudes, default=0.0)
    if not all(map(math.isfinite, magnitudes)):
        return sum(magnitudes)
    if not largest:
        return 0.0
    _, exponent = math.frexp(largest)
    scale = 2.0 ** min(-exponent, 1000)
    sums = []
    for part in parts:
        squares = part.to(torch.float64, copy=True).mul_(scale).square_().mul_(2.0**31)
        integers = squares.long()
        sums.append(integers.sum())
        squares.sub_(integers).mul_(2.0**31)
        sums.append(integers.copy_(squares).sum())
    total = 0
    home = parts[0].device
    for high, low in torch.stack([each.to(home) for each in sums]).view(-1, 2).tolist():
        total += (high << 31) + low
    return math.sqrt(total / 2**62) / scale


class ExactAccumulation(Accumulation):
    """Exact sums of losses and gradients over the groups of an update, on one rank."""

    takes_one_pass = False  # A layout with one group has the same passes as others.

    def __init__(
        self,
        forwards: Forwards,
        sync: GroupSync,
        kind: loss_kinds.Kind,
        weight_before: float,
    ) -> None:
        super().__init__(forwards, sync, kind, weight_before)
        _check_determinism(self._device)
        self._groups = sync
        self._rows = int(forwards.limit.value or 1)  # Rows of a group.
        self._trained = list(forwards.trained.values())
        # The loss and the weight of each group, and weights of whole batches.
        self._losses: list[Tensor] = []
        self._weights: list[Tensor | float] = []
        self._sums: dict[torch.device, dict[Tensor, list[ExactSum]]] = {}  # The sums of the parts.
        self._has_graph = False
        self._before = {name: each.detach().clone() for name, each in self._buffers()}

    def add(self, run: BatchRun) -> None:
        """Runs forward and backward of each group."""
        plan = self.plan(run)
        shards = itertools.chain(*plan)
        targets = [shard.plain_targets() for shard in shards]
        kind = self.kind.of_batch(targets or run.batch.counted_targets, is_whole=run.is_whole)
        self._has_kind = True
        self._weights.append(kind.weight)
        self._is_mean = self._is_mean and kind.is_mean
        self.run(run, plan, kind.sums)

    def run(self, run: BatchRun, plan: list[list[Shard]], compute: Compute) -> None:
        """Runs forward and backward of each group of a plan."""
        if self._groups.take(self._trained):
            raise RuntimeError(
                "parameters have gradients of another backward, expected none before apply(): call optimizer.zero_grad()"
            )
        super().run(run._replace(is_whole=False), plan, compute)  # finish() reduces the gradients

    def run_again(self, run: BatchRun, learned: loss_kinds.Kind, hand_back: Compute) -> None:
        """Runs a batch in the second of two passes.

        If the first one has shown a mean over one count, this is the pass of the next updates. A run
        that is resumed has the same bits then.
        """
        if learned.passes > 1:
            super().run_again(run, learned, hand_back)
            return
        self.kind = learned
        self._is_mean = learned.is_mean
        self.add(run)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for part in (self.forwards.model.module, self.forwards.copies.criterion):
            if isinstance(part, nn.Module):
                yield from part.named_buffers()

    def _check_buffers(self) -> None:
        """Raises ``ValueError`` if a forward has written to a buffer."""
        for name, buffer in self._buffers():
            copy = self._before.get(name)
            if copy is None or not torch.equal(buffer.to(copy), copy):
                raise ValueError(
                    f"reproducible='bits' with a forward that writes the buffer {name}, expected none, such as group norm in "
                    "place of batch norm, or a buffer made before: each device would have values of its own rows"
                )

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

    def finish(self, settings: Callable[[], Settings] = Unchecked) -> Reduced:
        """Adds up everything on all ranks."""
        if self._losses and not self._has_graph:
            loss_sums.run_backward([], 1.0)  # raises an error that says what is missing
        if self.forwards.state is not None:
            self.forwards.state.finish()
        self._check_buffers()
        present = settings()
        sums = self._join_devices()
        reports = self._groups.gather(self._report(sums, present.digest()))
        _check_reports(reports)
        present.check(is_same=len({report.digest for report in reports}) == 1)
        totals = self._sum(sums, [report.units for report in reports])
        total = loss_sums.add_numbers([loss for report in reports for loss in report.losses])
        weight = loss_sums.add_numbers([weight for report in reports for weight in report.weights])
        weight = max(weight, self.kind.least)
        divisor = weight if self._is_mean and weight else 1.0
        mean = total / divisor if weight else math.nan
        loss = torch.tensor(mean, dtype=self._dtype)
        loss = loss.to(self._device)
        reduced = Reduced(loss, weight, 1.0, self.sync, self.kind, self._logged)
        self._set_gradients(totals, divisor)
        self._groups.confirm()
        if self.forwards.state is not None:
            self.forwards.state.reset()  # Nothing stays in memory.
        return reduced

    reduce = finish

    def _backward(
        self, losses: Sequence[loss_sums.LossSum], followers: int, *, is_last: bool
    ) -> None:
        """Runs the backward of each group. Those of one device run one after the other."""
        by_device: dict[torch.device, list[tuple[Tensor, float]]] = {}
        for loss in losses:
            if loss.logged:
                self._logged.append(loss.logged)
            # A sum counts, but is not divided.
            weight = 1.0 if loss.weight is None else float(loss.weight)
            divisor = float(loss_sums.power_of_two(weight)) if self._is_mean else 1.0
            by_device.setdefault(loss.total.device, []).append((loss.total, divisor))
            self._losses.append(loss.total.detach())
            self._weights.append(weight)
        for turn in itertools.zip_longest(*by_device.values()):
            present = dict(zip(by_device, turn, strict=True))
            groups = {device: group for device, group in present.items() if group is not None}
            roots = [
                values.scaled(loss / divisor, self._scaler)
                for loss, divisor in groups.values()
                if loss.requires_grad
            ]
            if roots:
                self._has_graph = True
                self._groups.backward(roots, 1.0, None)
                self._count_gradients({device: factor for device, (_, factor) in groups.items()})

    @torch.no_grad()
    def _count_gradients(self, factors: Mapping[torch.device, float]) -> None:
        """Adds the gradients of one group on each device, times its factor."""
        by_device: dict[torch.device, list[tuple[ExactSum, Tensor]]] = {}
        for parameter, gradient in self._groups.take(self._trained):
            parts = _parts(gradient)
            sums = self._sums.setdefault(gradient.device, {})
            totals = sums.setdefault(parameter, [ExactSum() for _ in parts])
            by_device.setdefault(gradient.device, []).extend(zip(totals, parts, strict=True))
        for device, pairs in by_device.items():
            magnitudes = magnitudes_of([part for _, part in pairs])
            for (total, part), (largest, smallest) in zip(pairs, magnitudes, strict=True):
                total.add(part, largest, smallest, factors[device])

    @torch.no_grad()
    def _join_devices(self) -> dict[Tensor, list[ExactSum]]:
        """Returns the sums of each parameter with a gradient. The devices have none any more."""
        joined: dict[Tensor, list[ExactSum]] = {}
        for sums in self._sums.values():
            while sums:
                parameter, parts = sums.popitem()
                totals = joined.setdefault(parameter, [ExactSum() for _ in parts])
                for total, part in zip(totals, parts, strict=True):
                    total.merge(part, parameter.device)
        return joined

    def _report(self, sums: Mapping[Tensor, list[ExactSum]], digest: float) -> GroupReport:
        calls = self.forwards.copies.collectives
        is_alone = not (calls.is_used or any(self.forwards.model.runs.values()))
        return GroupReport(
            [*map(float, self._losses)],
            [*map(float, self._weights)],
            {
                number: [[*part.integers] for part in sums[parameter]]
                for number, parameter in enumerate(self._trained)
                if parameter in sums
            },
            digest,
            "" if is_alone else _COMMUNICATES,
        )

    @torch.no_grad()
    def _sum(
        self, sums: dict[Tensor, list[ExactSum]], units: Sequence[Mapping[int, PartUnits]]
    ) -> list[tuple[Tensor, list[ExactSum]]]:
        """Returns the sums over all ranks for each parameter with a gradient."""
        totals: list[tuple[Tensor, list[ExactSum]]] = []
        units_of_totals: list[list[set[int]]] = []
        sizes: list[int] = []
        for number, parameter in enumerate(self._trained):
            of_ranks = [of_rank[number] for of_rank in units if number in of_rank]
            if not of_ranks:
                continue
            everywhere = [{*itertools.chain(*each)} for each in zip(*of_ranks, strict=True)]
            totals.append((parameter, sums.pop(parameter, [ExactSum() for _ in everywhere])))
            units_of_totals.append(everywhere)
            for size, present in zip(_sizes_of_parts(parameter), everywhere, strict=True):
                sizes += [size] * len(present)

        def integers() -> Iterator[Tensor]:
            for (parameter, of_parts), everywhere in zip(totals, units_of_totals, strict=True):
                parts = _parts(parameter)
                for total, present, part in zip(of_parts, everywhere, parts, strict=True):
                    total.complete(present, part)
                    yield from total.integers.values()

        self._groups.reduce(sizes, integers())
        return totals

    @torch.no_grad()
    def _set_gradients(self, totals: list[tuple[Tensor, list[ExactSum]]], divisor: float) -> None:
        """Makes sums gradients, one after the other. Integers are freed as these take their place."""
        while totals:
            parameter, of_parts = totals.pop()
            gradient = torch.empty_like(parameter, memory_format=torch.contiguous_format)
            for total, part in zip(of_parts, _parts(gradient), strict=True):
                total.write(part, divisor)
            accumulate([parameter], {0: gradient})
            del of_parts


def _check_reports(reports: Sequence[GroupReport]) -> None:
    """Raises an error on all ranks if one is refused, or if there are too many groups."""
    for refusal in filter(None, [report.refusal for report in reports]):
        raise RuntimeError(refusal)
    groups = sum(len(report.losses) for report in reports)
    if groups > _MOST_GROUPS:
        raise ValueError(
            f"reproducible='bits' with {groups} micro-batches, expected {_MOST_GROUPS} at most: give a larger micro_batch_size"
        )


def _own_memory(shard: Shard) -> Shard:
    """Returns a shard with copies of the tensors that are on its device.

    The rows of a group may be aligned in another way in another batch, which kernels may look at.
    """

    def copied(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.device == shard.device else tensor

    inputs, targets = containers.map_tensors(copied, (shard.inputs, shard.targets))
    return shard._replace(inputs=inputs, targets=targets)


class ExactArithmetic(ArithmeticByRow):
    """Exact sums of groups of rows: their bits are the same on any number of devices and ranks."""

    accumulation = ExactAccumulation
    norm = staticmethod(norm_of)
    clip = staticmethod(clip_exactly)

    @contextlib.contextmanager
    def surround(self) -> Iterator[None]:
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

    def check(self, optimizers: Sequence[torch.optim.Optimizer], micro_batch_size: object) -> None:
        """Raises ``ValueError`` for settings of a step whose bits depend on the layout."""
        super().check(optimizers, micro_batch_size)
        of_model = {*self.model.parameters()}
        of_criterion = {*self.criterion.parameters()}
        names = sorted({_name_of(device) for device in self.model.devices})
        refused = ""
        if not isinstance(micro_batch_size, int):
            refused = (
                f"micro_batch_size={micro_batch_size!r}, expected a number of rows, the same for any devices: groups of that "
                "size have the same bits wherever they run"
            )
        elif self.cut is not None:
            refused = (
                f"cut={type(self.cut).__name__}(...), expected groups of equal rows: leave it out"
            )
        elif self.model.split is not None:
            refused = f"split={self.model.split!r}, expected None: each device runs whole groups"
        elif meets_others(self.model) or self.criterion.copies.collectives.sums_rows:
            refused = (
                "batch norm or SumOverRows over all rows, expected layers that need the rows of a group alone, as group "
                "norm"
            )
        elif len(names) > 1:
            refused = (
                f"{' and '.join(names)}, expected devices of one kind: others round in another way"
            )
        elif of_model & of_criterion and len({*self.model.devices}) > 1:
            refused = (
                "a parameter that model and criterion share on several devices, expected it in the module alone: its gradients "
                "are added in another order on one device"
            )
        elif any(_depends_on_cut(optimizer, of_model | of_criterion) for optimizer in optimizers):
            refused = (
                "BalancedOptimizer(shard='elements') that is fused or has 16-bit parameters, whose rounding on the CPU depends "
                "on the cut, expected shard='parameters'"
            )
        if refused:
            raise ValueError(f"reproducible='bits' with {refused}")

    def kind_of(self, kind: loss_kinds.Kind) -> loss_kinds.Kind:
        """Returns the kind of a loss with exact sums."""
        return exact_kind(kind)

    def opener(self, strategy: object) -> Callable[[], GroupSync]:
        """Returns the function that opens an update of groups."""
        if isinstance(strategy, DDPSync):
            return lambda: DDPGroups(strategy, strategy.model)
        if not isinstance(strategy, ReplicaSync):
            raise ValueError(
                "reproducible='bits' with strategy='fsdp', which sums gradients in every micro-batch, expected strategy='ddp'"
            )
        return lambda: ReplicaGroups(strategy.model, strategy.criterion)

    def prepare(self) -> Callable[[Shard], Shard]:
        """Returns the function that copies the tensors of a group."""
        return _own_memory

    def group(self, limit: Limit) -> int:
        """Returns the number of rows of a group."""
        return int(limit.value or 1)

    def facts(self, limit: Limit) -> dict[str, Hashable]:
        """Returns what the bits of an operator depend on."""
        return {
            "micro_batch_size": self.group(limit),
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "device": _name_of(self.model.devices[0]),
            "instructions of the CPU": torch.backends.cpu.get_cpu_capability(),
        }


# The arithmetic of a step by its setting ``reproducible``.
ARITHMETIC = {True: ArithmeticByRow, "bits": ExactArithmetic}


def _check_determinism(device: torch.device) -> None:
    """Raises ``RuntimeError`` if kernels of GPUs may sum in any order."""
    is_set = torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    if device.type == "cuda" and not is_set:
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
