"""Parts that the strategies over ranks share: the model of one rank, and its exchange with the
other hosts in each update.

Many modules refuse inputs without rows, such as attention with a mask. A rank without rows runs one
row in their place, and nothing of it is left but the structure of the output.
"""

import abc
import contextlib
import itertools
import operator
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..batch.containers import Dims, map_leaves, map_tensors, tensors_in
from ..batch.marks import Arguments
from ..batch.outputs import PerReplica
from ..batch.rows import ParallelModel, Shard, count_rows, move_arguments, move_leaves, take
from ..loss.criterion import DataParallelCriterion
from ..loss.names import SumName, compare_names, digest_names
from ..loss.sums import LossSum, Weight, add_up, hand_back, power_of_two
from ..replicas.all_rows import NONE, forward_of, sums_rows
from ..replicas.batchnorm import begin_forward, meets_others
from ..replicas.module_tree import refuse_rescaled
from ..runtime import collectives, torch_private
from ..runtime.collectives import ElsewhereFailure, OnCollective, gather_objects
from ..runtime.devices import NO_BLOCK, Devices, is_accelerator, start_copy
from ..runtime.module_state import (
    advancing_buffers,
    are_close,
    is_of_torch,
    numbers_of,
    without_trace,
)
from ..runtime.random_numbers import RankNumbers, forward_by_row, offset_seeds
from ..runtime.torch_private import (
    BatchNorm,
    current_backward_id,
    is_compiled,
    is_sharded,
    memory_of,
)
from ..runtime.values import Precision, PrecisionName, forget_gradients
from ..training.settings import Settings
from ..training.sync import GradientSync, UpdateSync


class RowSettings(TypedDict, total=False):
    """Dimensions of the rows in inputs and outputs, and the precision, as in
    :class:`DataParallelModel`.
    """

    dim: int
    precision: PrecisionName | Precision | None
    out_dims: Dims


class RankModel(ParallelModel):
    """The model of one rank.

    It returns a list with this rank's output, as :class:`DataParallelModel` does.
    """

    units: Sequence[Any] = ()  # the modules that FSDP2 shards
    replicas = None  # A lookup would call __getattr__ in each update.
    record: "GradientRecord"

    def _set_rows(
        self,
        device: torch.device,
        dim: int = 0,
        precision: PrecisionName | Precision | None = None,
        out_dims: Dims = None,
    ) -> None:
        self.devices = [device]
        self.split = None
        self.draws_on_host = not is_accelerator(device)
        self.dim = dim
        self.out_dims = dim if out_dims is None else out_dims
        self.precision = Precision(precision or "fp32")
        self.meets_ranks = meets_others(self.module)
        self.rank_numbers = RankNumbers()
        self.runs = {}
        self._calls = Counter[tuple[str | None, bool]]()  # The number of runs of each kind.
        self.has_rows = False  # Forwards since the last update, or backward by hand, had some.
        self._of_criterion: list[dict[str, Tensor | None]] = []
        self._parts = [*self.module.modules()]  # The modules of the criterion are added later.
        self._note_state()
        self._before = self._versions()
        # Buffers are compared in the first update whose forwards write some, unless one fails.
        self._compares = True
        # Numbers of module and criterion before the first forward of an update.
        self._numbers: dict[nn.Module, dict[str, object]] = {}
        # Parameters in the first run of a method, and their memory before it.
        self._whole: dict[str, tuple[int, Tensor]] = {}
        self.written: set[str] = set()  # Parameters that a forward writes.
        self._examples: dict[str | None, Arguments | None] = {}  # one row for each method

    def _run_shards(self, shards: Sequence[Shard], method: str | None = None) -> PerReplica:
        (shard,) = shards
        rows = None if shard.rows is None else len(shard.rows)
        if shard.is_joined and not rows and self.meets_ranks:
            raise RuntimeError(
                "this rank has no samples, and collate= joins them, expected one sample at least in each micro-batch: the "
                "others wait for its batch norm or sum over all rows, and joined samples of another batch would count"
            )
        arguments = shard.inputs
        for value in (*arguments.inputs, *arguments.kwargs.values()):
            # Inputs get no gradient. Its scale is known at the end of the update.
            if isinstance(value, Tensor) and value.requires_grad:
                arguments = map_tensors(
                    lambda each: each.detach().requires_grad_() if each.requires_grad else each,
                    arguments,
                )
        if self._embeddings:
            refuse_rescaled(self._embeddings)
        with shard.context():
            return self._watched_run(method, arguments, rows, in_step=True)

    def refuse_unshared(self) -> None:
        """Raises ``ValueError`` for a parameter whose gradient the ranks would not share, and for an
        embedding that rescales its weight.
        """
        refuse_rescaled(self._embeddings)
        for name, parameter in self.module.named_parameters():
            dtype = self.record.dtypes.get(id(parameter))
            is_late = parameter.requires_grad and dtype != parameter.dtype
            # FSDP2 puts gathered parameters in the place of shards.
            if is_late and not torch_private.is_gathered(parameter, self.units):
                raise ValueError(
                    f"the parameter {name} came after parallelize, was frozen there, or had another dtype, so that the ranks "
                    "would not share its gradient, expected parallelize again, of the module as it is now"
                )

    def _run_by_hand(self, method: str | None, arguments: Arguments) -> PerReplica:
        if torch.is_grad_enabled():
            self.refuse_unshared()
        entered = map_tensors(collectives.enter, arguments)
        return self._watched_run(method, entered, count_rows(entered, self.dim))

    def _watched_run(
        self, method: str | None, arguments: Arguments, rows: int | None, *, in_step: bool = False
    ) -> PerReplica:
        """Runs the module.

        The 1st, 2nd, 4th, 8th, ... run of a method shows whether it communicates with other ranks
        itself, or writes to parameters.
        """
        # self.module would call __getattr__
        module: Any = torch_private.children_of(self)["module"]
        kind = method, module.training
        if rows != 0 and torch.is_grad_enabled() and not self.has_rows:
            self.has_rows = True
            self._numbers = dict(zip(self._counting, map(numbers_of, self._counting), strict=True))
        if rows == 0 and self.runs.get(kind):
            raise RuntimeError(
                "this rank has no rows, and the module communicates with the other ranks itself, expected rows on each rank in "
                "each forward: its layers would wait, or count a row that is not there"
            )
        if self.meets_ranks:
            begin_forward(rows)
        self._calls[kind] += 1
        if kind in self.runs and self._calls[kind].bit_count() > 1:
            return self._run(method, arguments, rows, in_step=in_step)
        names: set[str] = set()
        is_eager = not any(map(is_compiled, self.modules()))
        self._whole = {}
        self._note_whole()
        with contextlib.ExitStack() as stack:
            if is_eager:
                stack.enter_context(OnCollective(names.add, self._note_writes))
                for unit in self.units:
                    stack.callback(unit.register_forward_pre_hook(self._note_whole).remove)
            output = self._run(method, arguments, rows, in_step=in_step)
        self._note_writes()
        self._note_state()  # The first forward may make some.
        self.runs.setdefault(kind, False)
        if names and not self.meets_ranks and isinstance(self, DistributedDataParallel):
            self.runs[kind] = self.meets_ranks = True
            warnings.warn(
                f"the module communicates with the other ranks itself ({', '.join(sorted(names))}), expected as many "
                "micro-batches on each rank, with rows in each: without these limits, use convert_sync_batchnorm for batch norm, "
                "and SumOverRows in place of all_reduce for other statistics",
                stacklevel=2,
            )
        return output

    def _run(
        self, method: str | None, arguments: Arguments, rows: int | None, *, in_step: bool = False
    ) -> PerReplica:
        raise NotImplementedError

    def _note_whole(self, *_: object) -> None:
        """Notes the memory of parameters that are whole, before a module runs."""
        for name, parameter in self.module.named_parameters():
            if not is_sharded(parameter):
                self._whole.setdefault(name, (memory_of(parameter), parameter))

    def _note_writes(self, tensors: Iterable[Tensor] = ()) -> None:
        """Learns that a forward writes to tensors, or has given parameters other memory."""
        memory = {*map(memory_of, tensors)}
        for name, (before, parameter) in self._whole.items():
            if before in memory or before != memory_of(parameter):
                self._take_write(name)

    def _take_write(self, name: str) -> None:
        self.written.add(name)

    def _note_state(self) -> None:
        """Notes the layers with buffers and those with numbers, which the ranks share."""
        self._counting = [*filter(numbers_of, self._parts)]
        layers = filter(_may_advance, self.module.modules())
        self._of_layers = [*map(torch_private.buffers_of, layers)]
        # The name of each buffer that may advance, with the others of its layer.
        self._advancing = [
            (f"{name}.{last}".removeprefix("."), torch_private.buffers_of(part), last)
            for name, part in self.module.named_modules()
            for last in advancing_buffers(part)
        ]

    def _versions(self) -> dict[str, tuple[Tensor, int]]:
        """Returns the buffers that may advance, with the counters of writes to them."""
        present = {name: of_layer.get(last) for name, of_layer, last in self._advancing}
        buffers = {name: each for name, each in present.items() if each is not None}
        counters = torch_private.versions([*buffers.values()])
        return dict(zip(buffers, zip(buffers.values(), counters, strict=True), strict=True))

    def share_by_hand(self) -> None:
        """Shares buffers after a backward by hand."""
        # All ranks have the same modules, and a rank may have other state.
        if any(map(_may_advance, self._parts)):
            facts = zip(*gather_objects((self.has_rows, self.has_written())), strict=True)
            with_rows, writes = map(list, facts)
            refuse_buffers(self.share_buffers(with_rows, writes=any(writes)))
        self.has_rows = False

    def share_buffers(self, with_rows: Sequence[float], *, writes: bool) -> list[str]:
        """Gives all ranks the buffers of the first rank that has had rows since the last time.

        ``with_rows`` tells which ranks have. If some have not, they get the numbers that module and
        criterion have counted there, and parameters that forwards write there. With ``writes``, a
        rank has written buffers: the names of those with other values on another rank are returned.
        """
        names: list[str] = []
        if any(with_rows):
            source = with_rows.index(True)
            written = [] if all(with_rows) else self._take_state(source)
            parts = *self._of_layers, *self._of_criterion
            buffers = [each for part in parts for each in part.values() if each is not None]
            advanced = self._written_buffers() if writes else {}
            copies = {name: each.detach().clone() for name, each in advanced.items()}
            if tensors := buffers + written:
                group = collectives.batch_group() or dist.group.WORLD
                torch_private.broadcast(tensors, source, group)
            if writes:
                names = self._compare(copies)
                self._compares = sum(with_rows) < 2
        self.has_rows = False
        return names

    def _compare(self, copies: dict[str, Tensor]) -> list[str]:
        """Returns the names of buffers to which a rank with rows has written other values than those
        that all ranks have now. All ranks call this.
        """
        self._before = self._versions()
        names = []
        for name, value in copies.items() if self.has_rows else ():
            shared, _ = self._before[name]
            if not are_close(value, shared):
                names.append(name)
        return [*itertools.chain(*gather_objects(names))]

    def has_written(self) -> bool:
        """Returns True if forwards have written buffers that are to be compared."""
        return bool(self._compares and self._advancing and self._written_buffers())

    def _written_buffers(self) -> dict[str, Tensor]:
        """Returns the buffers that forwards have written."""
        written = {}
        for name, (buffer, counter) in self._versions().items():
            before, first = self._before.get(name, (None, 0))
            if buffer is not before or counter != first:
                written[name] = buffer
        return written

    def _take_state(self, source: int) -> list[Tensor]:
        """Makes the buffers that a forward has made on a rank, and takes the numbers that it has
        counted, unless this one has counted itself.

        Returns the parameters that forwards there have written.
        """
        saved = self.module.state_dict().keys()
        present = {
            name: (buffer.detach().to("meta"), name in saved)
            for name, buffer in self.module.named_buffers()
        }
        counted = [
            numbers_of(part).items() - self._numbers.get(part, {}).items() for part in self._parts
        ]
        state = present, counted, [*self.written]
        buffers, numbers, written = gather_objects(state)[source]
        for name, (form, is_saved) in buffers.items():
            if name not in present:
                part, _, last = name.rpartition(".")
                buffer = torch.zeros_like(form, device=self.devices[0])
                self.module.get_submodule(part).register_buffer(last, buffer, is_saved)
        for layer, each in zip(self._parts, numbers, strict=True) if not self.has_rows else ():
            vars(layer).update(each)
        self._note_state()
        return [*map(self.module.get_parameter, written)]

    def forget_rows(self) -> None:
        """Forgets that an update which has failed had rows."""
        self.has_rows = False
        self._compares = False  # Ranks may have run other forwards.

    def share_state(self, criterion: nn.Module) -> None:
        """Shares what calls of a criterion advance, too."""
        parts = [*criterion.modules()]
        self._of_criterion = [
            torch_private.buffers_of(each) for each in filter(advancing_buffers, parts)
        ]
        self._parts = [*self.module.modules(), *parts]
        self._note_state()
        if self.has_rows:  # The backward of a forward has not run yet.
            self._numbers = {part: numbers_of(part) for part in self._counting}

    def _first_row(self, arguments: Arguments) -> Arguments:
        """Returns a copy of the first row, without its history. Outputs of other models are opened."""
        row = map_leaves(
            lambda leaf: leaf[0] if isinstance(leaf, PerReplica) else leaf,
            take(arguments, range(1), self.dim),
        )
        copy: Arguments = move_leaves(row, None)
        return map_tensors(lambda tensor: tensor.detach().clone(), copy)

    def _copied_row(self, row: Arguments, inputs: Arguments | None) -> Arguments:
        """Returns a copy of a row, whose tensors lead to those inputs without rows that require a
        gradient.

        So a backward goes through several models in the order in which it does on other ranks.
        """
        sources = iter(tensors_in(move_leaves(inputs, self.devices[0])))

        def copied(tensor: Tensor) -> Tensor:
            source = next(sources, tensor)
            if not source.requires_grad:
                return tensor.clone()
            return tensor + hand_back(None, [torch.zeros_like(source)], [source]).to(tensor)

        return map_tensors(copied, move_arguments(row, self.devices[0]))

    def _random_numbers(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which random numbers are those of this rank."""
        if not self.draws_on_host:
            offset_seeds(self.devices, collectives.rank())
        elif self.training and not self.rank_numbers.is_drawing and forward_by_row.get() is None:
            return self.rank_numbers.drawing(collectives.rank())
        return NO_BLOCK


def _may_advance(part: nn.Module) -> bool:
    """Returns True for a module with buffers, or of a class whose forward may make some, or numbers."""
    return bool(torch_private.buffers_of(part)) or not is_of_torch(part)


class RankSync(GradientSync):
    """Synchronises the gradients of the model of a rank.

    Subclasses open the updates of their strategy.
    """

    def __init__(self, model: RankModel, criterion: DataParallelCriterion) -> None:
        self.model = model
        model.share_state(criterion)
        self._criterion_sums_rows = criterion.copies.collectives.sums_rows

    @property
    def meets_ranks(self) -> bool:
        """True if ranks wait for each other in a forward, so that all of them run equally many."""
        return self.model.meets_ranks or self._criterion_sums_rows

    def random_numbers(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Draws the numbers of this rank. On an accelerator, the generator has a seed of its own."""
        if not self.model.draws_on_host:
            return NO_BLOCK
        return self.model.rank_numbers.drawing(collectives.rank(), is_last=is_last)


def refuse_buffers(names: Sequence[str]) -> None:
    """Raises ``RuntimeError`` for buffers to which a rank has written other values than another."""
    if names:
        raise RuntimeError(
            f"the forward has written other values to the buffer {names[0]} on another rank, expected state that does not depend "
            "on the rows: use a SumOverRows for a statistic of all rows, or return the value and write it after the update"
        )


class RankReport(NamedTuple):
    """Numbers that each rank tells the others at the end of an update."""

    total: float = 0.0  # The sum of the losses.
    weight: float = 0.0
    digest: float = 0.0  # The settings.
    formula: float = 0.0  # The digest of a formula of the loss; 0 without one.
    has_rows: float = 0.0
    writes: float = 0.0  # Forwards have written buffers.
    has_unused: float = 0.0  # Parameters are unused.
    failure: float = 0.0  # 1 for an out of memory, 2 for another failure.
    fits: float = 0.0  # Whole gradients fit.


class GradientRecord:
    """The parameters that have got a gradient on this rank, in an update of a step, or in a
    backward by hand.

    ``parameters`` are those that are reduced over the ranks of ``group``.
    """

    def __init__(self, parameters: list[Tensor], group: collectives.Group = None) -> None:
        self.parameters = parameters
        self.dtypes = {id(parameter): parameter.dtype for parameter in parameters}
        self.group = group
        self.used: set[int] = set()  # Numbers of parameters.
        # By hand, ranks agree on unused parameters after each backward; in TrainStep, after
        # several.
        self.is_by_hand = True
        self._backward: int | None = None
        _records.add(self)

    def run_step(self, backward: Callable[[], None]) -> None:
        """Runs the backward of a step. The ranks do not agree on unused parameters at its end."""
        self.is_by_hand = False
        try:
            backward()
        finally:
            self.is_by_hand = True

    def begins_backward(self) -> bool:
        """Returns True once in the running backward: a loss may have several outputs.

        Raises ``ValueError`` if the backward has reached another model with one of the parameters.
        """
        before = self._backward
        self._backward = current_backward_id()
        if before == self._backward:
            return False
        for other in _records:
            is_reached = other is not self and other._backward == self._backward
            if is_reached and self.dtypes.keys() & other.dtypes.keys():
                raise ValueError(
                    "two models that parallelize returned share a parameter, and one backward reaches both, which would reduce "
                    "its gradient twice, expected one model of both modules, in an nn.ModuleDict, or a backward for each model"
                )
        return True

    def forget_unused(self) -> None:
        """Sets the gradients of parameters that no rank has used to None. All ranks call this."""
        is_used = [number in self.used for number in range(len(self.parameters))]
        counts = torch.tensor(is_used, dtype=torch.int32)
        total = collectives.sum_over_ranks(counts, self.group).tolist()
        counted = zip(self.parameters, total, strict=True)
        forget_gradients([parameter for parameter, count in counted if not count])


_records: weakref.WeakSet[GradientRecord] = weakref.WeakSet()  # The records of all models.


class RankUpdate(UpdateSync):
    """Loss and weight of a rank, on their way to those of all ranks. The ranks average gradients."""

    place = "the module"  # Parameters of the optimizers are part of it.

    def __init__(self, model: RankModel, record: GradientRecord) -> None:
        self._model = model
        self._record = record
        self._device = model.devices[0]
        self._ranks = collectives.world_size(record.group)
        # Returns loss and weight of this rank, on the host.
        self._local: Callable[[], Tensor] | None = None
        self._has_reports = False  # The ranks have ended the reduction, and none has failed.
        self._has_agreed = False  # All ranks go on to their optimizers.
        # Ranks with rows, and True if one has written buffers, if buffers are to be shared.
        self._unshared: tuple[Sequence[float], bool] | None = None
        self._has_unused = False  # Ranks have not agreed on their unused parameters yet.

    @property
    @abc.abstractmethod
    def others_wait(self) -> bool:
        """True if other ranks wait for this one in a forward or a backward, where none can be told."""

    @abc.abstractmethod
    def take_part(self, divide: Callable[[], object]) -> None:
        """Takes part in the reduction of the others after a failure. Nobody uses it.

        ``divide`` takes part in the choice of the divisor.
        """

    def agree(self, report: RankReport) -> list[RankReport]:
        """Completes the report of this rank, and ends the reduction.

        Returns the reports of all ranks.
        """
        return self.exchange(report)

    def exchange(self, report: RankReport) -> list[RankReport]:
        """Returns the reports of all ranks. Raises an error if one has failed."""
        record = self._record
        report = report._replace(
            has_rows=self._model.has_rows,
            writes=self._model.has_written(),
            has_unused=len(record.used) < len(record.parameters),
        )
        reports = collectives.gather_numbers(report, record.group)
        if failures := [each.failure for each in reports if each.failure]:
            collectives.raise_failure(len(failures), self._ranks, max(failures) == 1)
        self._has_reports = True
        return reports

    def finish(self, local: LossSum, settings: Callable[[], Settings]) -> LossSum:
        """Ends the reduction, with the sums of loss and weight, and compares the settings."""
        # No micro-batch may have been known to be the last.
        read = self._local or self.start(local)
        present = settings()
        if present.trains_others(self._record.dtypes):
            self._model.refuse_unshared()  # It walks through the module.
        total = torch.empty_like(local.total)  # Nothing is allocated after the agreement.
        names: list[SumName] = list(local.terms or ())
        formula = digest_names(names) if names else 0.0
        loss, weight = read().tolist()
        reports = self.agree(RankReport(loss, weight, present.digest(), formula))
        self._unshared = [each.has_rows for each in reports], any(each.writes for each in reports)
        self._has_unused = any(map(operator.attrgetter("has_unused"), reports))
        self._share()
        present.check(is_same=len({each.digest for each in reports}) == 1)
        if len({each.formula for each in reports} - {0.0}) > 1:
            by_rank = [*filter(None, gather_objects(names, self._record.group))]
            for each in by_rank:
                compare_names(by_rank[0], each)
        self._has_agreed = True
        total.fill_(sum([each.total for each in reports]))
        return LossSum(total, sum([each.weight for each in reports]))

    def discard(self, error: BaseException, divide: Callable[[], object] = bool) -> bool:
        """Forgets the gradients of this rank, and tells the other ranks, unless they wait for it."""
        # The others wait for it, and go on.
        self._has_agreed |= self._unshared is not None or self._has_unused
        self._share()
        is_told = self._has_reports or self._has_agreed
        is_known = is_told or isinstance(error, ElsewhereFailure)
        is_memory = isinstance(error, torch.OutOfMemoryError)
        others_wait = not is_known and self.others_wait
        try:
            if not (is_known or others_wait):
                self.take_part(divide)
                with contextlib.suppress(ElsewhereFailure):  # This failure is one, too.
                    self._tell_end(error, RankReport(failure=1 if is_memory else 2))
        finally:
            self._forget_gradients()
            self._model.forget_rows()
        if others_wait and is_memory:
            raise RuntimeError(
                "this rank ran out of memory where others wait for it, so the batch cannot run again in smaller pieces: give "
                "micro_batch_size a smaller number, as memory.fit finds it"
            )
        return self._has_agreed

    def _tell_end(self, error: BaseException, report: RankReport) -> None:
        """Tells the other ranks at the end of their update."""
        self.exchange(report)

    def _forget_gradients(self) -> None:
        forget_gradients(self._record.parameters)

    def _share(self) -> None:
        """Shares buffers and unused parameters, unless that is done."""
        if self._unshared is not None:
            with_rows, writes = self._unshared
            names = self._model.share_buffers(with_rows, writes=writes)
            self._unshared = None
            refuse_buffers(names)
        if self._has_unused:
            self._record.forget_unused()
            self._has_unused = False

    def start(self, local: LossSum) -> Callable[[], Tensor]:
        """Starts to copy loss and weight to the host."""
        total = local.total.double()
        weight = 0.0 if local.weight is None else local.weight
        if not isinstance(weight, Tensor):
            weight = total.new_full((), weight)
        self._local = start_copy(torch.stack([total, weight.double()]))
        return self._local

    def multiply(self, tensors: Sequence[Tensor], factor: Weight) -> None:
        """Multiplies the gradients by the factor and, since they were averaged, by the number of
        ranks.
        """
        gradients = self._shared_gradients(tensors)
        factor = factor * self._ranks
        if isinstance(factor, Tensor) or factor != 1:
            torch_private.foreach_multiply_(torch_private.local_tensors(gradients), factor)

    def divisor(self, expected: Weight, before: float, in_float16: bool) -> Weight:
        """Returns a power of two near the weight of the update before, at first 1; in float16, that
        of what all ranks expect.
        """
        if before or not in_float16:
            return power_of_two(before) / self._ranks
        whole = collectives.sum_over_ranks(
            add_up([expected], self._device).double(), self._record.group
        )
        return power_of_two(float(whole) if whole.is_cpu else whole) / self._ranks

    def smallest(self, number: float) -> float:
        """Returns the smallest ``number`` of all ranks."""
        return -collectives.max_over_ranks(-number, self._record.group)

    def _shared_gradients(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Returns the gradients of parameters of the optimizers. All of them must be reduced."""
        gradients = []
        for parameter in tensors:
            if parameter.grad is not None:
                if id(parameter) not in self._record.dtypes:
                    raise ValueError(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} with a gradient that "
                        f"the ranks would not share: make it part of {self.place} that parallelize is given, not frozen"
                    )
                gradients.append(parameter.grad)
        return gradients


def watch_output(
    output: object,
    first: Tensor | None = None,
    at_backward: Callable[[], None] | None = None,
) -> object:
    """Returns nested output whose backward runs once, after the gradients of all of its tensors are
    there.

    It calls ``at_backward``, and reaches ``first`` without a gradient for it.
    """
    tensors = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    if not tensors or not torch.is_grad_enabled():
        return output
    if output is tensors[0]:
        return _watch(tensors, first, at_backward)[0]
    watched = iter(_watch(tensors, first, at_backward))
    return map_tensors(lambda tensor: next(watched) if tensor.requires_grad else tensor, output)


def tensors_of(output: object) -> list[Tensor]:
    """Returns the tensors of nested output, most often one."""
    return [output] if isinstance(output, Tensor) else list(tensors_in(output))


def _watch(
    tensors: list[Tensor], first: Tensor | None, at_backward: Callable[[], None] | None
) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = _Watch.apply(at_backward, first, *tensors)
    node: torch_private.Node = outputs[0].grad_fn
    node.metadata[collectives.WATCHED] = True
    return outputs


class _Watch(torch.autograd.Function):
    """The identity over several tensors, after a tensor that it does not return."""

    @staticmethod
    def forward(
        ctx: Any, at_backward: Callable[[], None] | None, first: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.at_backward = at_backward
        ctx.first = first
        ctx.set_materialize_grads(False)
        return tuple(map(Tensor.detach, tensors))  # Views must not be written to in place.

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.at_backward is not None:
            ctx.at_backward()
        present = [gradient for gradient in gradients if gradient is not None]
        if not torch.is_grad_enabled() or ctx.first is None or not present:
            return None, None, *gradients
        # A penalty of gradients has a backward that reaches parameters too: create_graph=True.
        watched = iter(_watch(present, ctx.first, ctx.at_backward))
        return None, None, *[None if gradient is None else next(watched) for gradient in gradients]


def sparse_weights(module: nn.Module) -> dict[str, Tensor]:
    """Returns the weights of embeddings that get sparse gradients, by the name of the embedding."""
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    return {
        name: part.weight
        for name, part in module.named_modules()
        if isinstance(part, embeddings) and part.sparse and part.weight.requires_grad
    }


def refuse_graph() -> None:
    """Raises ``RuntimeError`` in a backward that keeps a graph of the gradients that ranks share."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a backward was called with create_graph=True, and gradients that ranks share have no graph, expected "
            "torch.autograd.grad(loss, tensors, create_graph=True) with strategy='ddp'"
        )


@contextlib.contextmanager
def undone(module: nn.Module, devices: Devices, *, advances: bool) -> Iterator[None]:
    """Undoes what a forward of a row in place of no rows changes.

    With ``advances``, as by hand, state that does not depend on the rows stays: the others have run
    this forward, too.
    """
    parts = [
        part
        for part in module.modules()
        if not advances or isinstance(part, BatchNorm) or sums_rows(part)
    ]
    with without_trace(parts, devices), forward_of(NONE):
        yield
