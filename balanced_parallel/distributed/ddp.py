"""``DistributedModel``: torch's ``DistributedDataParallel``, with the list of outputs that the replicas of one process return."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..batch.dims import Dims
from ..batch.nested import map_leaves
from ..batch.per_replica import PerReplica
from ..batch.row_marks import Arguments
from ..batch.rows import count_rows, move_leaves
from ..loss.partial_sums import Criterion
from ..replicas.model import mark_inputs
from ..replicas.module_checks import check_method
from ..replicas.sync_batchnorm import meets_other_ranks
from ..runtime.modules import children_of
from ..runtime.precision import Precision
from ..runtime.random_numbers import cpu_numbers_of_rank, offset_seeds
from .absent_rows import first_row, row_of_ones, undone
from .unused_parameters import connect, zero_of_parameters

__all__: list[str] = []


class DistributedModel(DistributedDataParallel):
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
        self._meets_ranks = meets_other_ranks(module.modules())
        self._examples: dict[Any, Arguments] = {}  # one row for each method
        self.module = module
        self.devices = [device]
        self.split = None
        self.dim = dim
        self.in_dims = in_dims
        self.out_dims = dim if out_dims is None else out_dims
        self.precision = Precision("fp32" if precision is None else precision)

    @property
    def reduced_parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are reduced: those of the module and of the criterion."""
        return self._wrapped[0].trained

    @property
    def sparse_parameters(self) -> list[Tensor]:
        """The weights of embeddings with sparse gradients."""
        return self._wrapped[0].sparse

    def forward(self, *inputs: Any, **kwargs: Any) -> PerReplica:
        """Runs the module on this rank's rows. Returns a list with its output."""
        return self._run(None, self.mark(Arguments(inputs, kwargs)))

    def call(self, method: str, /, *inputs: Any, **kwargs: Any) -> PerReplica:
        """Calls another method of the module than ``forward``, with its gradients reduced as those of a forward."""
        check_method(self.module, method)
        return self._run(method, self.mark(Arguments(inputs, kwargs), method))

    def mark(self, arguments: Arguments, method: str | None = None) -> Arguments:
        """Returns the arguments with the dimensions of their rows, as ``in_dims`` gives them."""
        return mark_inputs(arguments, self.in_dims, self.module, method)

    def begin_update(self) -> None:
        """Makes the next forward share the buffers of rank 0 again, with or without rows."""
        self._has_shared_buffers = False
        self.require_forward_param_sync = True  # torch has unset it if the last forward had no graph

    def forward_without_rows(self) -> Tensor:
        """Takes part in a reduction without running the module. Returns a zero to run backward from."""
        self.require_forward_param_sync = not self._has_shared_buffers
        self._begin_sparse_gradients()
        with self._as_wrapped():
            super().forward(lambda: None, True)
        return zero_of_parameters(self.reduced_parameters)

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

        super().register_comm_hook(state, complete if self.devices[0].type == "cpu" else hook)
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
            self._examples[method] = first_row(arguments, rows, self.dim)
        if rows == 0 and not self._meets_ranks:  # whose layers wait for this rank
            example = self._examples.get(method) or row_of_ones(arguments, self.dim)
            arguments = example or arguments
        inputs, kwargs = move_leaves(arguments.inputs, self.devices[0]), move_leaves(arguments.kwargs, self.devices[0])
        self._refuse_unfrozen()
        offset_seeds(self.devices, dist.get_rank())
        draws_on_cpu = self.training and self.devices[0].type == "cpu"
        random_numbers = cpu_numbers_of_rank(dist.get_rank()) if draws_on_cpu else contextlib.nullcontext()
        if self.require_backward_grad_sync:
            self._begin_sparse_gradients()
        children, module = children_of(self), self.module  # assigning self.module takes ten times as long as its entry

        def call() -> Any:
            children["module"] = module  # as code inside of the function knows it
            self._has_shared_buffers = True
            if example is None:
                return function(*inputs, **kwargs)
            with undone(module, self.devices), torch.no_grad():
                outputs = PerReplica([function(*inputs, **kwargs)], [1], self.out_dims)
            return map_leaves(_with_gradient, outputs.narrow(0, 0)[0])

        with self.precision.autocast(self.devices), random_numbers, self._as_wrapped() as wrapped:
            super().forward(call, self.require_backward_grad_sync)
        return PerReplica.of_forward([wrapped.take_output()], [rows], self.out_dims)

    @contextlib.contextmanager
    def _as_wrapped(self) -> Iterator["_Wrapped"]:
        """Makes ``DistributedDataParallel`` run the module that its reducer was built for."""
        children = children_of(self)
        before, children["module"] = children["module"], self._wrapped[0]
        try:
            yield self._wrapped[0]
        finally:
            children["module"] = before

    def _begin_sparse_gradients(self) -> None:
        """Sets empty sparse gradients: the reducer refuses a missing one, as of a rank that has counted nothing."""
        for weight in self.sparse_parameters if torch.is_grad_enabled() else ():
            if weight.grad is None:
                nowhere = torch.empty(1, 0, dtype=torch.long, device=weight.device)
                nothing = weight.new_empty(0, *weight.shape[1:])
                weight.grad = torch.sparse_coo_tensor(nowhere, nothing, weight.shape, check_invariants=True)

    def _refuse_unfrozen(self) -> None:
        for name in [name for name, parameter in self._frozen.items() if parameter.requires_grad]:
            raise ValueError(
                f"{name} requires a gradient now, which it did not when parallelize was called, so the ranks would not share "
                "it: call parallelize again"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        modules = state["_modules"]  # of the copy, which is not a module yet
        module, modules["module"] = modules["module"], state["_wrapped"][0]
        super().__setstate__(state)  # builds a reducer
        self.module = module


def _with_gradient(leaf: Any) -> Any:
    is_float = isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
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
        self._output: Any = None

    def forward(self, function: Callable[[], Any], reduces: bool) -> "_Reached":
        """Calls ``function`` inside of the forward of ``DistributedDataParallel``, and keeps its output.

        Args:
            function: returns the output.
            reduces: the gradients of this forward's backward are reduced.
        """
        self._output, zero = function(), None
        if reduces and torch.is_grad_enabled():
            self._output, zero = connect(self._output, self.trained)
        return _Reached(zero)

    def take_output(self) -> Any:
        """Returns the output of the last forward, and forgets it."""
        output, self._output = self._output, None
        return output


@dataclass
class _Reached:
    """The tensor in which ``DistributedDataParallel`` looks for parameters that the output does not use.

    Outputs are not in it: they would be copied (``DistributedDataParallel._set_ddp_sink_clone``)."""

    zero: Tensor | None
