"""Comparisons of sums over the rows of some shards with those of their halves::

    a shard     rows 0 1 2 3     the sums of all
    its halves  0 1 | 2 3        those of each, which add up to the sums of all
    more rows   0 1 ... 1023     shards together and their copies: the hardest 16 of 16 rows are all

Samples of the rows are taken in the forwards of an update, and are compared once every rank has those
of all ranks. Without that, a loss whose rows depend on each other would be another one for shards.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..batch import containers
from ..batch.marks import Arguments, map_marked
from ..batch.outputs import PerReplica
from ..batch.plan import consecutive
from ..batch.rows import NOTHING, ParallelModel, Shard, count_rows, cut, move_leaves
from ..replicas.replicas import window
from ..runtime.collectives import gather_objects, world_size
from ..runtime.module_state import is_of_torch
from ..runtime.random_numbers import generator_states, set_generators
from ..runtime.torch_private import memory_of_plain
from .additive import AdditiveLoss
from .copies import Calls, CriterionCopies, ShardLoss, T, shards_of_targets
from .entries import add_leaves
from .formula import OVER_NUMBER, Formula
from .inside import ForwardNotes, RowsOfForward, evaluating, on_host, run_rows, take_rows
from .names import MASKED, SIZED, SumName, UnknownMeanError, compare_names
from .rules import refuse_coupled
from .samples import Sample, bytes_of, find_constant, join_equal, sample_of
from .sums import widen

# Two rows may look independent by chance, as by an equal number of positive targets.
ROWS_TO_CHECK = 16
# Rows are joined with copies of themselves, up to so many of them and so many bytes.
ROWS_TOGETHER = 1024
ROWS_IN_A_LOOP = 64  # They take their time one by one.
BYTES_TOGETHER = 2**24

Sums = dict[SumName, Tensor]


class ShardStatistics(NamedTuple):
    """The statistics of one replica's rows."""

    tensors: Sums  # There are none without rows.
    formula: Formula | None  # It has none without rows.
    nothing: Tensor  # a zero on the device of the output, connected to it

    @property
    def columns(self) -> Sequence[torch.Size]:
        """The shapes of reductions along the rows."""
        return () if self.formula is None else self.formula.columns


class ComparisonOfSums:
    """Compares the statistics of some rows of an update with those of halves of them.

    Args:
        copies: those of the criterion.
        home: a device for rows that come from several.
        statistics: computes those of a shard, in the thread of its replica.
    """

    def __init__(
        self,
        copies: CriterionCopies,
        home: torch.device,
        statistics: Callable[[ShardLoss], ShardStatistics],
    ) -> None:
        self.copies = copies
        self.home = home
        self.samples: list[Any] = []  # They are those of all ranks once these have met.
        self._statistics = statistics
        self._sums: Sums = {}  # those of a shard
        self._dim: containers.Dims = 0
        self._rows = 0  # the rows in the samples of this rank
        self._last: tuple[PerReplica, int, Shard] | None = None  # The last shard, without a sample.
        self._model: ParallelModel | None = None
        self._is_of_model = False  # The model computes the loss.
        self._has_loop = False  # Rows are computed one by one.
        self._is_alone = False  # Samples are those of one forward.
        self._before = copies.entries  # The criterion advances in the update.

    def of_model(self, model: ParallelModel | None) -> Self:
        """Tells the model, which may compute the loss. Without it, its rows are not compared."""
        self._model = model
        return self

    @property
    def has_samples(self) -> bool:
        """True in an update whose sums are compared."""
        return bool(self.samples or self._rows)

    def use(self, statistics: Callable[[ShardLoss], ShardStatistics]) -> None:
        """Computes other statistics from now on."""
        self._statistics = statistics

    def take(self, statistics: Sequence[Sums], calls: Calls) -> None:
        """Compares the formulas of all shards, and takes samples of the first rows and the last ones,
        if they are due, and of those with a sum that is not zero for the first time.
        """
        self.check_names([each for each in statistics if each])
        self._sums = next(filter(None, statistics), {})
        self._dim = calls.outputs.dim
        checks = self.copies.checks
        if not self._sums or checks is None:
            return
        # New kinds are compared, new numbers, and sums that are not zero.
        form = *(name.kind for name in self._sums), *_flags(self.copies.criterion)
        numbers = {numbers_of(each) for each in statistics if each}
        new = [checks.shows(form, each.values()) for each in statistics]
        if not (self.has_samples or checks.are_due(form, numbers) or any(new)):
            return
        if any(calls.outputs.notes or ()):
            self._take_rows(calls, new)
        else:
            self._take_shards(calls, new)

    def _take_rows(self, calls: Calls, new: Sequence[set[Hashable]]) -> None:
        """Takes rows of forwards that compute the loss."""
        pairs = zip(calls.shards, new, strict=True)
        numbers = [row for shard, places in pairs if places for row in shard.rows or ()]
        if numbers or not self.samples:
            # Each of them is there twice at least.
            rows = take_rows(calls.outputs, ROWS_TO_CHECK // 2, numbers)
            if rows is not None:
                self.samples.append(rows._replace(places=set().union(*new)))

    def _take_shards(self, calls: Calls, new: Sequence[set[Hashable]]) -> None:
        outputs = calls.outputs
        shards = zip(outputs, outputs.sizes, calls.shards, new, strict=True)
        for output, size, shard, places in shards:
            if size:
                self._last = PerReplica([output], [size], outputs.dim), size, shard
                if places or self._rows < ROWS_TO_CHECK:
                    self._rows += min(size, ROWS_TO_CHECK - 1)  # two shards at least
                    self._keep_last()

    @torch.no_grad()
    def refutes_columns(self, parts: Sequence[ShardStatistics], calls: Calls) -> bool:
        """Returns True for the first sums of columns whose shapes follow the number of rows.

        They are reductions along another dimension, as that of ``weight[:, None] - output``. None is
        a sum of columns from now on.
        """
        checks = self.copies.checks
        outputs = calls.outputs
        numbers = [number for number, part in enumerate(parts) if part.columns]
        if checks is None or checks.has_columns is not None or not numbers or outputs.notes:
            return False
        number = numbers[0]
        size = outputs.sizes[number] or 1
        whole = parts[number]
        piece = PerReplica([outputs[number]], [size], outputs.dim)
        # Rows that cannot be cut or joined have an error later.
        with contextlib.suppress(Exception):
            sample = sample_of(piece, size, calls.shards[number], self.copies.dim)
            others = self._of_other_rows(sample, whole.nothing.device)
            checks.tell_columns(are_some=others.columns == whole.columns)
        return checks.has_columns is False

    def _of_other_rows(self, sample: Sample, device: torch.device) -> ShardStatistics:
        """Returns the statistics of half of the rows, or of one row and its copy."""
        if sample.rows > 1:
            first = sample.rows // 2
            return self._run(sample.pair, [first, sample.rows - first], device)[0]
        join = functools.partial(join_equal, device=device, padding="[0]")
        pair = containers.zip_leaves(join, [sample.pair, sample.pair])
        return self._run(pair, [2], device)[0]

    def _keep_last(self) -> None:
        """Keeps the last shard on the host, or compares a large one alone."""
        if self._last is None:
            return
        sample = sample_of(*self._last, self.copies.dim)
        self._last = None
        if bytes_of(sample.pair) * world_size() > BYTES_TOGETHER:
            tensor = containers.first_tensor(move_leaves(sample.pair[0], None))
            self._compare([sample], self.home if tensor is None else tensor.device)
        else:
            self.samples.append(sample._replace(pair=on_host(sample.pair)))

    def gather(self, value: T) -> list[T]:
        """Returns the value of each rank, and keeps what all ranks have shown. All ranks call this."""
        self._keep_last()
        checks = self.copies.checks
        has_columns = checks and checks.has_columns
        by_rank = gather_objects((value, self.samples, has_columns))
        values, samples, answers = zip(*by_rank, strict=True)
        self.samples = [*itertools.chain(*samples)]
        if checks is not None and False in answers:
            checks.tell_columns(are_some=False)
        return [*values]

    def compare(self, device: torch.device) -> None:
        """Compares the statistics of rows, together and with copies, with those of their halves.

        Raises:
            ValueError: they do not add up.
        """
        self._compare(self.samples, device)

    def compare_alone(self, device: torch.device, *, of_one_row: bool) -> None:
        """Compares the samples of one forward. One of one row, or whose halves raise, waits for
        another.
        """
        self._is_alone = True
        self._keep_last()
        if self.copies.checks is not None:
            self._compare(self.copies.checks.take(self.samples, of_one_row=of_one_row), device)

    def _compare(self, samples: Sequence[Any], device: torch.device) -> None:
        of_forward = [sample for sample in samples if isinstance(sample, RowsOfForward)]
        if not of_forward:
            self._compare_samples(samples, device)
            if samples and not is_of_torch(self.copies.criterion):
                ComparisonOfLaterCalls(self).compare_later(samples, device)
        elif self._model is not None:
            self._is_of_model = True
            # An earlier one is that of a forward of one row, which shows nothing.
            samples = of_forward[-1:] if self._is_alone else of_forward
            places = set[Hashable]()
            for sample in samples:  # Ranks may have many.
                if sample is samples[0] or sample.places - places:
                    self._compare_rows(self._model, sample)
                places |= sample.places

    @torch.no_grad()
    def _compare_samples(self, samples: Sequence[Sample], device: torch.device) -> None:
        constant = {place for sample in samples for place in sample.constant}
        repeated = find_constant(samples)
        try:
            parts = self._halve(samples, constant | repeated, device)
        except ValueError:
            if not repeated:
                raise
            parts = self._halve(samples, constant, device)  # These are equal rows by chance.
        # A sample of an earlier update may have another queue.
        while parts and not self._compare_together(parts, device):
            parts = parts[1:]

    def _compare_together(
        self, parts: Sequence[tuple[Sample, list[Sums]]], device: torch.device
    ) -> bool:
        """Compares rows of several samples with their halves. Returns False if they do not fit."""
        samples = [sample for sample, _ in parts]
        halves = [*itertools.chain(*(each for _, each in parts))]
        count = rows = sum(sample.rows for sample in samples)
        pairs = [sample.pair for sample in samples]
        join = functools.partial(join_equal, device=device, padding="[0]")
        try:
            pair = containers.zip_leaves(join, pairs)
            most = ROWS_IN_A_LOOP if self._has_loop else ROWS_TOGETHER
            while 2 * rows <= most and 2 * bytes_of(pair) < BYTES_TOGETHER:
                pair = containers.zip_leaves(join, [pair, pair])
                rows *= 2
            again = functools.partial(self._sums_of, pair, [rows], device)
            (whole,) = again()
        except (torch.OutOfMemoryError, TypeError):  # Some objects cannot be joined.
            return False
        except Exception as error:  # noqa: BLE001 - there may be too many rows
            if len(parts) == 1:
                self._refuse(f"rows together raise {type(error).__name__}: {error}", error)
            return False
        # Samples may have other strides than shards.
        if self._sums and {each.kind for each in self._sums} != {each.kind for each in whole}:
            self.check_names([self._sums, whole])
        self.compare_sums([whole, *halves], again, rows // count, samples[0].reason)
        return True

    def _halve(
        self, samples: Sequence[Sample], constant: set[str], device: torch.device
    ) -> list[tuple[Sample, list[Sums]]]:
        """Returns samples with the statistics of their halves, or of all rows where a half of one of
        several raises. A row that is not complete alone is left out.
        """
        parts = []
        for sample in samples:
            sample = sample.without_rows(constant)
            first = sample.rows // 2
            try:
                halves = self._sums_of(sample.pair, [first, sample.rows - first], device)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - it may raise anything
                if sample.rows == 1:
                    continue
                checks = self.copies.checks
                if sample.reason or checks is None:
                    reason = f"half of the first rows raises {type(error).__name__}: {error}"
                    self._refuse(sample.reason or reason, error)
                # It may need the longest row of the shard. Shards together have those of all.
                if len(samples) == 1:
                    checks.postpone([sample] if self._is_alone else [])
                    return []
                halves = self._sums_of(sample.pair, [sample.rows], device)
            if halves:
                parts.append((sample, halves))
        return parts

    def _sums_of(self, *rows: Any) -> list[Sums]:
        return [part.tensors for part in self._run(*rows)]

    def _run(
        self, pair: tuple[Any, Arguments], sizes: Sequence[int], device: torch.device
    ) -> list[ShardStatistics]:
        """Returns the statistics of parts of some rows.

        Random numbers are put back. A copy of the criterion computes each, and the criterion itself
        those of no rows. Each begins with the state before the update, and the present one stays.
        """
        output, targets = pair
        targets = map_marked(_copied, targets)  # An entry of a list may be that of several rows.
        sizes = [0, *sizes]
        entries = []
        for piece in cut(output, consecutive(sizes)):
            moved = move_leaves(piece, device)
            entries.append(containers.map_tensors(Tensor.clone, moved))  # They may be written to.
        outputs = PerReplica(entries, sizes, self._dim)
        states = generator_states([device])
        rows = count_rows(targets, self.copies.dim, sum(sizes), "targets")
        shards = shards_of_targets(outputs, targets, rows, self.copies.dim, self.copies.devices)
        present = self.copies.entries
        for each in self._before:
            each.put()
        with window(self.copies, states_differ=True):
            results = Calls(self.copies, outputs, shards).run(self._call)
        for each in present:
            each.put()
        set_generators(states, [device])
        parts = [part for part in results if part.tensors]
        formulas = [part.formula for part in parts if part.formula]
        self._has_loop = self._has_loop or any(each.has_loop for each in formulas)
        return parts

    def _call(self, shard: ShardLoss) -> ShardStatistics:
        return self._statistics(shard)

    def compare_sums(
        self,
        samples: Sequence[Sums],
        run: Callable[[], Sequence[Sums]],
        times: int,
        note: str = "",
    ) -> None:
        """Raises ``ValueError`` if the first of some statistics are not the sum of the others, so many
        times.

        ``run`` returns the first again, to find the effect of rounding. ``note`` is a reason.
        """
        self.check_names(samples)
        for place in samples[0]:
            total, *parts = [widen(each[place]).cpu() for each in samples]
            every = torch.stack([total, *(part * times for part in parts)])
            apart = every.sum(0) - total
            difference = (total - apart).abs().max()
            tolerance = self._tolerance(samples[0][place])
            largest = every.abs().max()
            # The variance of one row is nan. Nan in the whole is the caller's.
            if not total.isfinite().all() or difference <= tolerance * largest:
                continue
            with Rounding() as rounding:
                rounded = run()[0].get(place, total)
            noise = (widen(rounded).cpu() - total).abs().max()
            # A loss that is not small may have jumps.
            is_small = largest <= tolerance * rounding.largest
            if not (is_small and difference <= noise):
                reason = (
                    f"the {place.role} of {place.kind} of the first rows, {times} times, "
                    f"is {_shown(total)}, but {_shown(apart)} added up from their halves"
                )
                is_sum_over = place.role == "count" and OVER_NUMBER in place.kind
                differ = len({*map(numbers_of, samples)}) > 1
                self._refuse(note or reason, is_of_number=is_sum_over or differ)

    def _tolerance(self, tensor: Tensor) -> float:
        if tensor.dtype == torch.float64 or not tensor.is_floating_point():  # Counts are exact.
            return 1e-7
        is_half = self.copies.precision.name != "fp32" or tensor.itemsize < 4
        return 2e-2 if is_half or torch.is_autocast_enabled(self.home.type) else 1e-3

    def _compare_rows(self, model: ParallelModel, sample: RowsOfForward) -> None:
        """Compares the sums of rows with those of halves of them: in evaluation mode, if a loss is
        computed there.
        """
        if isinstance(model.noting, ForwardNotes):
            model.noting.go_on()  # There may be no loss in evaluation mode.
        for mode, layers in itertools.product((torch.no_grad, torch.enable_grad), (False, True)):
            run = mode()(functools.partial(self._run_rows, model, sample, layers=layers))
            try:
                *parts, whole = run()
                break
            except torch.OutOfMemoryError:
                raise
            # Detectors have no loss in evaluation mode, and forces need a graph.
            except Exception as error:  # noqa: BLE001
                if layers and mode is torch.enable_grad:
                    self._refuse(f"half of the rows raises {type(error).__name__}: {error}", error)
        sums = [whole[0], *(part[0] for part in parts)]
        rows = sum(rows for _, rows in parts)
        self.compare_sums(sums, lambda: [run()[-1][0]], whole[1] // rows)

    def _run_rows(
        self, model: ParallelModel, sample: RowsOfForward, *, layers: bool
    ) -> list[tuple[Sums, int]]:
        """Returns the sums of rows of a forward, with the number of these.

        The model is in evaluation mode, or its ``layers`` alone.
        """
        parts = []
        with evaluating(model.module, layers=layers):
            for outputs, targets in run_rows(model, sample, ROWS_TO_CHECK, BYTES_TOGETHER):
                rows = outputs.sizes[0] or 0
                shard = Shard(NOTHING, targets, None, rows, self.home)
                (part,) = Calls(self.copies, outputs, [shard]).run(self._statistics)
                parts.append((part.tensors, rows))
        return parts

    @staticmethod
    def check_names(parts: Sequence[Sums]) -> None:
        """Raises ``UnknownMeanError`` for sums of other formulas."""
        for part in parts:
            compare_names([*parts[0]], [*part])

    def _refuse(
        self, reason: str, cause: Exception | None = None, *, is_of_number: bool = False
    ) -> NoReturn:
        criterion = self.copies.criterion
        if isinstance(criterion, AdditiveLoss):
            raise ValueError(
                f"statistics do not add up: {reason}; expected sums over the rows, so return .sum() in place of .mean()"
            ) from cause
        refuse_coupled(criterion)
        raise UnknownMeanError(
            f"the loss of {containers.describe(criterion)} does not add up over the rows: {reason}",
            SIZED if is_of_number else self._advice(),
        ) from cause

    def _advice(self) -> str:
        return _DEPENDENT_IN_MODEL if self._is_of_model else _DEPENDENT


class ComparisonOfLaterCalls(ComparisonOfSums):
    """Compares the statistics of copies of a criterion that have been called before.

    They differ from those of first calls where the criterion keeps values of the rows.
    """

    def __init__(self, first: ComparisonOfSums) -> None:
        super().__init__(first.copies, first.home, first._statistics)
        self._dim = first._dim
        self._before = first._before
        self._is_alone = first._is_alone
        self._has_loop = first._has_loop
        self._parts: list[ShardStatistics] = []

    def compare_later(self, samples: Sequence[Sample], device: torch.device) -> None:
        """Compares the statistics of some rows, and the losses of equal sums by the formula of each,
        which has tensors that the criterion has kept.
        """
        self._compare_samples(samples, device)
        losses = []
        for part in self._parts:
            formula: Any = part.formula
            # The last are the sums of all rows. Those of one row may have no count.
            sums = [*self._parts[-1].tensors.values()]
            entries = dict(containers.leaves(formula.compute(sums, self.copies.criterion)))
            losses.append(add_leaves([entries[place] for place in formula.losses]))
            first, last = losses[0], losses[-1]
            if not torch.allclose(first, last, rtol=self._tolerance(last), equal_nan=True):
                self._refuse(
                    f"equal sums are {_shown(first)} for some rows, and {_shown(last)} for others"
                )

    def _run(
        self, pair: tuple[Any, Arguments], sizes: Sequence[int], device: torch.device
    ) -> list[ShardStatistics]:
        parts = super()._run(pair, sizes, device)
        self._parts += parts
        return parts

    def _call(self, shard: ShardLoss) -> ShardStatistics:
        super()._call(shard)
        return super()._call(shard)

    def _advice(self) -> str:
        return _KEPT


def numbers_of(sums: Sums) -> tuple[float, ...]:
    """Returns the numbers in operations that may be values of the rows."""
    return tuple(next((name.numbers for name in sums), ()))


def _copied(leaf: object) -> object:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


class Rounding(TorchFunctionMode):
    """Changes the result of each function of torch in its block by a small relative error, as
    stochastic arithmetic does (CESTAC, Vignes 1974).

    A loss that is almost zero is a difference of large numbers, so its sums for other numbers of
    rows differ by more than their own size. Rounding explains what a hundred units in the last
    place change. ``largest`` is the largest magnitude in any result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch. Results in the memory of an argument stay as they are."""
        result = func(*args, **kwargs or {})
        if torch.compiler.is_compiling():
            return result
        memory = memory_of_plain(result)
        if memory is None or not result.is_floating_point() or memory in map(memory_of_plain, args):
            return result
        # Half a unit of bfloat16 is the most.
        size = min(100 * torch.finfo(result.dtype).eps, 2**-8)
        values = result.detach()
        if values.numel():
            self.largest = max(self.largest, float(values.abs().amax().nan_to_num(0, 0)))
        signs = (values * 1e6).sin().nan_to_num(0, 0, 0)
        return result + result * signs * size


def _flags(criterion: Any) -> list[bool]:
    """Returns the flags of a module, such as one that a term has begun.

    Its whole numbers may count its calls.
    """
    modules = criterion.modules() if isinstance(criterion, nn.Module) else ()
    return [
        value for module in modules for value in vars(module).values() if isinstance(value, bool)
    ]


def _shown(tensor: Tensor) -> str:
    return (
        f"{tensor.item():.6g}"
        if tensor.numel() == 1
        else f"a tensor of shape {tuple(tensor.shape)}"
    )


_KEPT = (
    ". The criterion keeps values of the rows that it has been called with, which are those of a shard: add them up by a "
    "SumOverRows, write them after the update, or give DataParallelCriterion whole=True"
)
_DEPENDENT_IN_MODEL = (
    ". The rows depend on each other, or the model draws random numbers for all of them: return what the loss needs, such as the "
    "embeddings, and compute it in a criterion, with whole=True for a loss of all rows"
)
_DEPENDENT = (
    ". The rows depend on each other, or it draws random numbers: give DataParallelCriterion whole=True; "
    "AdditiveLoss(statistics, finish) for tensors of sums; weight=, a function (output, *targets) -> scalar, for a mean; "
    "weight='rows' for a mean over rows; or, "
    f"if each shard pads to its own longest row, write {MASKED}"
)
