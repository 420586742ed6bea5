"""``reproducible="bits"``: an update has the same bits on any number of devices and ranks.

An effective batch is cut into groups of ``micro_batch_size`` rows. A group is one forward and one
backward of one replica, in memory of its own, so its loss and its gradients have the same bits
wherever it runs. The sums over groups are exact, so no order of them matters::

    group 0   forward, backward ---> gradients ---> integers --+
    group 1   forward, backward ---> gradients ---> integers --+--> sum ---> gradients of the batch
    group 2   forward, backward ---> gradients ---> integers --+

Gradients are cut into parts. Small parameters share a part. It is counted in units, powers of two
that follow from its own largest element. Elements that are too small for its unit have another one.
Parts of one unit add up as integers of 64 bits. Most parts have one unit, and few have two. Nothing
is agreed on before, and no group runs again.

On the CPU, conversions to integers are slow. So a number is added to the elements that rounds them,
and the bits of the sum are added up. Those of the number are subtracted once.

The gradient of a group is that of its mean, nearly: the loss is divided by the power of two next to
the weight of the group, so half precision does not overflow. The exact sum is multiplied back, and
divided by the weight of the batch in float64. Then it is rounded, once.

Losses and weights are added by ``math.fsum``, which rounds once.
"""

import contextlib
import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

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
from .groups import DDPGroups, GroupReport, GroupSync, ReplicaGroups
from .kinds import exact_kind
from .numbered_rows import ArithmeticByRow

_BITS = 51  # The largest element of a part has as many, and at least 43.
_LEAST_BITS = 12  # Each element has as many. A smaller one has another unit.
_STEP = 8  # The exponents of the units are this far apart.
_SMALLEST = -1020  # the smallest exponent: its inverse is a number of float64, too
_NOT_FINITE = 2000  # stands for the unit of a gradient that is not finite
_MOST_GROUPS = 2 ** (62 - _BITS)  # Sums of them fit into 64 bits.
# 1.5 * 2**52. A small number of float64 plus this one is rounded to an integer, which the last bits
# of the sum are.
_BITS_OF_ROUNDER = 0x4338 << 48
_ROUNDER = torch.tensor(_BITS_OF_ROUNDER, device="cpu").view(torch.float64)
_COMMUNICATES = (
    "reproducible='bits' with a module or a criterion that communicates with other ranks, expected one that does not: leave out "
    "its collectives"
)
# Elements of a part, at most. On the CPU they stay in its cache. Smaller tensors share a part.
_ELEMENTS = 2**22
_ELEMENTS_ON_CPU = 2**16
Elements = list[tuple[int, slice]]  # Elements of tensors with these numbers.
Place = tuple[int, int]  # The number of a part, and the exponent of a unit.


def _integers_of(
    part: Tensor, smallest: float, largest: float, factor: float
) -> Iterator[tuple[int, Tensor]]:
    """Yields the exponents of units, and the integers of a part times a power of two, plus the bits
    of ``_ROUNDER``.

    Magnitudes are between ``smallest`` and ``largest``.
    """
    if not math.isfinite(largest * factor):
        yield _NOT_FINITE, torch.zeros_like(part, dtype=torch.int64)
        return
    # The factor over a unit is a number of float64, too.
    smallest_unit = _SMALLEST + max(math.frexp(factor)[1], 0)
    while largest:
        _, exponent = math.frexp(largest * factor)
        unit = max(-(-exponent // _STEP) * _STEP - _BITS, smallest_unit)
        counts = part.to(torch.float64, copy=True)
        least = 2.0 ** (unit + _LEAST_BITS) / factor
        largest = 0.0
        if smallest < least and unit > smallest_unit:
            part = part.masked_fill(part.abs() >= least, 0)
            largest = float(part.abs().max())
            if largest:
                counts.masked_fill_(part != 0, 0)
        torch.add(_ROUNDER, counts, alpha=factor * 2.0**-unit, out=counts)
        yield unit, counts.view(torch.int64)


def _flat(tensor: Tensor) -> Tensor:
    """Returns the real elements in one dimension: a view, if the tensor is contiguous."""
    if tensor.layout != torch.strided:
        raise TypeError(
            "reproducible='bits' with a sparse gradient, expected dense ones: set sparse=False in the embedding"
        )
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.reshape(-1)


def _cut(tensors: Sequence[Tensor]) -> list[Elements]:
    """Returns parts: elements of one tensor, or all of several small ones of a device."""
    parts: list[Elements] = []
    sizes = [
        (str(each.device), each.numel() * (1 + each.is_complex()), number)
        for number, each in enumerate(tensors)
        if each.numel()
    ]
    for _, of_device in itertools.groupby(sorted(sizes), operator.itemgetter(0)):
        room = 0
        for _, size, number in of_device:
            if size <= room:
                parts[-1].append((number, slice(0, size)))
            else:
                room = _ELEMENTS_ON_CPU
                most = room if tensors[number].is_cpu else _ELEMENTS
                starts = range(0, size, most)
                parts += [[(number, slice(start, min(start + most, size)))] for start in starts]
            room -= size
    return parts


def _join(part: Elements, flat: Mapping[int, Tensor]) -> Tensor:
    """Returns a part of tensors, with zeros for those that are missing."""
    like = next(iter(flat.values()))
    pieces = [
        flat[number][place] if number in flat else like.new_zeros(place.stop)
        for number, place in part
    ]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _magnitudes_of(tensors: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Returns the smallest magnitude in each tensor, and the largest. The host waits once."""
    if not tensors:
        return []
    home = tensors[0].device
    ends = [end.to(home) for tensor in tensors for end in tensor.abs().aminmax()]
    numbers: list[tuple[float, float]] = torch.stack(ends).view(-1, 2).tolist()
    return numbers


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the norm of gradients in float64.

    It is the same for any cut of them into tensors, and for any order.
    """
    flat = dict(enumerate(map(_flat, gradients)))
    norm = _norm([_join(part, flat) for part in _cut(gradients)])
    home = gradients[0].device if gradients else None
    return torch.tensor(norm, dtype=torch.float64, device=home)


def clip_exactly(parameters: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Clips gradients as ``torch.nn.utils.clip_grads_with_norm_`` does, with a factor of float64."""
    factor = max_norm / (float(norm) + 1e-6)  # nan if the norm is
    if not factor >= 1:
        for gradient in [each.grad for each in parameters if each.grad is not None]:
            gradient.mul_(factor)


def _norm(parts: Sequence[Tensor]) -> float:
    """Returns the norm. Squares, over that of the largest element, are integers of 50 bits.

    Integers of 64 bits have the last bits of their sum, and a sum of float64 has the first ones.
    """
    magnitudes = [largest for _, largest in _magnitudes_of(parts)]
    largest = max(magnitudes, default=0.0)
    if not all(map(math.isfinite, magnitudes)):
        return sum(magnitudes)
    if not largest:
        return 0.0
    scale = 2.0 ** min(25 - math.frexp(largest)[1], 1000)
    sums = []
    for part in parts:
        squares = part.to(torch.float64, copy=True).mul_(scale).square_()
        sums += [squares.sum().view(torch.int64), squares.add_(_ROUNDER).view(torch.int64).sum()]
    numbers = torch.stack([each.to(parts[0].device) for each in sums]).cpu()
    first = math.fsum(numbers[::2].view(torch.float64).tolist())
    last = sum(numbers[1::2].tolist()) - _BITS_OF_ROUNDER * sum(map(len, parts))
    total = last + (round((int(first) - last) / 2**64) << 64)
    return math.sqrt(total) / scale


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
        self._sums: dict[torch.device, dict[Place, Tensor]] = {}
        self._additions: Counter[Place] = Counter()
        self._parts = _cut(self._trained)
        self._numbers = {each: number for number, each in enumerate(self._trained)}
        self._present: set[int] = set()  # Numbers of parameters with a gradient.
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
        reports = self._groups.gather(self._report(present.digest()))
        _check_reports(reports)
        present.check(is_same=len({report.digest for report in reports}) == 1)
        total = loss_sums.add_numbers([loss for report in reports for loss in report.losses])
        weight = loss_sums.add_numbers([weight for report in reports for weight in report.weights])
        weight = max(weight, self.kind.least)
        divisor = weight if self._is_mean and weight else 1.0
        self._set_gradients(reports, divisor)
        mean = total / divisor if weight else math.nan
        loss = torch.tensor(mean, dtype=self._dtype)
        loss = loss.to(self._device)
        reduced = Reduced(loss, weight, 1.0, self.sync, self.kind, self._logged)
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
        gradients: dict[torch.device, dict[int, Tensor]] = {}
        for parameter, gradient in self._groups.take(self._trained):
            number = self._numbers[parameter]
            self._present.add(number)
            flat = gradients.setdefault(gradient.device, {})
            # A second one has zeros, in place of that of another replica.
            flat[number] = flat[number] + _flat(gradient) if number in flat else _flat(gradient)
        for device, flat in gradients.items():
            parts = [
                (number, _join(part, flat))
                for number, part in enumerate(self._parts)
                if any(each in flat for each, _ in part)
            ]
            # The host waits for a GPU once. On the CPU a part stays in the cache.
            batches = [[each] for each in parts] if device.type == "cpu" else [parts]
            for batch in batches:
                self._count_parts(batch, device, factors[device])

    def _count_parts(
        self, parts: Sequence[tuple[int, Tensor]], device: torch.device, factor: float
    ) -> None:
        """Adds parts with their numbers, times a factor, to the sums of a device."""
        sums = self._sums.setdefault(device, {})
        magnitudes = _magnitudes_of([part for _, part in parts])
        for (number, part), ends in zip(parts, magnitudes, strict=True):
            for unit, integers in _integers_of(part, *ends, factor):
                place = number, unit
                self._additions[place] += 1
                if place in sums:
                    sums[place] += integers
                else:
                    sums[place] = integers

    def _report(self, digest: float) -> GroupReport:
        calls = self.forwards.copies.collectives
        is_alone = not (calls.is_used or any(self.forwards.model.runs.values()))
        return GroupReport(
            [*map(float, self._losses)],
            [*map(float, self._weights)],
            self._additions,
            self._present,
            digest,
            "" if is_alone else _COMMUNICATES,
        )

    @torch.no_grad()
    def _set_gradients(self, reports: Sequence[GroupReport], divisor: float) -> None:
        """Adds up all devices and ranks, and makes sums gradients, one after the other.

        Integers are freed as gradients take their place.
        """
        additions = sum((report.additions for report in reports), Counter())
        present = set().union(*(report.present for report in reports))
        places = sorted(additions)
        sizes = [
            sum(each.stop - each.start for _, each in self._parts[number]) for number, _ in places
        ]
        totals: dict[Place, Tensor] = {}

        def add_up() -> Iterator[Tensor]:
            for place, size in zip(places, sizes, strict=True):
                part, _ = place
                first, _ = self._parts[part][0]
                home = self._trained[first].device
                integers = [
                    sums.pop(place).to(home) for sums in self._sums.values() if place in sums
                ]
                integers = integers or [torch.zeros(size, dtype=torch.int64, device=home)]
                totals[place] = functools.reduce(operator.iadd, integers)
                yield totals[place]

        def take(place: Place) -> Tensor:
            """Returns integers times their unit: nan if a gradient was not finite."""
            integers = totals.pop(place).sub_(_BITS_OF_ROUNDER, alpha=additions[place])
            _, unit = place
            return integers.double().mul_(math.nan if unit == _NOT_FINITE else 2.0**unit)

        @functools.cache
        def gradient_of(number: int) -> Tensor:
            like = self._trained[number]
            return torch.zeros_like(like, memory_format=torch.contiguous_format)

        self._groups.reduce(sizes, add_up())
        for number, group in itertools.groupby(places, operator.itemgetter(0)):
            results = [_flat(gradient_of(each))[part] for each, part in self._parts[number]]
            total = functools.reduce(operator.iadd, map(take, group)).div_(divisor)
            for result, piece in zip(results, total.split([*map(len, results)]), strict=True):
                result.copy_(piece)
        accumulate(self._trained, {number: gradient_of(number) for number in present})


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
