"""``DistributedModel``: torch's ``DistributedDataParallel``, with the list of outputs that the replicas of one process give."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..batch.dims import Dims
from ..batch.per_replica import PerReplica
from ..batch.row_marks import Arguments
from ..batch.rows import count_rows, move_leaves
from ..loss.partial_sums import Criterion
from ..replicas.model import check_method, mark_inputs
from ..runtime.precision import Precision
from .ddp_sync import Completion, zero_leading_to

__all__: list[str] = []


class DistributedModel(DistributedDataParallel):
    """``DistributedDataParallel`` that returns a list with this rank's output, as :class:`DataParallelModel` does, and that
    can reduce gradients for a rank which has no rows to run, or no longer.

    Args:
        module: on this rank's device already.
        device: that device.
        dim: the dimension of the rows in the inputs.
        precision: autocast around the forward; ``None`` is the caller's.
        criterion: a module whose parameters are reduced with the model's.
        in_dims, out_dims: as in :class:`DataParallelModel`.
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
        learned = criterion.parameters() if isinstance(criterion, nn.Module) else ()
        beside = nn.ParameterList(parameter for parameter in learned if parameter.requires_grad)
        reduced = [parameter for parameter in nn.ModuleList([module, beside]).parameters() if parameter.requires_grad]
        if not reduced:
            raise ValueError("no parameter of the module requires a gradient, expected one at least: there is nothing to train")
        completion = Completion(reduced)
        whole = nn.ModuleList([nn.ParameterList([completion.totals]), module, beside])  # what comes first is in the last bucket
        super().__init__(whole, gradient_as_bucket_view=True)
        self.completion = completion
        self.completion.attach(self)
        self._whole = [whole]  # what the reducer knows, in a list so that it is no submodule
        self._frozen = {name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad}
        self.module = module
        self.devices = [device]
        self.split = None
        self.dim = dim
        self.in_dims = in_dims
        self.out_dims = dim if out_dims is None else out_dims
        self.precision = Precision("fp32" if precision is None else precision)

    def forward(self, *inputs: Any, **kwargs: Any) -> PerReplica:
        return self._run(self.mark(Arguments(inputs, kwargs)))

    def call(self, method: str, /, *inputs: Any, **kwargs: Any) -> PerReplica:
        """Calls another method of the module than ``forward``, its gradients reduced as those of a forward."""
        check_method(self.module, method)
        arguments = self.mark(Arguments(inputs, kwargs), method)
        with self._standing_in(_Method(self.module, method)):
            return self._run(arguments)

    def mark(self, arguments: Arguments, method: str | None = None) -> Arguments:
        """The arguments with what ``in_dims`` says about their rows."""
        return mark_inputs(arguments, self.in_dims, self.module, method)

    def _run(self, arguments: Arguments) -> PerReplica:
        rows = count_rows(arguments, self.dim)
        inputs, kwargs = move_leaves(arguments.inputs, self.devices[0]), move_leaves(arguments.kwargs, self.devices[0])
        # while micro-batches accumulate the reducer has nothing to do, and buffers are synchronised only before the first
        synchronises = self.require_backward_grad_sync or (self.require_forward_param_sync and self.modules_buffers)
        run = super().forward if synchronises else self.module
        for name in [name for name, parameter in self._frozen.items() if parameter.requires_grad]:
            raise ValueError(
                f"{name} requires a gradient now, which it did not where parallelize was called, so the ranks would not share "
                "it: call parallelize again"
            )
        with self.precision.autocast(self.devices):
            output = run(*inputs, **kwargs)
        if self.require_backward_grad_sync:
            self.completion.begin_sparse_gradients()
            self.completion.follow(output)
        return PerReplica.of_forward([output], [rows], self.out_dims)

    def forward_nothing(self) -> torch.Tensor:
        """A forward without the module: a zero that leads to every parameter, and whose backward hands none a gradient. The
        reducer then has what was accumulated."""
        self.completion.begin_sparse_gradients()
        with self._standing_in(_Skipped(self.module)):
            super().forward()
        return zero_leading_to(self.completion.parameters)

    @contextlib.contextmanager
    def _standing_in(self, module: nn.Module) -> Iterator[None]:
        """Makes a forward of ``DistributedDataParallel`` run ``module``, which holds the one that the reducer knows."""
        before, self.module = self.module, module
        try:
            yield
        finally:
            self.module = before

    def __setstate__(self, state: dict[str, Any]) -> None:
        modules = state["_modules"]
        module, modules["module"] = modules["module"], state["_whole"][0]
        super().__setstate__(state)  # builds a reducer
        self.module = module

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        super().register_comm_hook(state, hook)
        self.completion.has_hook = True
        if getattr(hook, "__name__", "") == "batched_powerSGD_hook":
            warnings.warn(
                "batched_powerSGD_hook was given: torch raises an AssertionError without a message where it begins to compress, "
                "from step start_powerSGD_iter on (https://github.com/pytorch/pytorch/pull/75157); use powerSGD_hook",
                stacklevel=2,
            )


class _Skipped(nn.Module):
    """Stands in for the module in a forward without rows; its buffers are still synchronised."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.skipped = module

    def forward(self) -> None:
        return None


class _Method(nn.Module):
    """Stands in for the module in a call of another method than its ``forward``."""

    def __init__(self, module: nn.Module, method: str) -> None:
        super().__init__()
        self.called = module
        self._method = method

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return getattr(self.called, self._method)(*inputs, **kwargs)
