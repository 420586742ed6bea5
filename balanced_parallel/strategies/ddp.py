"""``DistributedDataParallel`` with exact gradients, whatever rows and parameters each rank uses.

    rank 0   forward 0 | backward 0 | forward 1 | backward 1                          | finish | update
    rank 1   forward 0 |                        | backward 0                          | finish | update
                        no_sync() .............. bucket n, ..., bucket 0 ---> averages  sum

Buckets are all-reduced by torch's reducer while the last backward runs. The loss, its weight and failures are one small
all-reduce of the hosts behind it. The loss is on its way to the host before that backward is launched, so the host does not wait
for the backward.

The reducer waits for every parameter in every backward. A backward reaches the parameters that the loss was computed from, which
may be fewer: a branch was not taken, an output is not in the loss, a rank has no rows. So outputs are connected to all
parameters::

    parameters ---> module ---> output --+
        |                                +--> _Connect ---> output
        +---> _Zero ---> zero -----------+

The backward of ``_Connect`` passes the gradient of each output on, and ``None`` to the zero. So an unused parameter gets no
gradient, but its hook runs, and the reducer goes on. ``_Zero`` is the youngest node behind the outputs, so it runs first: buckets
of unused parameters wait for nobody.

Many modules refuse inputs without rows, such as ``nn.InstanceNorm2d`` and attention with a mask. A rank without rows runs one row
in their place, and nothing of it is left but the structure of the output.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..batch.containers import Dims, leaves, map_leaves
from ..batch.outputs import PerReplica
from ..batch.rows import Along, Arguments, MicroBatch, Rows, count_rows, cut, move_leaves
from ..loss.criterion import DataParallelCriterion
from ..loss.sums import Criterion, LossSum, Weight, add_up, zero_of
from ..replicas.batchnorm import meets_other_ranks
from ..replicas.model import mark_inputs
from ..replicas.module_tree import check_method
from ..runtime import collectives, devices, torch_private
from ..runtime.devices import is_accelerator
from ..runtime.random_numbers import RandomState, cpu_numbers_of_rank, offset_seeds
from ..runtime.torch_private import CHILDREN, base_of, children_of, is_differentiable, reached_leaves, versions
from ..runtime.values import Precision
from ..training.accumulation import is_one, power_of_two
from ..training.strategy import GradientSync, Settings, gradient_sync, run_backward

__all__: list[str] = []


class RankModel(nn.Module):
    """The model of one rank. It returns a list with this rank's output, as :class:`DataParallelModel` does."""

    module: nn.Module

    def _set_rows(self, device: torch.device, dim: int, precision: str | Precision | None, in_dims: Dims, out_dims: Dims) -> None:
        self.devices = [device]
        self.split = None
        self.dim = dim
        self.in_dims = in_dims
        self.out_dims = dim if out_dims is None else out_dims
        self.precision = Precision("fp32" if precision is None else precision)
        self._meets_ranks = meets_other_ranks(self.module.modules())
        self._examples: dict[str | None, Arguments | None] = {}  # one row for each method

    def forward(self, *inputs: Any, **kwargs: Any) -> PerReplica:
        """Runs the module on this rank's rows. Returns a list with its output."""
        if inputs and type(inputs[0]) is MicroBatch:
            return self._run(None, inputs[0].shards[0].inputs)
        return self._run(None, self.mark(Arguments(inputs, kwargs)))

    def call(self, method: str, /, *inputs: Any, **kwargs: Any) -> PerReplica:
        """Calls another method of the module than ``forward``, with its parameters and gradients shared as those of a forward."""
        check_method(self.module, method)
        return self._run(method, self.mark(Arguments(inputs, kwargs), method))

    def mark(self, arguments: Arguments, method: str | None = None) -> Arguments:
        """Returns the arguments with the dimensions of their rows, as ``in_dims`` gives them."""
        return mark_inputs(arguments, self.in_dims, self.module, method)

    def _run(self, method: str | None, arguments: Arguments) -> PerReplica:
        raise NotImplementedError

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Draws random numbers of this rank, under autocast."""
        offset_seeds(self.devices, collectives.rank())
        draws_on_cpu = self.training and not is_accelerator(self.devices[0])
        random_numbers = cpu_numbers_of_rank(collectives.rank()) if draws_on_cpu else contextlib.nullcontext()
        with self.precision.autocast(self.devices), random_numbers:
            yield


class DistributedModel(RankModel, DistributedDataParallel):
    """``DistributedDataParallel`` that returns a list with this rank's output, as :class:`DataParallelModel` does.

    Every output of a forward whose gradients are reduced is connected to every parameter, by a zero that has no gradient. So
    a backward through any output, whatever the loss is, reaches each parameter exactly once, and no bucket of the reducer
    waits for a parameter that a rank has not used. ``find_unused_parameters=True`` makes the reducer agree on the parameters
    that no rank has used. Their ``grad`` stays ``None``.

    Args:
        module: on this rank's device already.
        device: that device.
        dim: the dimension of the rows in the inputs.
        precision: autocast around the forward; ``None`` keeps the caller's.
        criterion: a module whose parameters are reduced with the model's.
        in_dims, out_dims: as in :class:`DataParallelModel`.

    Raises:
        ValueError: no parameter requires a gradient; at the forward, a parameter that was frozen here requires one.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        dim: int = 0,
        precision: str | Precision | None = None,
        criterion: Criterion | None = None,
        in_dims: Dims = None,
        out_dims: Dims = None,
    ) -> None:
        wrapped = _Wrapped(module, criterion)
        if not wrapped.trained:
            raise ValueError("no parameter of the module requires a gradient, expected one at least: there is nothing to train")
        super().__init__(wrapped, gradient_as_bucket_view=True, find_unused_parameters=True)
        self._wrapped = [wrapped]  # in a list, so that the state_dict() has the names of the module alone
        self._frozen = {name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad}
        self._has_shared_buffers = False  # in the first forward of this update
        self.module = module
        self._set_rows(device, dim, precision, in_dims, out_dims)

    @property
    def reduced_parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are reduced: those of the module and of the criterion."""
        return self._wrapped[0].trained

    @property
    def sparse_parameters(self) -> list[Tensor]:
        """The weights of embeddings with sparse gradients."""
        return self._wrapped[0].sparse

    def begin_update(self) -> None:
        """Makes the next forward share the buffers of rank 0 again, with or without rows."""
        self._has_shared_buffers = False
        self.require_forward_param_sync = True  # torch has unset it if the last forward had no graph

    def forward_without_rows(self) -> Tensor:
        """Takes part in a reduction without running the module. Returns a zero to run backward from."""
        self.require_forward_param_sync = not self._has_shared_buffers
        self._begin_sparse_gradients()
        with self._as_wrapped():
            zero_of_all = functools.partial(zero_of_parameters, self.reduced_parameters)
            DistributedDataParallel.forward(self, zero_of_all if torch.is_grad_enabled() else lambda: None)
        return zero_of_all()

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Registers a communication hook, as ``DistributedDataParallel`` does."""

        @functools.wraps(hook)
        def complete(state: Any, bucket: Any) -> Any:
            """Waits for a hook of several collectives: on gloo's threads, they would mix with those of the reducer, in another
            order on each rank (``powerSGD_hook`` with ``find_unused_parameters``).
            """
            future = hook(state, bucket)
            future.wait()
            return future

        super().register_comm_hook(state, hook if is_accelerator(self.devices[0]) else complete)
        if getattr(hook, "__name__", "") == "batched_powerSGD_hook":
            warnings.warn(
                "batched_powerSGD_hook was given: torch raises an AssertionError without a message where it begins to compress, "
                "from step start_powerSGD_iter on (https://github.com/pytorch/pytorch/pull/75157); use powerSGD_hook",
                stacklevel=2,
            )

    def compress_gradients(self, name: str) -> None:
        """Reduces gradients in ``"bf16"`` or ``"fp16"``, by torch's communication hooks."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        compress = getattr(default_hooks, f"{name}_compress_hook")
        # a function of another name: torch refuses bf16_compress_hook without NCCL, but gloo sums bfloat16 as well
        self.register_comm_hook(None, lambda group, bucket: compress(group, bucket))

    def _run(self, method: str | None, arguments: Arguments) -> PerReplica:
        function: Callable[..., Any] = self.module if method is None else getattr(self.module, method)
        rows, example = count_rows(arguments, self.dim), None
        if rows and method not in self._examples:
            self._examples[method] = first_row(arguments, self.dim)
        if rows == 0 and not self._meets_ranks:  # whose layers wait for this rank
            example = self._examples.get(method) or row_of_ones(arguments, self.dim)
            arguments = example or arguments
        inputs, kwargs = move_leaves(arguments.inputs, self.devices[0]), move_leaves(arguments.kwargs, self.devices[0])
        for name in [name for name, parameter in self._frozen.items() if parameter.requires_grad]:
            raise ValueError(
                f"{name} requires a gradient now, which it did not when parallelize was called, so the ranks would not share "
                "it: call parallelize again"
            )
        if self.require_backward_grad_sync:
            self._begin_sparse_gradients()
        children, module = children_of(self), self.module  # assigning self.module takes ten times as long as its entry
        outputs: list[Any] = []

        def call() -> Tensor | None:
            children["module"] = module  # as code inside of the function knows it
            self._has_shared_buffers = True
            if example is None:
                output, zero = function(*inputs, **kwargs), None
            else:
                with undone(module, self.devices), torch.no_grad():
                    row = PerReplica([function(*inputs, **kwargs)], [1], self.out_dims)
                output, zero = map_leaves(_with_gradient, row.narrow(0, 0)[0]), None
            if self.require_backward_grad_sync and torch.is_grad_enabled():
                output, zero = connect(output, self.reduced_parameters)
            outputs.append(output)
            return zero

        with self._computing(), self._as_wrapped():
            DistributedDataParallel.forward(self, call)
        return PerReplica(outputs, [rows], self.out_dims)

    @contextlib.contextmanager
    def _as_wrapped(self) -> Iterator[None]:
        """Makes ``DistributedDataParallel`` run the module that its reducer was built for."""
        children = children_of(self)
        before, children["module"] = children["module"], self._wrapped[0]
        try:
            yield
        finally:
            children["module"] = before

    def _begin_sparse_gradients(self) -> None:
        """Sets empty sparse gradients: the reducer refuses a missing one, as of a rank that has counted nothing."""
        for weight in self.sparse_parameters if torch.is_grad_enabled() else ():
            if weight.grad is None:
                nowhere = torch.empty(1, 0, dtype=torch.long, device=weight.device)
                nothing = weight.new_empty(0, *weight.shape[1:])
                weight.grad = torch.sparse_coo_tensor(nowhere, nothing, weight.shape, check_invariants=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        modules = state[CHILDREN]  # of the copy, which is not a module yet
        module, modules["module"] = modules["module"], state["_wrapped"][0]
        super().__setstate__(state)  # builds a reducer
        self.module = module


def _with_gradient(leaf: Any) -> Any:
    is_float = isinstance(leaf, Tensor) and is_differentiable(leaf)
    return leaf.detach().requires_grad_() if is_float and torch.is_grad_enabled() else leaf


class _Wrapped(nn.Module):
    """The module that the reducer is built for: the user's module, and the parameters of a criterion."""

    def __init__(self, module: nn.Module, criterion: Criterion | None) -> None:
        super().__init__()
        learned = criterion.parameters() if isinstance(criterion, nn.Module) else ()
        self.inner = module
        self.of_criterion = nn.ParameterList(parameter for parameter in learned if parameter.requires_grad)
        self.trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        embeddings = [part for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse]
        self.sparse = [embedding.weight for embedding in embeddings if embedding.weight.requires_grad]

    def forward(self, function: Callable[[], Tensor | None]) -> Tensor | None:
        """Calls ``function`` inside of the forward of ``DistributedDataParallel``.

        The result is a zero, in which that looks for the parameters of the backward. It would copy outputs.
        """
        return function()


class RankSync(GradientSync):
    """Loss and weight of a rank, on their way to those of all ranks."""

    def __init__(self, group: collectives.Group = None) -> None:
        self._group, self._ranks = group, collectives.world_size(group)
        self._local: Callable[[], Tensor] | None = None  # returns loss and weight of this rank, on the host

    def start(self, local: LossSum) -> None:
        """Starts to copy loss and weight to the host."""
        weight = add_up([0.0 if local.weight is None else local.weight], local.total.device).double()
        self._local = devices.start_copy(torch.stack([local.total.double(), weight]))

    def smallest(self, number: float) -> float:
        """Returns the smallest ``number`` of all ranks."""
        return -collectives.max_over_ranks(-number, self._group)


def divisor_of_ranks(expected: Weight, before: float, in_float16: bool, device: torch.device, group: collectives.Group) -> Weight:
    """Returns a power of two near the weight of the update before. It is the same on all ranks.

    In the first update it is 1. With float16 it is near the weight that all ranks expect: they exchange it once.
    """
    if before or not in_float16:
        return float(power_of_two(before))
    whole = collectives.sum_over_ranks(add_up([expected], device).double(), group)
    return power_of_two(float(whole) if whole.is_cpu else whole)


def refuse_unshared(tensors: Iterable[Tensor], place: str) -> None:
    """Raises ``ValueError`` for a parameter of the optimizer that is not reduced. It should be part of ``place``."""
    for parameter in tensors:
        raise ValueError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} with a gradient that the ranks would not share: "
            f"make it part of {place} that parallelize is given"
        )


class DDPSync(RankSync):
    """Averages gradients over ranks, in the backward of each rank's last micro-batch.

    While micro-batches accumulate, gradients lie in the reducer's buckets already: they exist once in memory.
    """

    def __init__(self, model: DistributedModel) -> None:
        super().__init__(model.process_group)
        self._model = model
        self._meets_ranks = meets_other_ranks(model.modules())
        self._reduced = {id(parameter): parameter for parameter in model.reduced_parameters}
        self._bucket_views: dict[int, Tensor] = {}  # by the id of the parameter
        self._buckets: list[Tensor] = []
        self._has_begun = False  # an accumulation
        self._untouched: Sequence[Tensor] = []  # zeros so far, in an accumulation
        self._is_reducing = False  # other ranks wait for this one
        self._failures = 0, 0  # numbers of ranks, by the agreement of this update: out of memory, for another reason
        self._is_agreed = self._is_abandoned = False

    def __reduce__(self) -> Any:  # a copy has no gradients
        return DDPSync, (self._model,)

    def begin(self) -> None:
        """Begins an update."""
        self._is_agreed = self._is_abandoned = False
        self._model.begin_update()

    def count_micro_batches(self, count: int) -> int:
        """Returns ``count``, or the largest of any rank if layers of the model wait for every rank in each forward."""
        return collectives.max_over_ranks(count, self._group) if self._meets_ranks else count

    def divisor(self, expected: Weight, before: float, in_float16: bool) -> Weight:
        """Returns a power of two near the mean weight of a rank, as :func:`divisor_of_ranks` does."""
        return divisor_of_ranks(expected, before, in_float16, self._model.devices[0], self._group) / self._ranks

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keeps gradients on this rank."""
        if not self._has_begun:
            self._accumulate_in_buckets()
        with self._model.no_sync():
            yield

    def forwards_without_rows(self, *, is_reduced: bool) -> Iterator[list[Tensor]]:
        """Takes part in the last forward of the ranks that have rows: buffers are broadcast."""
        if not is_reduced:
            yield [self._model.forward_without_rows()]

    def backward(self, losses: Sequence[Tensor], divisor: Weight, *, last: bool) -> None:
        """Runs one backward. The last one completes the reduction, whatever this rank has used."""
        if not last:
            run_backward(losses, divisor)
            self._keep_reached(losses)
            return
        self._has_begun, self._is_reducing = False, True
        if self._is_abandoned:
            self._set_zero_gradients()
        self._forget_untouched()
        roots = [loss for loss in losses if loss.requires_grad]
        run_backward(roots or [zero_of_parameters(self._model.reduced_parameters)], divisor)
        if len(self._bucket_views) < len(self._reduced):
            self._remember_buckets()

    def finish(self, local: LossSum, settings: Settings) -> LossSum:
        """Returns loss and weight of all ranks. The host waits for them, but not for the backward.

        Raises:
            torch.OutOfMemoryError: another rank is out of memory.
            RuntimeError: the last backward of another rank has failed for another reason.
            ValueError: the ranks have different settings.
        """
        assert self._local is not None
        total, weight, *digests = self._agree(self._local(), settings.digest(), out_of_memory=self._is_abandoned)
        self._refuse_failures()
        settings.check(*digests)
        return LossSum(torch.full_like(local.total, total), weight)

    def multiply(self, tensors: Sequence[Tensor], factor: Weight) -> None:
        """Multiplies the reduced gradients, and by the number of ranks: the reducer averages.

        Raises:
            ValueError: one of ``tensors`` has a gradient that is not reduced.
        """
        factor = factor * self._ranks
        gradients = {id(tensor): tensor.grad for tensor in tensors if tensor.grad is not None}
        strangers = [tensor for tensor in tensors if id(tensor) in gradients.keys() - self._reduced]
        refuse_unshared(strangers, "the module or of the criterion")
        if not is_one(factor):
            others = [gradient for key, gradient in gradients.items() if key not in self._bucket_views]
            torch_private.foreach_multiply_([*self._buckets, *others], factor)

    def abandon(self) -> bool:
        """Makes :meth:`finish` tell the other ranks that this one is out of memory, unless they know."""
        if self._is_agreed:
            self._refuse_failures(but_memory=True)
        self._is_abandoned = not self._is_agreed
        return self._is_abandoned

    def discard(self, *, out_of_memory: bool = False) -> None:
        """Forgets the gradients that this rank has accumulated. If other ranks wait for them, it tells them of the failure.

        Ranks that wait in the backward of a synchronised layer cannot be told. They fail when this process ends.
        """
        if self._is_reducing and not self._meets_ranks:
            self._complete()
            self._agree(torch.zeros(2, dtype=torch.float64), [0.0, 0.0], out_of_memory=out_of_memory, others=not out_of_memory)
        self._local, self._untouched, self._has_begun, self._is_reducing = None, [], False, False
        for parameter in self._model.reduced_parameters:
            parameter.grad = None

    def _agree(
        self, local: Tensor, digest: list[float], *, out_of_memory: bool = False, others: bool = False
    ) -> tuple[float, float, float, float]:
        """Returns the sums of loss, weight and digests over all ranks, and counts failures."""
        self._is_reducing, self._is_agreed = False, True
        self._model.begin_update()
        numbers = torch.cat([local, local.new_tensor([*digest, out_of_memory, others])])
        total, weight, digests, squares, memory_failures, failures = collectives.sum_over_ranks(numbers, self._group).tolist()
        self._failures = int(memory_failures), int(failures)
        return total, weight, digests, squares

    def _refuse_failures(self, *, but_memory: bool = False) -> None:
        ranks, (out_of_memory, others) = collectives.world_size(self._group), self._failures
        last = "expected none: nothing was updated, and the step can be repeated"
        if others:
            raise RuntimeError(f"{others} of {ranks} ranks failed in the backward, {last}")
        if out_of_memory and not but_memory:
            raise torch.OutOfMemoryError(f"{out_of_memory} of {ranks} ranks ran out of memory, {last}")

    def _set_zero_gradients(self) -> None:
        """Sets all gradients. The reducer refuses a missing one that a backward of this update has had before its failure."""
        self._accumulate_in_buckets()
        self._untouched, sparse = [], {id(weight) for weight in self._model.sparse_parameters}
        for key, parameter in self._reduced.items():
            if parameter.grad is None and key not in sparse:
                parameter.grad = torch.zeros_like(parameter)

    def _accumulate_in_buckets(self) -> None:
        """Sets missing gradients to zeros in the buckets of the reducer, where autograd adds to them.

        The views are those of the previous update. ``data`` gives each its own version counter. A gradient whose version stays 0
        was not touched.
        """
        missing = [tensor for key, tensor in self._reduced.items() if key in self._bucket_views and tensor.grad is None]
        views = [self._bucket_views[id(parameter)] for parameter in missing]
        torch_private.foreach_zero_(self._buckets if len(missing) == len(self._bucket_views) else views)
        for parameter, view in zip(missing, views, strict=True):
            parameter.grad = view.data
        self._untouched, self._has_begun = missing, True

    def _remember_buckets(self) -> None:
        """Keeps the views that the reducer has set as gradients, and their buckets.

        A bucket contains nothing else, so one operation changes all of its gradients."""
        for key, parameter in self._reduced.items():
            if key not in self._bucket_views and parameter.grad is not None and parameter.grad.layout == torch.strided:
                self._bucket_views[key] = parameter.grad
        self._buckets = list({id(bucket): bucket for bucket in map(base_of, self._bucket_views.values())}.values())

    def _forget_untouched(self) -> None:
        """Sets gradients of parameters that no micro-batch has used to None. The reducer then decides over all ranks."""
        for parameter in self._find_untouched():
            parameter.grad = None
        self._untouched = []

    def _find_untouched(self) -> list[Tensor]:
        gradients = [parameter.grad for parameter in self._untouched]
        views = [self._bucket_views[id(parameter)] for parameter in self._untouched]
        counters = versions([view if gradient is None else gradient for gradient, view in zip(gradients, views, strict=True)])
        return [parameter for parameter, version in zip(self._untouched, counters, strict=True) if version == 0]

    def _keep_reached(self, losses: Sequence[Tensor]) -> None:
        """Keeps zeros of parameters that a backward has reached without a gradient: the reducer takes them for used."""
        self._untouched = self._find_untouched()
        if self._untouched:
            reached = reached_leaves(losses)
            self._untouched = [parameter for parameter in self._untouched if id(parameter) not in reached]

    def _complete(self) -> None:
        """Runs the hooks of parameters that a failed backward has not reached. Other ranks wait for them."""
        for parameter in self._model.reduced_parameters:
            with contextlib.suppress(RuntimeError):  # it has been reached
                zero_of_parameters([parameter]).backward()


@gradient_sync.register
def _(model: DistributedModel, criterion: DataParallelCriterion) -> GradientSync:
    return DDPSync(model)


def connect(output: Any, parameters: Sequence[Tensor]) -> tuple[Any, Tensor]:
    """Returns the output connected to the parameters, and a zero that leads to each of them.

    Args:
        output: a tensor or a structure of tensors. Tensors without a gradient stay as they are.
        parameters: frozen ones among them are left out.
    """
    zero = zero_of_parameters(parameters)
    tensors = [leaf for _, leaf in leaves(output) if _has_gradient(leaf)]
    if not tensors:
        return output, zero
    connected = iter(_Connect.apply(zero, *tensors))
    return map_leaves(lambda leaf: next(connected) if _has_gradient(leaf) else leaf, output), zero


def zero_of_parameters(parameters: Sequence[Tensor]) -> Tensor:
    """Returns a zero that leads to each parameter. Its backward runs their hooks, and gives none a gradient."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    with torch.enable_grad():
        return zero_of(*trained) if trained else torch.zeros(())


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class _Connect(torch.autograd.Function):
    """The identity over several tensors, of which one is not returned."""

    @staticmethod
    def forward(ctx: Any, zero: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)  # not views, which must not be written to in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *gradients


def first_row(arguments: Arguments, dim: int) -> Arguments:
    """Returns a copy of the first row."""
    return copied(cut(arguments, [range(1)], dim)[0])


def copied(arguments: Arguments) -> Arguments:
    """Returns copies of the tensors, without their history."""
    result: Arguments = map_leaves(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, arguments)
    return result


def row_of_ones(arguments: Arguments, dim: int) -> Arguments | None:
    """Returns a row of ones for arguments without rows, or None if they have more than tensors."""
    if any(isinstance(leaf, (Rows, list)) for _, leaf in leaves(arguments)):
        return None

    def ones(leaf: Any, along: int = dim) -> Any:
        if isinstance(leaf, Along):
            return Along(ones(leaf.leaf, leaf.dim), leaf.dim)
        is_tensor = isinstance(leaf, Tensor) and leaf.dim() > 0
        return (
            leaf.new_ones([1 if at == along % leaf.dim() else size for at, size in enumerate(leaf.shape)]) if is_tensor else leaf
        )

    row: Arguments = map_leaves(ones, arguments)
    return row


@contextlib.contextmanager
def undone(module: nn.Module, devices: Sequence[torch.device]) -> Iterator[None]:
    """Undoes what a forward changes: random numbers, and buffers, which are replaced by copies in the block."""
    random_numbers = RandomState(devices)
    buffers = [(part, name, buffer) for part in module.modules() for name, buffer in part.named_buffers(recurse=False)]
    for part, name, buffer in buffers:
        setattr(part, name, buffer.clone())
    try:
        yield
    finally:
        random_numbers.restore()
        for part, name, buffer in buffers:
            setattr(part, name, buffer)
