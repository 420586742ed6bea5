"""FSDP2's ``fully_shard`` with exact gradients, whatever rows and parameters each rank uses::

    rank 0   forward 0 | backward 0 | forward 1 | backward 1 | finish | update
    rank 1   forward 0 | backward 0 | no rows   | backward 1 | finish | update

The repeated blocks of a module are sharded one by one, and the rest of it is the root::

    module                          group of parameters, all-gathered and reduced together
    embedding, norm, head    --->   root
    blocks[0]                --->   blocks[0]
    blocks[1]                --->   blocks[1]

Blocks are all-gathered in every forward and backward, so all ranks run equally many micro-batches.
The hosts ask for the largest number in each batch. Gradients stay whole until the last of them
where they fit, otherwise each backward reduces them to their shards. The loss, its weight and what
else ranks must agree on are one small all-gather of the hosts in the end.

FSDP2 reduces the gradients that a rank has. Ranks that have used different parameters would reduce
tensors of different sizes, so zeros are set in place of missing gradients. (torch 2.11 cannot do
this itself.) A rank all-gathers a block when it runs it. Blocks of equal size that run in another
order elsewhere would be mixed up without an error, so the hosts compare their orders::

    first forward            ranks compare each block before they all-gather it
    start of the backward    ranks compare the blocks that they have run, if these are new
    backward of a block      all-gather | gradients of parameters | zeros for missing ones | reduce-scatter
    end of the update        ranks agree on the parameters that nobody has used: their gradient is None again
"""

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Unpack, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from ..batch.containers import map_tensors, tensors_in
from ..batch.marks import Arguments
from ..batch.outputs import PerReplica
from ..batch.rows import move_arguments, move_leaves
from ..loss.criterion import DataParallelCriterion
from ..loss.sums import LossSum, Weight, run_backward, widen, zero_of
from ..replicas.module_tree import find_blocks
from ..runtime import collectives, torch_private
from ..runtime.collectives import gather_objects
from ..runtime.devices import free_bytes, is_accelerator
from ..runtime.torch_private import (
    BatchNorm,
    base_of,
    current_backward_id,
    is_sharded,
    run_after_backward,
    versions,
    without_compilation,
)
from ..runtime.values import Precision, forget_gradients, set_gradient, set_memory
from ..training.sync import GradientSync, UpdateSync, gradient_sync
from .ranks import (
    GradientRecord,
    RankModel,
    RankReport,
    RankSync,
    RankUpdate,
    RowSettings,
    refuse_graph,
    sparse_weights,
    tensors_of,
    undone,
    watch_output,
)


class ShardedModel(RankModel):
    """FSDP2's ``fully_shard`` on each block of a module, with a list of this rank's output as
    :class:`DataParallelModel` returns.

    Parameters, gradients and optimizer state are ``DTensor``s, sharded over the ranks. A rank
    without rows runs one row of an earlier one: its output has no rows, its gradients are zeros,
    and random numbers, and in a step buffers, stay as they were.

    Args:
        module: on any device. It is sharded in place, over the ranks of ``mesh``.
        device: of this rank.
        rows: dim, out_dims and precision, which is also that of parameters that are
            all-gathered.
    """

    record: "ShardedGradients"

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, device: torch.device, **rows: Unpack[RowSettings]
    ) -> None:
        super().__init__()
        self.module = module
        self._set_rows(device, **rows)
        # The outputs of a forward that has had no backward, None during both: others wait for it.
        self.outputs: list[TensorWeakRef] | None = []
        self.forwards = 0
        self.record = ShardedGradients(self.share_by_hand)
        without_compilation(module).register_forward_hook(torch.compiler.disable(_avoid_views))
        # FSDPModules
        self.units: list[Any] = shard(module, mesh, self.precision, sends_of_rank0(device))
        names = {id(part): name for name, part in without_compilation(module).named_modules()}
        for unit in self.units:
            self.record.add(unit, names.get(id(unit)) or "root")
        self._sentinel = torch.zeros((), device=device, requires_grad=True)
        self._required = {
            name: (parameter, parameter.requires_grad)
            for name, parameter in module.named_parameters()
        }

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Changes nothing: the backward of each micro-batch reduces its gradients, whose sum is the
        same, and no rank keeps whole gradients.
        """
        return contextlib.nullcontext()

    def forward_without_rows(self) -> Tensor:
        """Takes part in a forward of the other ranks. Returns a zero for the backward."""
        outputs = self._run(None, None, 0)
        if not torch.is_grad_enabled():  # the first of two passes
            return torch.zeros(())
        return zero_of(*[tensor for tensor in tensors_in(list(outputs)) if tensor.requires_grad])

    def run_backward(self, backward: Callable[[], None], *, keeps_whole: bool) -> None:
        """Runs a backward of a step."""
        self.outputs = None
        self.record.run_step(backward, keeps_whole=keeps_whole)
        self.outputs = []

    def forget_gradients(self) -> None:
        """Forgets all gradients, after a failure."""
        self.outputs = []
        forget_gradients(self.record.parameters)
        # newer than torch 2.11
        if self.record.has_run and hasattr(self.units[-1], "reset_iter_state"):
            self.units[-1].reset_iter_state()
            torch_private.forget_whole_gradients(self.units)

    def _run(
        self,
        method: str | None,
        arguments: Arguments | None,
        rows: int | None,
        *,
        in_step: bool = False,
    ) -> PerReplica:
        if self._examples.get(method) is None:
            self._keep_example(method, arguments, rows)
        example = self._examples[method]
        if rows == 0 and example is not None and not (self.meets_ranks and arguments is not None):
            # This moves it once: the host would wait for each copy.
            example = self._examples[method] = move_leaves(example, self.devices[0])
            return self._run_example(method, example, arguments, in_step)
        if arguments is None:
            raise RuntimeError(
                "no rank has had a row yet, expected rows on one rank at least in the first forward"
            )
        return self._call(method, arguments, rows, in_step)

    def _run_example(
        self, method: str | None, example: Arguments, arguments: Arguments | None, in_step: bool
    ) -> PerReplica:
        """Runs a row of another batch, in place of ``arguments`` without rows."""
        is_by_hand = not in_step and arguments is not None
        with (
            self.record.of_dummy(),
            self._random_numbers(),
            undone(self.module, self.devices, advances=is_by_hand),
        ):
            row = self._copied_row(example, arguments)
            outputs = self._call(method, row, 1, in_step).narrow(0, 0)
        # The sums of the row do not count.
        return outputs if self.noting is None else outputs.made_by(self, [None])

    def _call(
        self, method: str | None, arguments: Arguments, rows: int | None, in_step: bool
    ) -> PerReplica:
        inputs, kwargs = move_arguments(arguments, self.devices[0])
        module = torch_private.children_of(self)["module"]  # self.module would call __getattr__
        function = getattr(module, method or "__call__")
        if self.noting is not None:
            function = functools.partial(self.noting.call, self.module, function)
        self.outputs = None
        with self._as_sharded(), self.precision.autocast(self.devices), self._random_numbers():
            output = function(*inputs, **kwargs)
            if self.record.before_first:
                for tensor in tensors_of(output):
                    collectives.refuse_shards(tensor)
                self.record.end_first()
        self.forwards += 1
        if not torch.is_grad_enabled():
            self.units[-1].reshard()  # The module has its shards again after an evaluation.
            self.record.compare_blocks()
        zero = None if in_step else zero_of(self._sentinel, *self.record.parameters)
        watched = watch_output(output, zero, functools.partial(self._begin_backward, in_step))
        learned = [tensor for tensor in tensors_of(watched) if in_step and tensor.requires_grad]
        self.outputs = [*map(TensorWeakRef, learned)]
        if self.noting is not None:
            return self._open(self.noting, [watched], [rows])
        return PerReplica([watched], [rows], self.out_dims)

    def _take_write(self, name: str) -> None:
        raise RuntimeError(
            f"a forward writes to {name}, which FSDP2 has gathered, so it is lost, expected a write in torch.no_grad() after "
            "the update, or a parametrization (torch.nn.utils.parametrize)"
        )

    def _begin_backward(self, in_step: bool) -> None:
        if not in_step:
            refuse_graph()
            if not torch_private.will_run(torch_private.accumulator_of(self._sentinel)):
                self.record.refuse_requests()
        self.record.begin()

    @contextlib.contextmanager
    def _as_sharded(self) -> Iterator[None]:
        """Checks that the same parameters require a gradient.

        FSDP2 gathers them into tensors that would not know.

        A forward without gradients may freeze layers, as peft's ``disable_adapter()`` does: FSDP2
        does not see it.
        """
        changed = {
            name: entry
            for name, entry in self._required.items()
            if entry[0].requires_grad != entry[1]
        }
        for name, (parameter, before) in changed.items() if torch.is_grad_enabled() else ():
            raise ValueError(
                f"{name} has requires_grad={parameter.requires_grad}, but {before} when parallelize sharded it: freeze and "
                "unfreeze layers before parallelize, with requires_grad_(False), also all of a teacher"
            )
        for parameter, before in changed.values():
            parameter.requires_grad_(before)
        try:
            yield
        except RuntimeError as error:
            if "storage of size 0" not in str(error):  # FSDP2 has freed parameters of a block.
                raise
            raise RuntimeError(_IN_FORWARD) from error
        finally:
            for parameter, before in changed.values():
                parameter.requires_grad_(not before)

    def _keep_example(
        self, method: str | None, arguments: Arguments | None, rows: int | None
    ) -> None:
        """Keeps one row of the first forward. A rank without rows receives one from another rank."""
        if method is not None and method not in self._examples:
            from torch.distributed.fsdp import register_fsdp_forward_method

            register_fsdp_forward_method(self.module, method)
        has_rows = gather_objects(rows != 0, self.record.group)
        row = self._first_row(arguments) if rows and arguments is not None else None
        if True in has_rows and not all(has_rows):
            source = has_rows.index(True)
            is_source = collectives.rank(self.record.group) == source
            shared = [move_leaves(row, torch.device("cpu")) if is_source else None]
            dist.broadcast_object_list(shared, group=self.record.group, group_src=source)
            row = row or shared[0]
        self._examples[method] = row


class _FSDPSync(RankSync):
    """Opens updates of a :class:`ShardedModel`, and keeps what they learn for those behind."""

    model: ShardedModel

    def __init__(self, model: ShardedModel, criterion: DataParallelCriterion) -> None:
        super().__init__(model, criterion)
        self.keeps_whole = False  # gradients until the last micro-batch of a batch
        self._updates = 0  # complete ones

    def open(self) -> UpdateSync:
        return _FSDPUpdate(self, self.model)

    def fits(self) -> bool:
        """Returns True once, if whole gradients fit beside the state of the optimizer, and a
        failure can forget them.
        """
        # newer than torch 2.11
        if self._updates != 1 or not hasattr(self.model.units[-1], "reset_iter_state"):
            return False
        needed = 4 * sum(parameter.numel() for parameter in self.model.record.parameters)
        device = self.model.devices[0]
        return not is_accelerator(device) or needed <= free_bytes(device) // 2

    def learn(self, *, all_fit: bool) -> None:
        """Counts a complete update. After it, gradients stay whole if they fit on all ranks."""
        self._updates += 1
        self.keeps_whole = self.keeps_whole or all_fit


class _FSDPUpdate(RankUpdate):
    """Sums gradients over ranks. Every rank takes part in the forwards of all others.

    In each batch the ranks ask for the largest number of micro-batches, and all of them run as
    many, some without rows. A rank at its end asks until all ranks are there. Gradients stay whole
    until the last micro-batch of a batch, if they fit into half of the free memory of each rank.
    """

    _model: ShardedModel

    def __init__(self, sync: _FSDPSync, model: ShardedModel) -> None:
        super().__init__(model, model.record)
        self._sync = sync
        self._has_begun = False  # A backward has run.
        self._is_at_end = False  # All ranks have run their last micro-batch.
        self._left = 0  # micro-batches of this batch to come
        self._forwards_before = 0  # Forwards of the model before this batch.
        self._divisor: Weight = 1.0  # The last backward had it.

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def count_micro_batches(self, count: int) -> int:
        self._ask(2 * count + 1)  # A batch without rows is not the end of this rank.
        self._forwards_before = self._model.forwards
        return self._left

    def _ask(self, number: int) -> int:
        """Returns the largest number of any rank: 0 if all are at their end."""
        largest = collectives.max_over_ranks(number, self._record.group)
        self._left = largest // 2
        return largest

    def forwards_without_rows(self, *, is_reduced: bool) -> Iterator[list[Tensor]]:
        while self._ask(0):
            for _ in range(self._left):
                yield [self._model.forward_without_rows()]
        self._is_at_end = torch.is_grad_enabled()  # The first of two passes has no gradients.

    def backward(self, losses: Sequence[Tensor], divisor: Weight, local: LossSum | None) -> None:
        if local is not None:
            self.start(local)
        if not self._has_begun:
            self._model.record.begin_update()
            self._has_begun = True
        self._left = self._left - 1
        self._divisor = divisor
        self._model.run_backward(
            functools.partial(run_backward, losses, divisor),
            keeps_whole=self._sync.keeps_whole and self._left > 0,
        )

    def agree(self, report: RankReport) -> list[RankReport]:
        reports = self.exchange(report._replace(fits=self._sync.fits()))
        self._model.record.average_scalars()
        self._sync.learn(all_fit=0.0 not in [each.fits for each in reports])
        return reports

    def tell(self, error: BaseException, *, has_begun: bool, is_single: bool = False) -> None:
        if not has_begun:
            collectives.tell_failure(error, self._record.group)
        elif self._model.outputs is not None:  # The others do not wait in a block.
            self._run_forwards(is_single=is_single)
            collectives.tell_failure(error)

    def _run_forwards(self, *, is_single: bool) -> None:
        """Runs the forwards that others wait for, without rows: those of the first of two passes,
        or the single one.
        """
        with torch.set_grad_enabled(is_single):
            for _ in range(self._left - (self._model.forwards - self._forwards_before)):
                self._model.forward_without_rows()
            for _ in () if is_single else self.forwards_without_rows(is_reduced=False):
                pass

    @property
    def others_wait(self) -> bool:
        return self._model.outputs is None

    def take_part(self, divide: Callable[[], object]) -> None:
        present = [reference() for reference in self._model.outputs or ()]
        outputs = [output for output in present if output is not None]
        with torch.enable_grad():
            for _ in range(self._left):
                zero = zero_of(*outputs) if outputs else self._model.forward_without_rows()
                outputs = []
                divide()
                divide = bool
                self.backward([zero], self._divisor, None)

    def _tell_end(self, error: BaseException, report: RankReport) -> None:
        if self._is_at_end:
            self.exchange(report)
        else:
            collectives.tell_failure(error, self._record.group)

    def _forget_gradients(self) -> None:
        self._model.forget_gradients()


@gradient_sync.register
def _(model: ShardedModel, criterion: DataParallelCriterion) -> GradientSync:
    collectives.refuse_unshared(criterion.parameters())
    return _FSDPSync(model, criterion)


def _avoid_views(module: nn.Module, inputs: object, output: object) -> object:
    """Replaces outputs of the root that are views, of which FSDP2 warns. Callers get other ones.

    Parameters and views of them are copied: FSDP2 frees their memory behind the forward.
    """

    def copied(tensor: Tensor) -> Tensor:
        return tensor.clone() if isinstance(base_of(tensor), nn.Parameter) else tensor

    bases = [(tensor, base_of(tensor)) for tensor in tensors_of(output)]
    if [1 for tensor, base in bases if tensor is not base or isinstance(base, nn.Parameter)]:
        return watch_output(map_tensors(copied, output))
    return output


_IN_FORWARD = (
    "gradients were asked for in a forward, or past its output, where FSDP2 cannot reduce them, expected strategy='ddp' for "
    "torch.autograd.grad in a forward"
)
Slot = tuple[int, nn.Module, str]  # number of a parameter, its module, and its name there


class ShardedGradients(GradientRecord):
    """Completes the gradients of sharded modules in every backward.

    Compares the blocks that ranks have run.

    A rank compares its blocks with the others if their order is new. If only one rank changes its
    order, it waits in the comparison and the others wait for its shards, until the timeout of the
    process group. ``group`` has no other collectives meanwhile.
    """

    def __init__(self, share_buffers: Callable[[], None]) -> None:
        super().__init__([], collectives.second_group("hosts"))
        self._share_buffers = share_buffers
        self.has_run = False  # FSDP2 has begun
        # The present forward has no rows of this rank.
        self._is_dummy = False
        # Parameters that have copies in such a forward, with their places.
        self._replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._keeps_whole = False  # FSDP2 does not reduce the gradients of the running backward.
        # Blocks in the order in which they began to run, since the last backward or evaluation.
        self._ran: list[str] = []
        self._compared: list[str] | None = None
        self.before_first: list[RemovableHandle] = []  # Hooks of the first forward.
        self._units: list[list[Slot]] = []  # the parameters of each sharded module
        self._accumulators: list[torch_private.Node] = []  # They live, with their hooks.
        self._scalars: list[int] = []  # Parameters that each rank has whole.
        self._root: Any = None  # The last sharded module, which contains the others.
        self.begin_update()

    def begin_update(self) -> None:
        """Begins to note the parameters that this rank uses."""
        self.used.clear()
        # Whole gradients and their versions, after the last backward. FSDP2 replaces those in half
        # precision.
        self._whole_gradients: dict[int, tuple[TensorWeakRef, int]] = {}

    def run_step(self, backward: Callable[[], None], *, keeps_whole: bool = False) -> None:
        """Runs a backward of a step. It leaves gradients whole, or reduces them."""
        if not keeps_whole:
            super().run_step(backward)
            return
        self._keeps_whole = True
        self._root.set_requires_gradient_sync(False)
        try:
            super().run_step(backward)
        finally:
            self._root.set_requires_gradient_sync(True)
            self._keeps_whole = False

    @contextlib.contextmanager
    def of_dummy(self) -> Iterator[None]:
        """Surrounds a forward that has no rows of this rank.

        It runs with copies of the parameters in the same memory, whose gradients nobody reads. So a
        penalty on a parameter has its gradient on this rank too.
        """
        self._is_dummy = True
        try:
            yield
        finally:
            self._is_dummy = False
            for part, name, parameter in reversed(self._replaced):
                if not is_sharded(getattr(part, name)):
                    setattr(part, name, parameter)
            self._replaced = []

    def _replace_parameters(self, unit: nn.Module) -> None:
        for part in unit.modules():
            for name, parameter in [*part.named_parameters(recurse=False)]:
                if parameter.requires_grad and not is_sharded(parameter):
                    copy = nn.Parameter(parameter.detach())
                    copy.register_post_accumulate_grad_hook(lambda each: forget_gradients([each]))
                    setattr(part, name, copy)
                    self._replaced.append((part, name, parameter))

    def add(self, unit: Any, block: str) -> None:
        """Completes the gradients of the parameters of a sharded module, without those that were
        added before.
        """
        slots = []
        for path, parameter in unit.named_parameters():
            if parameter.requires_grad and id(parameter) not in self.dtypes:
                parent, _, name = path.rpartition(".")
                number = len(self.parameters)
                if parameter.dim():
                    node = torch_private.accumulator_of(parameter)
                    node.register_prehook(functools.partial(_as_shards, parameter))
                    self._accumulators.append(node)
                    slots.append((number, unit.get_submodule(parent), name))
                else:
                    self._scalars.append(number)
                self.parameters.append(parameter)
                self.dtypes[id(parameter)] = parameter.dtype
        self._units.append(slots)
        self._root = unit

        def compare(module: nn.Module, inputs: object) -> None:
            self._compare([*self._ran, block])

        def watch_inputs(module: nn.Module, inputs: object, kwargs: object) -> None:
            self.has_run = self.has_run or unit is self._root
            self._ran.append(block)
            # FSDP2 has no node for a unit without parameters of its own, and does nothing where a
            # checkpoint runs it again.
            if not slots or not torch.is_grad_enabled() or current_backward_id() is not None:
                return
            if self._is_dummy:
                self._replace_parameters(unit)
            nested = torch_private.leaves_of_tree((inputs, kwargs))
            learned = [
                value for value in nested if isinstance(value, Tensor) and value.requires_grad
            ]
            # All of these come from one node of FSDP2, whose backward reduces the gradients of the
            # unit.
            if learned:
                node: torch_private.Node = learned[0].grad_fn
                node.register_prehook(functools.partial(self._begin_unit, slots))

        # The hook of FSDP2 comes between these two. torch.compile leaves both out.
        first = unit.register_forward_pre_hook(torch.compiler.disable(compare), prepend=True)
        self.before_first.append(first)
        unit.register_forward_pre_hook(torch.compiler.disable(watch_inputs), with_kwargs=True)

    def _begin_unit(self, slots: Sequence[Slot], gradients: object) -> None:
        if self._backward != current_backward_id():  # It has not passed the output of the model.
            raise RuntimeError(_IN_FORWARD)
        self.complete(slots)

    def begin(self) -> None:
        """Begins a backward.

        This runs before the hooks of FSDP2, so its callback at the end runs before theirs.
        """
        if self.begins_backward():
            self.compare_blocks()
            if self.is_by_hand:
                if any(any(torch_private.hooks_of(each)) for each in self.parameters):
                    raise RuntimeError(
                        "a parameter has a hook of its gradient, which FSDP2 does not call in a backward by hand, expected none: "
                        "change parameter.grad after the backward, or use TrainStep"
                    )
                self.begin_update()
                self.used.update(
                    number
                    for number, parameter in enumerate(self.parameters)
                    if parameter.grad is not None
                )
            run_after_backward(self._end)

    def compare_blocks(self) -> None:
        """Compares the blocks of all ranks if they are new. Raises ``RuntimeError`` if they differ."""
        ran = self._ran
        self._ran = []
        if ran != self._compared:
            self._compare(ran)
            self._compared = ran

    def end_first(self) -> None:
        """Ends the first forward, whose blocks are compared before each is gathered, and at its end:
        shards of other sizes abort gloo.
        """
        for hook in self.before_first:
            hook.remove()
        self.before_first = []
        self._compare(self._ran)

    def _compare(self, ran: list[str]) -> None:
        if len(self._units) == 1:  # The root alone has no order.
            return
        orders = gather_objects(ran, self.group)
        for rank, order in enumerate(orders):
            for expected, block in itertools.zip_longest(orders[0], order, fillvalue="none"):
                if block != expected:
                    raise RuntimeError(
                        f"rank {rank} ran the block {block} where rank 0 ran {expected}, expected the same blocks in "
                        "the same order: run one that only some rows need on every rank, or use strategy='ddp'"
                    )

    def refuse_requests(self) -> None:
        """Raises ``RuntimeError`` if the running backward was asked for gradients of parameters,
        which ranks would not share.
        """
        whole = [getattr(part, name) for slots in self._units for _, part, name in slots]
        for parameter in (*self.parameters, *whole):
            if torch_private.will_run(torch_private.accumulator_of(parameter)) is not False:
                raise RuntimeError(
                    "gradients of shards were asked for, by torch.autograd.grad or backward(inputs=...), which ranks do not "
                    "share, expected a whole backward: call loss.backward(retain_graph=True) and read parameter.grad"
                )

    def complete(self, slots: Sequence[Slot]) -> None:
        """Sets the missing gradients of a unit to zeros."""
        if not slots or is_sharded(getattr(*slots[0][1:])):
            return  # This unit has not run, or is reduced already: it has shards.
        gradients: list[Tensor] = []
        for number, part, name in slots:
            parameter = getattr(part, name)
            gradient = parameter.grad
            reference, version = self._whole_gradients.get(number, (None, 0))
            is_kept = reference is not None and gradient is reference()
            if gradient is None:
                gradient = _gradient_of(parameter)
            elif not is_kept or versions([gradient]) != [version]:
                self.used.add(number)
            gradients.append(gradient)
        if self._keeps_whole:
            marks = zip(slots, gradients, versions(gradients), strict=True)
            for (number, _, _), gradient, version in marks:
                self._whole_gradients[number] = TensorWeakRef(gradient), version

    def _end(self) -> None:
        for slots in self._units:  # FSDP2 reduces some at the end of the backward.
            self.complete(slots)
        self.used.update(
            number for number in self._scalars if self.parameters[number].grad is not None
        )
        if self.is_by_hand:
            run_after_backward(self._end_by_hand)  # FSDP2's callback comes first.

    def _end_by_hand(self) -> None:
        self.average_scalars()
        self.forget_unused()
        self._share_buffers()

    @torch.no_grad()
    def average_scalars(self) -> None:
        """Averages the gradients of 0-dim parameters, as FSDP2 does those of shards. All ranks call
        this.

        A part that was averaged before is equal on all ranks, so it stays.
        """
        gradients = [_gradient_of(self.parameters[number]) for number in self._scalars]
        if gradients:
            total = collectives.sum_over_ranks(torch.stack([*map(widen, gradients)]))
            for gradient, mean in zip(gradients, total / collectives.world_size(), strict=True):
                gradient.copy_(mean)


def _as_shards(parameter: Any, gradients: Sequence[Any]) -> tuple[Any]:
    """Returns the gradient of a penalty, sharded as its parameter. torch replicates small ones."""
    (gradient,) = gradients
    if gradient is None:
        return (None,)
    return (gradient.redistribute(parameter.device_mesh, parameter.placements),)


def _gradient_of(parameter: Tensor) -> Tensor:
    """Returns the gradient of a parameter. One that is missing is set to zeros."""
    if parameter.grad is None:
        # New in torch 2.15: that of the reduction.
        dtype = getattr(parameter, "grad_dtype", None)
        set_gradient(parameter, torch.zeros_like(parameter, dtype=dtype))
    return cast(Tensor, parameter.grad)


def find_sharded_blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the blocks of a module that are sharded one by one.

    These are the repeated blocks, otherwise layers of one class in an ``nn.ModuleList`` or
    ``nn.Sequential``. A block that shares a parameter with another module belongs to the root.
    """
    inner = without_compilation(module)
    blocks = [inner.get_submodule(name) for name in find_blocks(inner)] or _repeated_layers(inner)
    blocks = list(dict.fromkeys(without_compilation(block) for block in blocks))
    uses = _count_uses(inner).items()
    return [block for block in blocks if block is not inner and _count_uses(block).items() <= uses]


def shard(
    module: nn.Module, mesh: DeviceMesh, precision: Precision, prepare: Callable[[nn.Module], None]
) -> list[Any]:
    """Shards a module in place over the ranks of a mesh.

    Returns the sharded blocks, and the root at the end.

    Parameters are all-gathered and used in the dtype of ``precision``, except in blocks with batch
    norm. 0-dim ones, which FSDP2 cannot shard, stay whole. Gradients are reduced in float32.
    ``prepare`` is called for each block, and for the root, before it is sharded.
    """
    # imports torch._dynamo, which takes seconds
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if torch_private.has_shards(module):
        raise ValueError(
            "the module was sharded before, which FSDP2 does once, expected one that is not sharded: add heads and adapters "
            "before parallelize, build the module anew and load its state, or use strategy='ddp'"
        )
    for name, parameter in module.named_parameters():
        if any(torch_private.hooks_of(parameter)):
            raise ValueError(
                f"{name} has a hook of its gradient, which FSDP2 loses with the parameter that it replaces, expected hooks after "
                f"parallelize: model.module.get_parameter({name!r}).register_hook(...)"
            )
    for name in sparse_weights(module):
        raise ValueError(
            f"the embedding {name!r} has sparse=True, and FSDP2 reduces dense gradients, expected False, or strategy='ddp'"
        )
    half = MixedPrecisionPolicy(param_dtype=precision.dtype, reduce_dtype=torch.float32)
    units = [*find_sharded_blocks(module), without_compilation(module)]
    scalars = {parameter for parameter in module.parameters() if not parameter.dim()}
    for unit in units:
        _refuse_unlike(unit, precision)
        prepare(unit)
        # batch norm takes parameters of the dtype of its statistics; autocast casts in the other
        # layers
        is_full = precision.dtype is None or any(
            isinstance(part, BatchNorm) for part in unit.modules()
        )
        policy = MixedPrecisionPolicy() if is_full else half
        fully_shard(unit, mesh=mesh, mp_policy=policy, ignored_params=scalars)
        cast(FSDPModule, unit).set_force_sum_reduction_for_comms(True)  # gloo has no averages
    return units


def _refuse_unlike(unit: nn.Module, precision: Precision) -> None:
    """Raises ``ValueError`` for parameters of a unit that FSDP2 cannot join."""
    named = unit.named_parameters()
    present = {name: each for name, each in named if each.dim() and not is_sharded(each)}
    dtypes = {each.dtype for each in present.values() if each.requires_grad}
    for name, each in present.items():
        is_cast = each.is_complex() and precision.dtype is not None
        if is_cast or not each.numel() or {each.dtype} < dtypes:
            raise ValueError(
                f"{name} is {each.dtype} of shape {tuple(each.shape)}, expected elements, one dtype of all that a block trains, "
                "and none that is complex with precision='bf16' or 'fp16', since FSDP2 joins them: use strategy='ddp'"
            )


def _repeated_layers(module: nn.Module) -> list[nn.Module]:
    repeated = []
    for parent in module.modules():
        if isinstance(parent, (nn.ModuleList, nn.Sequential)):
            layers = [layer for layer in parent.children() if list(layer.parameters(recurse=False))]
            kinds = Counter(map(type, layers))
            repeated += [layer for layer in layers if kinds[type(layer)] > 1]
    return repeated


def _count_uses(module: nn.Module) -> Counter[int]:
    return Counter(
        id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)
    )


def sends_of_rank0(device: torch.device) -> Callable[[nn.Module], None]:
    """Returns a function that moves a part of a module to a device, with the values of the group's
    rank 0, each tensor once.
    """
    sent: set[int] = set()

    def send(module: nn.Module) -> None:
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) not in sent and not is_sharded(tensor) and not tensor.is_meta:
                set_memory(tensor, tensor.data.to(device))
                dist.broadcast(tensor.data, group=collectives.batch_group(), group_src=0)
                sent.add(id(tensor))

    return send
