"""The same script in one process or, under torchrun, in one process per device: torch's DistributedDataParallel, with the
list of outputs and the exact loss that the replicas of one process give."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..batchnorm import use_torch_sync_batchnorm
from ..criterion import DataParallelCriterion
from ..devices import DeviceLike
from ..model import DataParallelModel
from ..precision import Precision
from ..ranks import PendingSum, world_size
from ..scattering import Arguments, Pieces, count_rows, move_leaves
from ..terms import Criterion
from ..weighting import Weight
from .process_group import join_process_group, rank_device
from .torchrun import TorchrunEnvironment

__all__: list[str] = []


@dataclass
class Reduction:
    """What goes over the ranks beside gradients: ``totals``, and who of ``parameters`` has a gradient; and their ``sums``."""

    parameters: list[nn.Parameter]
    totals: torch.Tensor | None = None
    sums: PendingSum | None = None

    def send(self) -> None:
        """Called when every gradient is there and every bucket is on its way, before the reducer puts zeros elsewhere."""
        assert self.totals is not None
        have = [parameter.grad is not None for parameter in self.parameters]
        self.sums = PendingSum(torch.cat([self.totals, self.totals.new_tensor(have)]))


class DistributedModel(DistributedDataParallel):
    """``DistributedDataParallel`` that returns a list with this rank's output, as :class:`DataParallelModel` does, and that
    can reduce gradients for a rank which has no rows to run, or no longer.

    Args:
        module: on this rank's device already.
        device: that device.
        dim: the dimension of the rows in the inputs.
        precision: autocast around the forward; ``None`` is the caller's.
        criterion: a module whose parameters are reduced with the model's.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        dim: int = 0,
        precision: str | Precision | None = None,
        criterion: Criterion | None = None,
    ) -> None:
        learned = criterion.parameters() if isinstance(criterion, nn.Module) else ()
        beside = nn.ParameterList(parameter for parameter in learned if parameter.requires_grad)
        super().__init__(nn.ModuleList([module, beside]) if len(beside) else module, gradient_as_bucket_view=True)
        # what the reducer was built for; it does not ask self.module again
        self._reduction = Reduction([parameter for parameter in self.module.parameters() if parameter.requires_grad])
        self.module = module
        self.devices = [device]
        self.split = None
        self.dim = dim
        self.precision = Precision("fp32" if precision is None else precision)

    def forward(self, *inputs: Any, **kwargs: Any) -> list[Any]:
        rows = count_rows(Arguments(inputs, kwargs), self.dim)
        inputs, kwargs = move_leaves((inputs, kwargs), self.devices[0])
        # in a window of micro-batches the reducer has nothing to do after the first, nor have buffers to be synchronised
        run = super().forward if self.require_backward_grad_sync or self.require_forward_param_sync else self.module
        with self.precision.autocast(self.devices):
            return Pieces([run(*inputs, **kwargs)], [rows])

    def forward_nothing(self) -> torch.Tensor:
        """A forward without the module: a zero whose backward hands no gradient to any parameter. After it, or after it is
        added to a loss, backward completes every bucket of the reducer, with what was accumulated and whatever was used."""
        module = self.module
        self.module = _Skipped(module)
        try:
            super().forward()
        finally:
            self.module = module
        return self.touch()

    @contextlib.contextmanager
    def summing(self, totals: torch.Tensor) -> Iterator[None]:
        """For a backward in this block, with a root of :meth:`touch`: ``totals`` are summed over the ranks on the side."""
        self._reduction.totals = totals
        try:
            yield
        finally:
            self._reduction.totals = None

    def touch(self) -> torch.Tensor:
        """The zero of :meth:`forward_nothing`, alone."""
        zero: torch.Tensor = _Touch.apply(self._reduction, *self._reduction.parameters)
        return zero

    def take_totals(self) -> list[float]:
        """The totals over all ranks of the last backward in :meth:`summing`. Gradients of parameters for which no rank had one
        become ``None``: the reducer leaves zeros there, and the plain program nothing, which optimizers pass over."""
        reduction = self._reduction
        assert reduction.sums is not None
        sums: list[float] = reduction.sums.wait().tolist()
        reduction.sums = None
        first = len(sums) - len(reduction.parameters)
        for parameter, count in zip(reduction.parameters, sums[first:], strict=True):
            if count == 0:
                parameter.grad = None
        return sums[:first]


class DistributedCriterion(DataParallelCriterion):
    """The loss over all ranks. Its backward completes every bucket of the model's reducer, also where this rank did not use
    a parameter, for which ``DistributedDataParallel`` would wait or complain."""

    model: DistributedModel

    def forward(self, outputs: Sequence[Any], *targets: Any, **kwargs: Any) -> Any:
        loss = super().forward(outputs, *targets, **kwargs)
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad or not self.model.require_backward_grad_sync:
            return loss
        return loss + self.model.touch().to(loss)

    def attach(self, model: DistributedModel) -> "DistributedCriterion":
        self.__dict__["model"] = model  # not a submodule: its parameters are not the criterion's
        return self


class _Touch(torch.autograd.Function):
    """A zero whose backward hands no gradient to any parameter, for which every bucket of the reducer waits."""

    @staticmethod
    def forward(ctx: Any, reduction: Reduction, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.reduction = reduction
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        if ctx.reduction.totals is not None:  # the root with the highest number: before the reducer queues its own callback
            torch.autograd.Variable._execution_engine.queue_callback(ctx.reduction.send)
        return (None, *[None] * len(ctx.reduction.parameters))


class _Skipped(nn.Module):
    """Stands in for the module in a forward without rows; its buffers are still synchronised."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.skipped = module

    def forward(self) -> None:
        return None


def parallelize(
    module: nn.Module,
    criterion: Criterion,
    device_ids: Sequence[DeviceLike] | None = None,
    *,
    dim: int = 0,
    weight: Callable[..., Weight] | None = None,
    precision: str | Precision | None = None,
    split: Sequence[float] | None = None,
) -> tuple[DataParallelModel | DistributedModel, DataParallelCriterion]:
    """A model and a criterion for all the devices there are: the same script, the same numbers, in one process or many.

    In one process: :class:`DataParallelModel` and :class:`DataParallelCriterion`. Under torchrun: torch's
    ``DistributedDataParallel`` on this rank's device, whose forward returns a list too, and a criterion whose value is the
    loss over all ranks. The process group is started where torchrun's environment is there and none runs (NCCL for CUDA,
    gloo for CPUs), and ended at exit.

    Args:
        module: moved to the first device, or to this rank's.
        criterion: a module or a function.
        device_ids: as in :class:`DataParallelModel`; under torchrun, one device for each process of this machine.
        dim, weight, precision, split: as in :class:`DataParallelModel` and :class:`DataParallelCriterion`.

    Raises:
        ValueError: torchrun's environment is incomplete, disagrees with the running process group, or has more processes
            than devices; ``split`` under torchrun, where each rank brings its own rows.
    """
    environment = TorchrunEnvironment.detect()
    if environment is None:
        if world_size() > 1:
            raise ValueError(
                f"a process group with {world_size()} ranks is running, but torchrun's environment is not there: start the "
                "script with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            )
        model = DataParallelModel(module, device_ids, dim=dim, precision=precision, split=split)
        return model, DataParallelCriterion(criterion, dim=dim, weight=weight, precision=precision)
    if split is not None:
        raise ValueError(
            f"split={split!r} was given under torchrun, expected None: each rank brings as many rows as it is to have"
        )
    device = rank_device(environment, device_ids)
    join_process_group(environment, device)
    if device.type == "cuda":
        use_torch_sync_batchnorm(module)
    rank_criterion = DistributedCriterion(criterion, dim=dim, weight=weight, precision=precision).to(device)
    rank_model = DistributedModel(module.to(device), device, dim, precision, criterion)
    return rank_model, rank_criterion.attach(rank_model)
