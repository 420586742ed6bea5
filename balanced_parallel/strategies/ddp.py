"""``DistributedDataParallel`` with exact gradients, whatever rows and parameters each rank uses::

    rank 0   forward 0 | backward 0 | forward 1 | backward 1                           | finish | update
    rank 1   forward 0 |                        | backward 0                           | finish | update
             no_sync() ........................ | bucket n, ..., bucket 0 --> averages | sum

Buckets are all-reduced by torch's reducer while the last backward runs. The loss, its weight and
failures are one small all-gather of the hosts behind it. The loss is on its way to the host before
that backward is launched, so the host does not wait for the backward.

The reducer waits for every parameter in every backward. A backward reaches the parameters that the
loss was computed from, which may be fewer: a branch was not taken, an output is not in the loss, a
rank has no rows. So the last backward of a step has a zero as a second root, which leads to all
parameters. By hand, outputs are connected to it, and to a leaf of their own, the sentinel::

    parameters ---> module ---> output --+
        |                                +--> _Watch ---> output
        +---> hand_back ---> zero -------+
    sentinel ------+

The backward of ``_Watch`` passes the gradient of each output on, and ``None`` to the zero. So an
unused parameter gets no gradient, but its hook runs, and the reducer goes on. The zero is the
youngest node, so it runs first: buckets of unused parameters wait for nobody.

torch prepares the reducer in a forward, for one backward. Here each backward prepares it, before it
has reached any parameter: a forward may have several backwards, or none. A backward that does not
run the sentinel was asked for some gradients alone (``torch.autograd.grad``, ``inputs=``). The
reducer would wait for the others, so :class:`RequestedGradients` averages these.

The reducer replaces a missing gradient by zeros. So the parameters that have a gradient are
recorded before it runs. Gradients of a :class:`TrainStep` are zeros in the buckets at first, each
with a version counter of its own, which autograd increments. In the first update there are no
buckets yet, and a loop without a step has gradients of its own. A parameter is unused if its
gradient is missing at the end of the backward, is a zero that nothing was added to, or is sparse
and has no elements. Where a rank has unused parameters, the ranks agree on those that nobody has
used, and their ``grad`` is ``None`` again.

Parameters get no hooks that are removed later: torch keeps the empty dictionary, and checks it in
each backward. Two hooks on each of 74 parameters, used once and removed, made all later backwards
of a small model 4 % slower.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Unpack

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..batch.containers import describe, leaves, map_leaves, map_tensors, tensors_in
from ..batch.marks import Along, Arguments, Rows
from ..batch.outputs import PerReplica
from ..batch.rows import move_arguments
from ..loss.copies import Criterion
from ..loss.criterion import DataParallelCriterion
from ..loss.sums import LossSum, Weight, hand_back, run_backward, zero_of
from ..runtime import collectives, torch_private
from ..runtime.devices import is_accelerator
from ..runtime.torch_private import (
    CHILDREN,
    base_of,
    children_of,
    current_backward_id,
    is_differentiable,
    run_after_backward,
    version_of,
)
from ..runtime.values import check_type, set_gradient, set_gradients
from ..training.settings import Settings
from ..training.sync import GradientSync, UpdateSync, gradient_sync
from .ranks import (
    GradientRecord,
    RankModel,
    RankSync,
    RankUpdate,
    RowSettings,
    refuse_graph,
    sparse_weights,
    undone,
    watch_output,
)


class DistributedModel(RankModel, DistributedDataParallel):
    """``DistributedDataParallel`` that returns a list with this rank's output, as
    :class:`DataParallelModel` does.

    Args:
        module: on this rank's device already.
        device: that device.
        criterion: a module whose parameters are reduced with the model's.
        rows: dim, precision and out_dims, as in :class:`DataParallelModel`.
    """

    record: "BucketRecord"

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        criterion: Criterion | None,
        **rows: Unpack[RowSettings],
    ) -> None:
        wrapped = _reduced_module(module, criterion)
        if not any(parameter.requires_grad for parameter in wrapped.parameters()):
            raise ValueError(
                "no parameter of the module requires a gradient, expected one at least: there is nothing to train"
            )
        super().__init__(
            wrapped, process_group=collectives.batch_group(), gradient_as_bucket_view=True
        )
        self._wrapped = [wrapped]  # The list keeps its names out of the state_dict().
        self._sentinel = torch.zeros((), device=device, requires_grad=True)
        self._begin(module)
        self._set_rows(device, **rows)
        self.broadcast_buffers = False  # They are shared after each update.

    def _begin(self, module: nn.Module) -> None:
        """Begins to record the gradients of the reducer, which is a new one."""
        self.module = module
        reduced = self._wrapped[0].parameters()
        self.record = BucketRecord([each for each in reduced if each.requires_grad])
        self._requested = RequestedGradients(self.record.parameters, self.share_by_hand)
        collectives.mark_shared(self.record.parameters)
        self._sparse = [*sparse_weights(module).values()]

    def zero(self, *, reduces: bool = True) -> Tensor:
        """Returns a zero that leads to each reduced parameter.

        Its backward runs their hooks, and gives none a gradient.
        """
        derivatives: list[Tensor | None] = [None] * (len(self.record.parameters) + 1)
        # The reducer waits for hooks of frozen parameters too.
        with _requiring(self.record.parameters, True), torch.enable_grad():
            zero = hand_back(None, derivatives, [*self.record.parameters, self._sentinel])
        node: torch_private.Node = zero.grad_fn
        node.register_prehook(functools.partial(self._begin_backward, derivatives, reduces))
        return zero

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Registers a communication hook, as ``DistributedDataParallel`` does."""
        check_type(
            "hook", hook, Callable, "a function (state, bucket) that returns a torch.futures.Future"
        )

        @functools.wraps(hook)
        def complete(state: object, bucket: object) -> object:
            future = hook(state, bucket)
            if not hasattr(future, "wait"):
                raise TypeError(
                    f"the hook returned {describe(future)}, expected a torch.futures.Future of the bucket's gradients"
                )
            # Collectives of powerSGD_hook would mix with those of the next bucket on gloo.
            future.wait()
            return future

        super().register_comm_hook(state, hook if is_accelerator(self.devices[0]) else complete)

    def join(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises an error: ranks without rows take part in each update, so none has to be waited
        for.
        """
        raise NotImplementedError(
            "join() was called, expected batches without rows from a rank whose rows have ended: all ranks call the model, or "
            "step(...), until the last one has ended"
        )

    def _run(
        self, method: str | None, arguments: Arguments, rows: int | None, *, in_step: bool = False
    ) -> PerReplica:
        module = children_of(self)["module"]  # self.module takes ten times as long.
        function: Callable[..., object] = getattr(module, method or "__call__")
        is_plain = rows and method in self._examples
        row = None if is_plain else self._row_in_place(method, arguments, rows)
        if self.noting is not None and row is None:
            function = functools.partial(self.noting.call, self.module, function)
        forward = torch_private.forward_of_ddp(self)
        with forward, self.precision.autocast(self.devices), self._random_numbers():
            if row is None:
                inputs, kwargs = move_arguments(arguments, self.devices[0])
                output = function(*inputs, **kwargs)
            else:
                output = self._run_without_rows(function, row, arguments, in_step)
            if torch.is_grad_enabled() and not in_step:
                output = watch_output(output, self.zero(reduces=self.require_backward_grad_sync))
        if self.noting is not None:
            return self._open(self.noting, [output], [rows])
        return PerReplica([output], [rows], self.out_dims)

    def _row_in_place(
        self, method: str | None, arguments: Arguments, rows: int | None
    ) -> Arguments | None:
        """Returns a row to run in place of no rows, or None.

        Keeps the first row of a method for that.
        """
        if rows and method not in self._examples:
            self._examples[method] = self._first_row(arguments)
        if rows != 0 or self.meets_ranks:  # Layers that meet ranks wait for this one.
            return None
        return self._examples.get(method) or row_of_ones(arguments, self.dim)

    def _run_without_rows(
        self, function: Callable[..., object], row: Arguments, empty: Arguments, in_step: bool
    ) -> object:
        """Runs a row in place of arguments without rows. Only the structure of the output is left,
        and its way to the arguments.
        """
        inputs, kwargs = row = self._copied_row(row, empty)
        is_chained = any(tensor.requires_grad for tensor in tensors_in(row))
        frozen = self.record.parameters if is_chained else []
        # A forward may call torch.autograd.grad.
        around = undone(self.module, self.devices, advances=not in_step)
        with around, _requiring(frozen, False):
            outputs = PerReplica([function(*inputs, **kwargs)], [1], self.out_dims)

        def connected(tensor: Tensor) -> Tensor:
            if (is_chained and tensor.requires_grad) or not is_differentiable(tensor):
                return tensor
            return tensor.detach().requires_grad_(torch.is_grad_enabled())

        return map_tensors(connected, outputs.narrow(0, 0)[0])

    def _begin_backward(
        self, derivatives: list[Tensor | None], reduces: bool, gradients: tuple[Tensor | None, ...]
    ) -> None:
        """Begins a backward that reaches all parameters, before it has reached any.

        ``derivatives`` are those of the zero.
        """
        is_by_hand = self.record.is_by_hand
        if is_by_hand and not torch_private.will_run(torch_private.accumulator_of(self._sentinel)):
            self._requested.begin(derivatives, functools.partial(self.zero, reduces=reduces))
        elif reduces and self.record.begin_backward():
            if is_by_hand:
                refuse_graph()
                torch_private.skip_missing_gradients(self.record.parameters)
                torch_private.prepare_reduction(self)
                # The reducer's callback comes between these two.
                run_after_backward(lambda: run_after_backward(self._end_by_hand))
            self.begin_sparse_gradients()

    def _end_by_hand(self) -> None:
        self.record.forget_unused()
        self.record.separate_gradients()
        self.share_by_hand()

    def begin_sparse_gradients(self) -> None:
        """Sets empty sparse gradients: the reducer refuses a missing one, as of a rank that has
        counted nothing.
        """
        for weight in self._sparse:
            if weight.grad is None:
                nowhere = torch.empty(1, 0, dtype=torch.long, device=weight.device)
                nothing = weight.new_empty(0, *weight.shape[1:])
                empty = torch.sparse_coo_tensor(
                    nowhere, nothing, weight.shape, check_invariants=True
                )
                set_gradient(weight, empty)

    def __setstate__(self, state: dict[str, Any]) -> None:
        modules = state[CHILDREN]  # The copy is not a module yet.
        module, modules["module"] = modules["module"], state["_wrapped"][0]
        super().__setstate__(state)  # builds a reducer
        self._begin(module)


def _reduced_module(module: nn.Module, criterion: Criterion | None) -> nn.ModuleList:
    """Returns the module that the reducer is built for: the user's module, and the parameters of a
    criterion.
    """
    learned = criterion.parameters() if isinstance(criterion, nn.Module) else ()
    return nn.ModuleList([module, nn.ParameterList(each for each in learned if each.requires_grad)])


class BucketRecord(GradientRecord):
    """The record of a reducer.

    Gradients of a step are in its buckets, which a loop by hand does not know.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters)
        # The buckets of the reducer, which contain nothing but gradients.
        self.buckets: list[Tensor] = []
        # Gradients in the buckets, by the number of the parameter.
        self._places: dict[int, Tensor] = {}
        # Gradients at the beginning of the update, at their places.
        self._zeros: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Begins an update, with gradients of zeros in the buckets, as soon as the reducer has made
        them.
        """
        for bucket in self.buckets:
            bucket.zero_()
        # Each has a version counter of its own.
        self._zeros = {number: place.data for number, place in self._places.items()}
        set_gradients([(self.parameters[number], zero) for number, zero in self._zeros.items()])

    def begin_backward(self) -> bool:
        """Begins the running backward, which reduces. Returns False if it has begun already."""
        if not self.begins_backward():
            return False
        if self.is_by_hand:
            self._zeros = {}
        run_after_backward(self._note)  # The reducer's callback follows. It sets missing gradients.
        return True

    def take_places(self) -> None:
        """Takes the places of the reduced gradients, in the buckets that the reducer keeps."""
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is not None and parameter.grad.layout == torch.strided:
                self._places[number] = parameter.grad
        self.buckets = list(
            {id(bucket): bucket for bucket in map(base_of, self._places.values())}.values()
        )
        self.separate_gradients()

    def separate_gradients(self) -> None:
        """Gives parameters other tensors of the memory in the buckets.

        ``parameter.grad.data = other`` would give the reducer's own tensor other memory.
        """
        gradients = [(parameter, parameter.grad) for parameter in self.parameters]
        set_gradients(
            [
                (parameter, gradient.data)
                for parameter, gradient in gradients
                if gradient is not None and gradient.layout == torch.strided
            ]
        )

    def _note(self) -> None:
        """Notes the parameters that have a gradient, but for zeros that nothing was added to."""
        self.used.clear()
        for number, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None or (
                gradient is self._zeros.get(number) and not version_of(gradient)
            ):
                continue
            if gradient.layout == torch.strided or torch_private.has_elements(gradient):
                self.used.add(number)


class RequestedGradients:
    """Gradients of parameters that a backward was asked for: by ``torch.autograd.grad``, or by
    ``backward(inputs=...)``.

    Each is averaged over the ranks at the end of the backward, in the order of the parameters,
    which is the same on all ranks.
    """

    def __init__(self, parameters: Sequence[Tensor], share_buffers: Callable[[], None]) -> None:
        self._parameters = parameters
        self._share_buffers = share_buffers
        self._backward: int | None = None
        self._hooks = contextlib.ExitStack()

    def begin(self, derivatives: list[Tensor | None], zero: Callable[[], Tensor]) -> None:
        """Waits for the gradients that the running backward makes, once.

        ``derivatives`` are those of a zero of the parameters. They become zeros, so that a rank
        without rows has all of the gradients, too. A backward of the gradients passes another
        ``zero()``, on all ranks.
        """
        backward = current_backward_id()
        if backward == self._backward:
            return
        self._backward = backward
        self._hooks.close()  # A backward before may have failed.
        # This rank's gradient and the place of the average, by the number of the parameter.
        results: dict[int, tuple[Tensor, Tensor]] = {}
        is_accumulated: dict[int, bool | None] = {}
        # A backward of these gradients passes all of them, then the zero, then the parameters.
        behind = [zero()] if torch.is_grad_enabled() else []

        def keep(number: int, gradient: Tensor) -> Tensor | None:
            """Returns the place of the average. Its own derivative is that of this rank."""
            if current_backward_id() != backward:
                return None
            slopes = [torch.ones_like(gradient), *(None for _ in behind)]
            result = hand_back(gradient.detach(), slopes, [gradient, *behind])
            for tensor in (*behind, result) if behind else ():
                torch_private.run_first(tensor.grad_fn)
            results[number] = gradient.detach(), result
            return result

        @torch.no_grad()
        def finish() -> None:
            self._hooks.close()
            derivatives[:] = [None] * len(derivatives)
            for number, (gradient, result) in sorted(results.items()):
                mean = collectives.sum_over_ranks(gradient) / collectives.world_size()
                if is_accumulated[number]:
                    whole = self._parameters[number].grad
                    assert whole is not None
                    whole.add_(mean - gradient)
                else:
                    result.copy_(mean)
            if results:
                self._share_buffers()

        for number, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                is_accumulated[number] = torch_private.will_run(
                    torch_private.accumulator_of(parameter)
                )
                if is_accumulated[number] is not False:
                    derivatives[number] = torch.zeros_like(parameter)
                    self._hooks.enter_context(
                        parameter.register_hook(functools.partial(keep, number))
                    )
        run_after_backward(finish)


class DDPSync(RankSync):
    """Opens updates of a :class:`DistributedModel`."""

    model: DistributedModel

    def open(self) -> UpdateSync:
        """Returns the synchronisation of one update."""
        return DDPUpdate(self, self.model)


class DDPUpdate(RankUpdate):
    """Averages gradients over ranks, in the backward of each rank's last micro-batch.

    They are in the reducer's buckets. A rank that fails takes part in what the others wait for, and
    tells them in the end.
    """

    place = "the module or of the criterion"
    _model: DistributedModel

    def __init__(self, sync: RankSync, model: DistributedModel) -> None:
        super().__init__(model, model.record)
        self._sync = sync
        self._has_begun = False  # A step forgets the gradients before it runs a batch.
        self._is_prepared = False  # The reducer waits for a backward.
        self._is_reduced = False

    def count_micro_batches(self, count: int) -> int:
        """Returns ``count``, or the largest of any rank if each forward waits for every rank."""
        return collectives.max_over_ranks(count) if self._sync.meets_ranks else count

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Keeps gradients on this rank, in the buckets of the reducer, where autograd adds to them."""
        if not self._has_begun:
            self._has_begun = True
            self._model.record.begin()
        no_sync: contextlib.AbstractContextManager[None] = self._model.no_sync()
        return no_sync

    def forwards_without_rows(self, *, is_reduced: bool) -> Iterator[list[Tensor]]:
        """Yields no losses for the reduction of a rank without rows. Its backward has a zero."""
        if not is_reduced:
            yield []

    def backward(self, losses: Sequence[Tensor], divisor: Weight, local: LossSum | None) -> None:
        """Runs the backward. The last one reduces all gradients."""
        if local is None:
            run_backward(losses, divisor)
            return
        self.start(local)
        if not self._has_begun:
            self._model.record.begin()
        torch_private.prepare_reduction(self._model)
        self._is_prepared = True
        self._model.record.run_step(
            functools.partial(run_backward, [*losses, self._model.zero()], divisor)
        )
        self._is_reduced = True

    def finish(self, local: LossSum, settings: Callable[[], Settings]) -> LossSum:
        """Ends the reduction. The first one rebuilds the buckets."""
        whole = super().finish(local, settings)
        if not self._model.record.buckets:
            self._rebuild()
        return whole

    def discard(self, error: BaseException, divide: Callable[[], object] = bool) -> bool:
        """Forgets the gradients of this rank. Rebuilds the buckets if the others do."""
        has_agreed = super().discard(error, divide)
        if has_agreed and not self._model.record.buckets:
            self._rebuild()
        return has_agreed

    def _rebuild(self) -> None:
        """Rebuilds the buckets after the first update. All ranks call this.

        The collectives of this would wait in the next backward, if a rank ran out of memory before.
        """
        torch_private.rebuild_buckets(self._model)
        self._model.record.take_places()

    def tell(self, error: BaseException, *, has_begun: bool, is_single: bool = False) -> None:
        """Tells the other ranks of a failure, unless they wait in a layer."""
        if has_begun and self._sync.meets_ranks:
            return  # The others wait in a layer.
        collectives.tell_failure(error)

    @property
    def others_wait(self) -> bool:
        """True if other ranks wait in a layer."""
        return self._sync.meets_ranks and not self._is_reduced

    def take_part(self, divide: Callable[[], object]) -> None:
        """Takes part in the reduction of the others."""
        if not self._is_prepared:
            with torch.enable_grad():
                divide()
                self.backward([], 1.0, LossSum(torch.zeros(()), 0.0))
        if not self._is_reduced:
            self._model.begin_sparse_gradients()
            # A failed backward has not run hooks that other ranks wait for.
            for parameter in self._model.record.parameters:
                # It has been reached.
                with contextlib.suppress(RuntimeError), _requiring([parameter], True):
                    zero_of(parameter).backward()

    def _forget_gradients(self) -> None:
        super()._forget_gradients()
        # The next backward would wait for ranks that do not.
        if not self._model.record.buckets:
            torch_private.forget_order(self._model)


@gradient_sync.register
def _(model: DistributedModel, criterion: DataParallelCriterion) -> GradientSync:
    return DDPSync(model, criterion)


@contextlib.contextmanager
def _requiring(parameters: Sequence[Tensor], is_required: bool) -> Iterator[None]:
    """Lets all parameters require a gradient, or none of them."""
    changed = [parameter for parameter in parameters if parameter.requires_grad != is_required]
    for parameter in changed:
        parameter.requires_grad_(is_required)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not is_required)


def row_of_ones(arguments: Arguments, dim: int) -> Arguments | None:
    """Returns a row of ones for arguments without rows, or None if they have more than tensors."""
    if any(isinstance(leaf, (Rows, list)) for _, leaf in leaves(arguments)):
        return None

    def ones(leaf: Any, along: int = dim) -> Any:
        if isinstance(leaf, PerReplica):  # Another model returned it.
            return map_leaves(ones, leaf[0])
        if isinstance(leaf, Along):
            return Along(ones(leaf.leaf, leaf.dim), leaf.dim)
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return leaf
        shape = list(leaf.shape)
        shape[along] = 1
        return leaf.new_ones(shape)

    row: Arguments = map_leaves(ones, arguments)
    return row
