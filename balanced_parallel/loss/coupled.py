"""Losses whose rows depend on each other, computed from parts of the batch: replicas, micro-batches
and ranks::

    first pass     forward 0 | forward 1 | ...     without a graph; collects the parts of the loss
    differentiate  loss of all parts, and its derivative at each of them, once per process
    second pass    forward 0 | backward 0 | forward 1 | backward 1 | ...     from these derivatives

This is GradCache (arXiv:2101.06983). The parts are outputs, which are gathered (:class:`WholeLoss`:
contrastive losses, mined triplets), or statistics, which are summed (``LossOfSums``, of an
:class:`AdditiveLoss`: Dice, Pearson's correlation).
"""

import abc
import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..batch import containers
from ..batch.marks import Along, Arguments, Rows, map_marked, mark, mark_leaves, without_mark
from ..batch.outputs import PerReplica, join_outputs, join_tensors, padded, repeated_rows
from ..batch.rows import ParallelModel, Shard, count_rows, move_arguments, move_leaves, spread
from ..runtime.collectives import SumOverRanks, gather_objects, gather_rows, rank, world_size
from ..runtime.devices import move
from ..runtime.random_numbers import generator_states, set_generators
from ..runtime.torch_private import is_differentiable, storage_id
from ..runtime.values import scaled
from .copies import Calls, CriterionCopies, ShardLoss, T, call_spread, devices_of, shards_of_targets
from .entries import LoggedMeans, add_leaves, places_to_log
from .sums import LossSum, add_up, hand_back, weighted_sum, widen


class CoupledLoss(abc.ABC):
    """The loss of one update, whose rows depend on each other.

    ``home`` is a device for a process without rows. ``is_split`` tells that several devices, ranks
    or micro-batches have the rows.
    """

    def __init__(
        self, copies: CriterionCopies, home: torch.device, *, is_split: bool = True
    ) -> None:
        self.copies = copies
        self.home = home
        self.is_split = is_split
        self.is_shared = False  # Ranks have exchanged their parts.
        self._model: ParallelModel | None = None
        self._loss = torch.zeros(())  # The loss of all ranks. A part hands it back once.
        self._is_reporter = False
        self._logged: LoggedMeans = {}  # The values beside it, likewise.
        # Each has the derivative of the loss.
        self._of_parameters: list[tuple[Tensor, Tensor | None]] = []

    def of_model(self, model: ParallelModel | None) -> Self:
        """Sets the model, which may compute the loss. Without it, its rows are not compared."""
        self._model = model
        return self

    @abc.abstractmethod
    def value(self, calls: Calls) -> Any:
        """Returns the loss of a batch, with the graph of its outputs."""

    @abc.abstractmethod
    def differentiate(self, scaler: torch.amp.GradScaler | None) -> None:
        """Computes the loss of all parts on all ranks, and its derivative at each, from a scaled
        loss. Every rank calls this.
        """

    @abc.abstractmethod
    def collect(self, calls: Calls) -> list[Any]:
        """Collects the parts of a micro-batch in the first pass. Returns them with their graph."""

    @abc.abstractmethod
    def _parts(self, calls: Calls) -> list[Any]:
        """Returns the part of each replica."""

    @abc.abstractmethod
    def _take(self, part: Any) -> list[tuple[Tensor, Tensor | None]]:
        """Returns the tensors of a replica's part with the derivatives of the loss.

        Parts come in the order of the first pass.
        """

    def hand_back(self, calls: Calls) -> list[LossSum]:
        """Returns a loss per replica of a micro-batch in the second pass.

        Their sum over everything is the loss.
        """
        return self.hand_back_parts(self._parts(calls))

    def hand_back_parts(self, parts: list[Any]) -> list[LossSum]:
        """Returns the result of :meth:`hand_back` for parts with a graph."""
        losses = []
        for part in parts:
            pairs = [*self._take(part), *self._of_parameters]
            learning = [
                (tensor, derivative) for tensor, derivative in pairs if is_differentiable(tensor)
            ]
            value = move(self._loss, pairs[0][0].device) if pairs else self._loss
            total = hand_back(
                value, [slope for _, slope in learning], [tensor for tensor, _ in learning]
            )
            losses.append(LossSum(total, None, logged=self._logged))
            self._loss = torch.zeros_like(self._loss)
            self._logged = {}
            self._of_parameters = []
        return losses

    def _derivatives(
        self,
        compute: Callable[[], object],
        at: Sequence[Tensor],
        ranks: Sequence[int],
        scaler: torch.amp.GradScaler | None,
    ) -> list[Tensor | None]:
        """Computes the losses, and keeps their sum and its derivatives at the criterion's parameters.

        Returns those at other tensors.

        The ranks of ``ranks`` compute the same loss. The first reports it, and each adds its share
        to gradients of parameters.
        """
        parameters = [parameter for parameter in self._trained() if parameter.requires_grad]
        learning = [
            *(tensor.requires_grad_() for tensor in at if is_differentiable(tensor)),
            *parameters,
        ]
        with torch.enable_grad():
            result = compute()
            loss = add_leaves(result)
            whole = scaled(loss, scaler)
        gradients = torch.autograd.grad(whole, learning, allow_unused=True)
        if scaler is not None:
            scale = scaled(torch.ones((), device=loss.device), scaler)
            gradients = tuple(
                slope if slope is None else widen(slope) / move(scale, slope.device)
                for slope in gradients
            )
        self._is_reporter = ranks[0] == rank()
        self._loss = loss.detach() if self._is_reporter else torch.zeros_like(loss)
        self._logged = self._values_to_log(result)
        slopes = iter(gradients)
        derivatives = [next(slopes) if is_differentiable(tensor) else None for tensor in at]
        self._of_parameters = [
            (parameter, self._share(next(slopes), ranks)) for parameter in parameters
        ]
        return derivatives

    def _trained(self) -> list[Tensor]:
        """Returns the parameters of the loss."""
        return [*self.copies.parameters]

    def _values_to_log(self, result: object) -> LoggedMeans:
        """Returns the values beside the loss of all rows, which each rank has."""
        values = dict(containers.leaves(result))
        logged: dict[str, LossSum | None] = {}
        for place in places_to_log(result):
            value = values[place]
            if value is not None:
                logged[place] = LossSum(weighted_sum(value, 1).detach(), 1.0)
        return logged

    def _share(self, derivative: Tensor | None, ranks: Sequence[int]) -> Tensor | None:
        """Returns this rank's share of a derivative that all of ``ranks`` have."""
        return None if derivative is None or rank() not in ranks else derivative / len(ranks)


class ShardStatistics(NamedTuple):
    """The statistics of one replica's rows."""

    tensors: dict[Any, Tensor]  # Key paths are the keys. There are none without rows.
    structure: Any  # whose leaves the tensors are
    nothing: Tensor  # a zero on the device of the output, connected to it


# two rows may look independent by chance, as by an equal number of positive targets
ROWS_TO_CHECK = 16
# The hardest 16 rows of a batch are all rows of a small shard. So rows are joined with copies of
# themselves, up to so many of them and so many bytes.
ROWS_TOGETHER = 1024
BYTES_TOGETHER = 2**24
# Positions that only other shards have. It is finite, and has no part in a softmax.
_PADDING = -1e4


class LossOfSums(CoupledLoss):
    """The loss of the statistics of an update, of an :class:`AdditiveLoss`.

    A shard without rows adds nothing.
    """

    def __init__(
        self, copies: CriterionCopies, home: torch.device, *, is_split: bool = True
    ) -> None:
        super().__init__(copies, home, is_split=is_split)
        self._total: dict[Any, Tensor] = {}
        self._structure: Any = None
        self._slopes: dict[Any, Tensor | None] = {}
        # Shards of this update to compare: output and targets, marked; the number of rows, and the
        # dimension of the output.
        self.samples: list[object] = []
        self._rows_checked = 0

    def value(self, calls: Calls) -> Any:
        """Returns the loss of a batch. Every rank has the statistics of all ranks."""
        parts = self._parts(calls)
        self._add(parts)
        return self.finish(parts[0].nothing)

    def finish(self, nothing: Tensor) -> Any:
        """Returns the loss of all statistics. An evaluation has those of several batches."""
        if not self._sum_over_ranks(nothing):
            raise ValueError(
                "the batch has no rows, expected one at least: there are no statistics"
            )
        self.compare(self.samples, nothing.device)
        return self._finish()

    def differentiate(self, scaler: torch.amp.GradScaler | None) -> None:
        """Computes the loss of all statistics, and its derivative at each of them."""
        has_rows = bool(self._total)
        ranks = self._sum_over_ranks(torch.zeros((), device=self.home))
        self.is_shared = True
        self.compare(self.samples, self.home)
        if has_rows:
            totals = self._total.items()
            learning = {place: total for place, total in totals if self._learns(place)}
            slopes = self._derivatives(self._finish, [*learning.values()], ranks, scaler)
            self._slopes = dict(zip(learning, slopes, strict=True))

    def _learns(self, place: Any) -> bool:
        """Returns True for a statistic of a loss, not of a value to log alone."""
        return True

    def _statistics(self, shard: ShardLoss) -> ShardStatistics:
        """Returns the statistics of a replica. It runs in the thread of the replica."""
        nothing = shard.nothing()
        if not shard.rows:
            return ShardStatistics({}, None, nothing)
        criterion: Any = shard.criterion
        result = call_spread(criterion.statistics, shard.output, shard.targets, shard.kwargs)
        tensors = {
            place: _as_tensor(leaf, nothing.device) for place, leaf in containers.leaves(result)
        }
        return ShardStatistics(
            tensors, containers.map_leaves(lambda _: containers.Leaf(), result), nothing
        )

    def _parts(self, calls: Calls) -> list[ShardStatistics]:
        parts: list[ShardStatistics] = calls.run(self._statistics)
        self.check([part.tensors for part in parts], calls)
        return parts

    def check(self, statistics: Sequence[dict[Any, Tensor]], calls: Calls) -> None:
        """Takes samples of the first rows, which :meth:`compare` needs."""
        if not self._rows_checked and not self._is_due(statistics):
            return
        outputs = calls.outputs
        for output, size, shard in zip(outputs, outputs.sizes, calls.shards, strict=True):
            if self._rows_checked < ROWS_TO_CHECK:
                self._rows_checked += min(size or 0, ROWS_TO_CHECK - 1)  # two shards at least
                self._sample(PerReplica([output], [size], outputs.dim), shard)

    def _is_due(self, statistics: Sequence[dict[object, Tensor]]) -> bool:
        """Returns True if the statistics of this micro-batch are to be compared."""
        first = next(filter(None, statistics), None)
        checks = self.copies.checks
        if first is None or checks is None or not self.is_split:
            return False
        return checks.are_due((*map(self._kind, first), *_flags(self.copies.criterion)))

    def _sample(self, output: PerReplica, shard: Shard) -> None:
        try:
            statistics = self._halve(output, shard)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if output.sizes[0] == 1:
                return
            if reason := repeated_rows(output, output.sizes, output.dim):
                raise ValueError(f"{reason}; or pass flat targets too") from error
            self._refuse(
                f"half of the first rows, in dimension {output.dim}, raises {type(error).__name__}: {error}",
                error,
            )
        if statistics:
            self.compare_sums(statistics, functools.partial(self._halve, output, shard))

    @torch.no_grad()
    def compare(self, samples: Sequence[Any], device: torch.device) -> None:
        """Compares the statistics of shards, together and with copies, with those of their halves.

        Raises:
            ValueError: they do not add up.
        """
        if not samples:
            return
        pairs, sizes, (dim, *_) = zip(*samples, strict=True)
        rows = sum(sizes)
        join = functools.partial(_join_rows, device=device, padding="[0]")

        def run(pair: Any, rows: int, *, halved: bool) -> list[dict[Any, Tensor]]:
            output = containers.map_leaves(without_mark, pair[0])
            whole = PerReplica([output], [rows], dim)
            return self._run(_halves(whole) if halved else [whole], pair[1])

        try:
            # The criterion may have advanced its state since the samples were taken.
            halves = [
                run(containers.zip_leaves(join, [pair]), size, halved=True)
                for pair, size in zip(pairs, sizes, strict=True)
            ]
            pair = containers.zip_leaves(join, pairs)
            while 2 * rows <= ROWS_TOGETHER and 2 * _size(pair) < BYTES_TOGETHER:
                pair = containers.zip_leaves(join, [pair, pair])
                rows *= 2
            whole = run(pair, rows, halved=False)
        except Exception:  # noqa: BLE001 - there may be too many rows
            return
        again = functools.partial(run, pair, rows, halved=False)
        self.compare_sums([*whole, *itertools.chain(*halves)], again, rows // sum(sizes))
        constant = _find_constant(pairs, sizes)

        def join_others(place: str, values: list[Any]) -> Any:
            return values[0] if place in constant else join(place, values)

        try:
            once = containers.zip_leaves(join_others, pairs)
            again = functools.partial(run, once, sum(sizes), halved=False)
            whole = again() if constant else []
        except Exception:  # noqa: BLE001 - a tensor with rows does not fit to the others
            return
        try:
            if whole:
                self.compare_sums([*whole, *itertools.chain(*halves)], again)
        except ValueError as error:
            places = ", ".join(f"output{place.removeprefix('[0]')}" for place in sorted(constant))
            self._refuse(
                f"{places} is the same for all rows, and each shard would add it: expected a value for each row, or a penalty "
                "that is added to the loss that the criterion returned",
                error,
            )

    def collect(self, calls: Calls) -> list[Any]:
        """Adds the statistics of a micro-batch in the first pass."""
        parts = self._parts(calls)
        for part in parts:
            self._add([part._replace(tensors=containers.map_tensors(Tensor.detach, part.tensors))])
        return parts

    def _add(self, parts: list[ShardStatistics]) -> None:
        for part in parts:
            if part.tensors:
                self._check_shapes([self._total or part.tensors, part.tensors])
                if self._structure is None:  # The first replica has the parameters themselves.
                    self._structure = part.structure
            for place, tensor in part.tensors.items():
                total = self._total.get(place)
                self._total[place] = (
                    widen(tensor) if total is None else total + move(widen(tensor), total.device)
                )

    def _take(self, part: ShardStatistics) -> list[tuple[Tensor, Tensor | None]]:
        slopes = [(tensor, self._slopes.get(place)) for place, tensor in part.tensors.items()] or [
            (part.nothing, None)
        ]
        return [
            (tensor, slope if slope is None else move(slope, part.nothing.device))
            for tensor, slope in slopes
        ]

    def _sum_over_ranks(self, nothing: Tensor) -> list[int]:
        """Sums the statistics of all ranks, with the graph of ``nothing``.

        Returns the ranks with rows.

        Every rank calls this.
        """
        local = self._total
        layout = (
            self._structure,
            {place: tensor.detach().to("meta") for place, tensor in local.items()},
        )
        layouts = enumerate(self._gather(layout if local else None))
        by_rank = {number: layout for number, layout in layouts if layout is not None}
        self._check_shapes([tensors for _, tensors in by_rank.values()])
        if world_size() == 1 or not by_rank:
            return [*by_rank]
        self._structure, tensors = next(iter(by_rank.values()))
        local = local or {
            place: torch.zeros_like(tensor, device=nothing.device)
            for place, tensor in tensors.items()
        }
        for place, tensor in local.items():
            # Every rank computes the whole loss, and the backward sums its gradients over the
            # ranks, which DistributedDataParallel averages.
            learns = is_differentiable(tensor) and self._learns(place)
            ours = tensor + nothing if learns else tensor
            self._total[place] = SumOverRanks.apply(ours, None)
        return [*by_rank]

    def _gather(self, value: T) -> list[T]:
        """Returns the value of each rank. Each has the samples of all ranks."""
        values, samples = zip(*gather_objects((value, self.samples)), strict=True)
        self.samples = [*itertools.chain(*samples)]
        return [*values]

    def _check_shapes(self, parts: Sequence[dict[Any, Tensor]]) -> None:
        shapes = [{place: tuple(tensor.shape) for place, tensor in part.items()} for part in parts]
        for other in shapes:
            if [*other.items()] != [*shapes[0].items()]:
                both = f"{[*shapes[0].values()]} and {[*other.values()]}"
                raise ValueError(
                    f"the statistics have shapes {both}, expected equal shapes for all rows"
                )

    def _finish(self) -> Any:
        """Returns the loss of the statistics of all rows."""
        tensors = iter(self._total.values())
        device = next(iter(self._total.values())).device
        statistics = containers.map_leaves(lambda _: next(tensors), self._structure)
        loss = self.copies.run_once(operator.methodcaller("finish", statistics), device)
        return move(weighted_sum(loss, 1), self.copies.output_device or device)

    @torch.no_grad()
    def _halve(self, output: PerReplica, shard: Shard) -> list[dict[Any, Tensor]]:
        """Adds a sample of a shard.

        Returns the statistics of a large one, and those of its halves.
        """
        rows = output.sizes[0]
        leaves = zip(
            containers.leaves(output[0]),
            containers.leaf_dims(output[0], output.dim),
            strict=True,
        )
        counts = {
            leaf.size(dim)
            for (_, leaf), dim in leaves
            if isinstance(leaf, Tensor) and leaf.dim() and dim is not None
        }
        # words, or a packed row
        if rows and (counts == {shard.target_rows} or (shard.is_joined and counts == {1})):
            rows = counts.pop()
        if not rows:
            return []
        targets = mark(shard.targets, self.copies.dim)
        whole = PerReplica(output, [rows], output.dim)
        pair = mark_leaves(output[0], output.dim, "the output"), targets
        statistics = self._run(_halves(whole), targets)
        if _size(pair) * world_size() > BYTES_TOGETHER:
            return self._run([whole], targets) + statistics
        sample = pair, rows, output.dim
        self.samples.append(map_marked(_on_host, sample))
        return []

    def _run(self, parts: list[PerReplica], targets: Arguments) -> list[dict[Any, Tensor]]:
        """Returns the statistics of some rows.

        Random numbers are put back. A copy of the criterion computes each, and the criterion itself
        those of no rows, so its state stays.
        """
        outputs = join_outputs([parts[0].narrow(0, 0), *parts], parts[0].dim)
        # A criterion may write to its arguments.
        outputs = outputs.map(functools.partial(containers.map_tensors, Tensor.clone))
        devices = devices_of(outputs, None)
        states = generator_states(devices)
        rows = count_rows(targets, self.copies.dim, sum(filter(None, outputs.sizes)), "targets")
        shards = shards_of_targets(outputs, targets, rows, self.copies.dim, self.copies.devices)
        results = Calls(self.copies, outputs, shards).run(self._statistics)
        set_generators(states, devices)
        return [part.tensors for part in results if part.tensors]

    def compare_sums(
        self,
        samples: Sequence[dict[Any, Tensor]],
        run: Callable[[], Sequence[dict[Any, Tensor]]],
        times: int = 1,
    ) -> None:
        """Raises ``ValueError`` if the first of some statistics are not the sum of the others, so many
        times.

        ``run`` returns the first again, to find the effect of rounding.
        """
        self._check_shapes(samples)
        for number, place in enumerate(samples[0]):
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
                name = self._name(number, place)
                values = f"is {_shown(total)}, but {_shown(apart)} added up from their halves"
                self._refuse(f"{name} of the first rows, {times} times, {values}")

    def _tolerance(self, tensor: Tensor) -> float:
        if tensor.dtype == torch.float64 or not tensor.is_floating_point():  # Counts are exact.
            return 1e-7
        is_half = self.copies.precision.name != "fp32" or tensor.itemsize < 4
        return 2e-2 if is_half or torch.is_autocast_enabled(self.home.type) else 1e-3

    def _kind(self, place: Any) -> Hashable:
        """Returns a key of a statistic. New ones are compared with halves."""
        return place  # type: ignore[no-any-return]

    def _name(self, number: int, place: object) -> str:
        return f"number {number}"

    def _refuse(self, reason: str, cause: Exception | None = None) -> NoReturn:
        raise ValueError(
            f"statistics do not add up: {reason}; expected sums over the rows, so return .sum() in place of .mean()"
        ) from cause


def _find_constant(pairs: Sequence[object], sizes: Sequence[int]) -> set[str]:
    """Returns the places of outputs that are the same for all shards, while others are not.

    They have no rows, as prototypes, whose number is by chance that of the rows of a shard. As many
    equal rows as those of the shard, which ``sizes`` has, may be one value that is expanded to them.
    """
    equal: dict[str, bool] = {}
    constant: set[str] = set()

    def look(place: str, values: list[Any]) -> None:
        first, *others = map(without_mark, values)
        if not place.startswith("[0]") or not isinstance(first, Tensor):
            return
        equal[place] = all(torch.equal(first, other) for other in others)
        if equal[place] and isinstance(values[0], Along) and first.is_floating_point():
            count = first.size(values[0].dim)
            row = first.narrow(values[0].dim, 0, min(count, 1))
            if count != sizes[0] or not bool((first == row).all()):
                constant.add(place)

    if len(pairs) > 1:
        containers.zip_leaves(look, pairs)
    return set() if all(equal.values()) else constant


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
        memory = _memory(result)
        if memory is None or not result.is_floating_point() or memory in map(_memory, args):
            return result
        # Half a unit of bfloat16 is the most.
        size = min(100 * torch.finfo(result.dtype).eps, 2**-8)
        values = result.detach()
        if values.numel():
            self.largest = max(self.largest, float(values.abs().amax().nan_to_num(0, 0)))
        signs = (values * 1e6).sin().nan_to_num(0, 0, 0)
        return result + result * signs * size


def _memory(value: object) -> int | None:
    """Returns a number of the memory of a plain tensor, None for another value."""
    if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter):
        return None
    return storage_id(value.untyped_storage()) if value.layout == torch.strided else None


def _flags(criterion: Any) -> list[bool]:
    """Returns the flags of a module, such as one that a term has begun.

    Its whole numbers may count its calls.
    """
    modules = criterion.modules() if isinstance(criterion, nn.Module) else ()
    return [
        value for module in modules for value in vars(module).values() if isinstance(value, bool)
    ]


def _size(node: object) -> int:
    """Returns the bytes of the tensors in a marked structure."""
    return sum(tensor.nbytes for tensor in containers.tensors_in(move_leaves(node, None)))


def _on_host(leaf: object) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def _as_tensor(leaf: Any, device: torch.device) -> Tensor:
    if isinstance(leaf, (int, float)):
        return add_up([leaf], device)
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"the statistics contain {containers.describe(leaf)}, expected tensors and numbers that add up over rows"
        )
    return leaf


def _shown(tensor: Tensor) -> str:
    return (
        f"{float(tensor):.6g}"
        if tensor.numel() == 1
        else f"a tensor of shape {tuple(tensor.shape)}"
    )


class WholeLoss(CoupledLoss):
    """The loss of all outputs of an update.

    The first of outputs without rows is used, which must be the same in all parts.
    """

    def __init__(
        self, copies: CriterionCopies, home: torch.device, *, is_split: bool = True
    ) -> None:
        super().__init__(copies, home, is_split=is_split)
        # detached outputs and targets of all replicas and micro-batches, marked
        self.pieces: list[Arguments] = []
        # An error for outputs of several pieces that cannot be joined.
        self._refusal: str | None = None
        self._outputs = 1  # number of leading arguments that the outputs fill
        self._pending: list[list[Tensor | None]] = []  # derivatives of each piece

    def value(self, calls: Calls) -> Any:
        """Returns the loss of a batch. The outputs of all ranks are gathered on every rank."""
        self.pieces = self._parts(calls)
        rows = self._gather()
        share = world_size() * (rank() in rows.ranks) / max(len(rows.ranks), 1)
        loss = self._call(rows, share)
        return containers.map_leaves(
            lambda leaf: leaf if leaf is None else weighted_sum(leaf, 1), loss
        )

    def differentiate(self, scaler: torch.amp.GradScaler | None) -> None:
        """Computes the loss of all outputs, and its derivative at each of them."""
        pieces = self.pieces
        rows = self._gather()
        self.is_shared = True
        if not pieces:
            return
        leaves = _output_leaves(rows.batch, self._outputs)
        tensors = [without_mark(leaf) for leaf in leaves]
        derivatives = self._derivatives(lambda: self._call(rows), tensors, rows.ranks, scaler)
        columns = zip(*[_output_leaves(piece, self._outputs) for piece in pieces], strict=True)
        starts = iter(rows.starts)
        self._pending = [[] for _ in pieces]
        for leaf, derivative, column in zip(leaves, derivatives, columns, strict=True):
            start = next(starts, 0) if isinstance(leaf, Along) else 0
            for pending, piece in zip(self._pending, map(without_mark, column), strict=True):
                slope = (
                    None if pending is not self._pending[0] else self._share(derivative, rows.ranks)
                )
                if derivative is not None and isinstance(leaf, Along):
                    size = piece.size(leaf.dim)
                    # the whole can be freed
                    slope = derivative.narrow(leaf.dim, start, size).to(piece.device, copy=True)
                    start += size
                pending.append(slope)

    def _parts(self, calls: Calls) -> list[Any]:
        outputs = calls.outputs
        self._refusal = self._refusal or repeated_rows(outputs, outputs.sizes, outputs.dim)
        parts = []
        for output, shard in zip(outputs, calls.shards, strict=True):
            marked = spread(mark_leaves(output, outputs.dim, "the output"))
            targets, kwargs = mark(shard.targets, self.copies.dim)
            parts.append(Arguments((*marked, *targets), kwargs))
            self._outputs = len(marked)
        return parts

    def collect(self, calls: Calls) -> list[Any]:
        """Keeps outputs and targets of a micro-batch in the first pass."""
        parts = self._parts(calls)
        self.pieces += map_marked(
            lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, parts
        )
        return parts

    def _take(self, part: Arguments) -> list[tuple[Tensor, Tensor | None]]:
        leaves = _output_leaves(part, self._outputs)
        derivatives = self._pending.pop(0)
        return [
            (without_mark(leaf), derivative)
            for leaf, derivative in zip(leaves, derivatives, strict=True)
        ]

    def _gather(self) -> "RankRows":
        """Returns all pieces of all ranks as one. The pieces are forgotten."""
        pieces = self.pieces
        self.pieces = []
        outputs = [_output_leaves(piece, self._outputs) for piece in pieces]
        is_due = (
            len(pieces) > 1 and self.copies.checks is not None and self.copies.checks.are_due(None)
        )
        for leaves in zip(*outputs, strict=True) if is_due else ():
            _check_constant(*leaves)
        device = self.copies.output_device or (
            without_mark(outputs[0][0]).device if outputs else self.home
        )
        join = functools.partial(_join_rows, device=device)
        whole = containers.zip_leaves(join, pieces, "the batch") if pieces else None
        return RankRows(
            whole, device, self._refusal if len(pieces) > 1 or world_size() > 1 else None
        )

    def _call(self, rows: "RankRows", share: float = 1.0) -> Any:
        batch = rows.batch
        if share != 1:
            batch = containers.map_leaves(lambda leaf: _scale_gradient(leaf, share), batch)
        inputs, kwargs = move_arguments(batch, rows.device)
        arguments = (
            1,
            inputs[: self._outputs],
            inputs[self._outputs :],
            kwargs,
            self.copies.collectives,
        )
        return self.copies.run_once(
            lambda criterion: ShardLoss(criterion, *arguments).call(), rows.device
        )


def _scale_gradient(leaf: object, factor: float) -> Any:
    """Multiplies the gradient of a leaf without rows, such as a temperature, and returns it.

    Strategies average gradients over all ranks, and a rank without rows has none of it.
    """
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return leaf
    same = leaf.view_as(leaf)
    same.register_hook(lambda gradient: gradient * factor)
    return same


def _output_leaves(part: Arguments, outputs: int) -> list[Any]:
    """Returns the tensors of the outputs, those with rows in their marks."""
    leaves = [leaf for _, leaf in containers.leaves(part.inputs[:outputs])]
    return [leaf for leaf in leaves if isinstance(without_mark(leaf), Tensor)]


def _check_constant(first: Any, *others: object) -> None:
    """Raises ``ValueError`` if an output without rows differs between replicas or micro-batches."""
    tensor = without_mark(first)
    equal = (torch.equal(tensor, move(without_mark(each), tensor.device)) for each in others)
    if not isinstance(first, Along) and not all(equal):
        raise ValueError(
            f"an output of shape {tuple(tensor.shape)} has no rows and differs between replicas or micro-batches, expected "
            "the same everywhere, as a temperature is: return a value per row, and reduce it in the criterion"
        )


class AdditiveLoss(nn.Module):
    """A loss that is a function of statistics, which add up over the rows.

    ``loss(output, *targets)`` is ``finish(statistics(output, *targets))``, as in a plain program.
    In a :class:`DataParallelCriterion` each replica computes the statistics of its own rows. Only
    these are moved and summed, over replicas, ranks and micro-batches. ``finish`` is called once
    per process with the total, and its derivative is handed back. Subclasses may override the
    methods ``statistics`` and ``finish`` instead.

    Args:
        statistics: a function or a module, ``(output, *targets) -> statistics``. These are a
            tensor, or tensors and numbers in a tuple, a mapping or a dataclass: sums over the rows,
            never means.
        finish: a function or a module that computes the loss of a total in the same structure, a
            scalar.

    Raises:
        ValueError: the statistics of a shard are not the sum of those of its halves. Some batches
            are checked.

    Example:
        >>> def statistics(output, target):
        ...     return (output * target).sum(), output.square().sum(), target.square().sum()
        >>> def finish(total):
        ...     product, outputs, targets = total
        ...     return 1 - product / (outputs * targets).sqrt()
        >>> criterion = DataParallelCriterion(AdditiveLoss(statistics, finish))
        >>> outputs = PerReplica([torch.tensor([3.0]), torch.tensor([4.0])], [1, 1])
        >>> criterion(outputs, torch.tensor([4.0, 3.0]))  # one minus the cosine of (3, 4) and (4, 3)
        tensor(0.0400)
    """

    def __init__(
        self,
        statistics: Callable[..., Any] | None = None,
        finish: Callable[[object], Tensor] | None = None,
    ) -> None:
        super().__init__()
        for name, function in (("statistics", statistics), ("finish", finish)):
            if not callable(function) and getattr(type(self), name) is getattr(AdditiveLoss, name):
                raise TypeError(
                    f"{name}={function!r}, expected a function, or a subclass with a method {name}"
                )
        self._statistics = statistics
        self._finish = finish

    def statistics(self, *arguments: Any, **kwargs: Any) -> Any:
        """Returns the statistics of some rows."""
        assert self._statistics is not None
        return self._statistics(*arguments, **kwargs)

    def finish(self, total: Any) -> Tensor:
        """Returns the loss of the sum of all statistics."""
        assert self._finish is not None
        return self._finish(total)

    def forward(self, *arguments: object, **kwargs: Any) -> Tensor:
        """Returns the loss of a whole batch."""
        return self.finish(self.statistics(*arguments, **kwargs))


def _join_rows(place: str, values: list[Any], device: torch.device, padding: str = "") -> Any:
    """Returns the rows of marked values as one on ``device``, or the first value if they have no
    rows.

    A tensor at the place ``padding`` is padded.
    """
    first = values[0]
    plain = [without_mark(value) for value in values]
    if isinstance(first, Along) and isinstance(first.leaf, Tensor):
        plain = padded(plain, first.dim, _PADDING) if place == padding else plain
        return Along(join_tensors(place, plain, device, first.dim), first.dim)
    if isinstance(first, PerReplica):
        return mark_leaves(join_outputs(values, first.dim).on(device), first.dim, place)
    if _is_list(first):
        kind: Any = Rows if isinstance(first, Rows) else type(plain[0])
        return kind([*itertools.chain(*plain)])
    return move(first, device) if isinstance(first, Tensor) else first


def _halves(whole: PerReplica) -> list[PerReplica]:
    rows = whole.sizes[0] or 0
    return [whole.narrow(0, rows // 2), whole.narrow(rows // 2, rows - rows // 2)]


def _is_list(leaf: object) -> bool:
    return isinstance(leaf, Rows) or containers.is_row_list(without_mark(leaf))


class RankRows:
    """The rows of all ranks, in their order: ``batch``, which is differentiable, or None on a rank
    without one.

    All ranks make one, of their joined pieces or None. All of them raise ``ValueError`` if one has
    a refusal. ``starts`` are the places of this rank's rows in each tensor with rows, if there are
    other ranks, and ``ranks`` those with rows.
    """

    def __init__(self, batch: Any, device: torch.device, refusal: str | None) -> None:
        layout = None if batch is None else containers.map_leaves(_layout, batch)
        layouts, refusals = zip(*gather_objects((layout, refusal)), strict=True)
        for message in filter(None, refusals):
            raise ValueError(message)
        by_rank = {number: each for number, each in enumerate(layouts) if each is not None}
        self.batch = batch
        self.device = device
        self.ranks = [*by_rank]
        self._sizes: list[list[int]] = []  # Each tensor has the rows of all ranks.
        if world_size() > 1 and by_rank:
            self._leaves = iter(
                () if batch is None else [leaf for _, leaf in containers.leaves(batch)]
            )
            whole = containers.zip_leaves(self._gather_leaf, [*by_rank.values()], "the batch")
            self.batch = None if batch is None else whole
            self.ranks = [
                number for number in by_rank if any(sizes[number] for sizes in self._sizes)
            ] or self.ranks
        self.starts = [sum(sizes[: rank()]) for sizes in self._sizes]

    def _gather_leaf(self, place: str, layouts: list[Any]) -> Any:
        """Returns the rows of all ranks in the place of one leaf, which this rank may not have."""
        leaf = next(self._leaves, None)
        joined = _join_rows(place, layouts, torch.device("meta"))
        if not isinstance(joined, Along):
            return leaf if joined is None else joined
        sizes = [0] * world_size()
        for number, each in zip(self.ranks, layouts, strict=True):
            sizes[number] = each.leaf.size(joined.dim)
        self._sizes.append(sizes)
        tensor = (
            torch.empty_like(each.leaf, device=self.device).narrow(joined.dim, 0, 0)
            if leaf is None
            else leaf.leaf
        )
        return Along(gather_rows(tensor.to(joined.leaf.dtype), sizes, joined.dim), joined.dim)


def _layout(leaf: object) -> Any:
    """Returns a tensor with rows without its values, a list of rows as it is, and None for others."""
    if isinstance(leaf, Along):
        return Along(leaf.leaf.detach().to("meta"), leaf.dim)
    return leaf if _is_list(leaf) else None
