"""The same script in one process or, under torchrun, in one process per device: torch's DistributedDataParallel, with the
list of outputs and the exact loss that the replicas of one process give."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
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
from ..weighting import Weight, zero_of
from .process_group import join_process_group, rank_device
from .torchrun import TorchrunEnvironment

__all__: list[str] = []


@dataclass
class Reduction:
    """What the reducer's hook is told, and what it finds out.

    ``factor`` gives what to multiply sums over the ranks by; None averages. ``users`` are, of the last backward's buckets, the
    parameters, and how many ranks had a gradient for each.
    """

    factor: Callable[[], torch.Tensor] | None = None
    users: list[tuple[list[torch.Tensor], PendingSum]] = field(default_factory=list)


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
        self._reduced = [*self.module.parameters()]  # what the reducer was built for; it does not ask self.module again
        self.module = module
        self.devices = [device]
        self.split = None
        self.dim = dim
        self.precision = Precision("fp32" if precision is None else precision)
        self._reduction = Reduction()  # not the model itself: the reducer would hold it for ever
        self.register_comm_hook(self._reduction, _reduce_bucket)

    def forward(self, *inputs: Any, **kwargs: Any) -> list[Any]:
        rows = count_rows(Arguments(inputs, kwargs), self.dim)
        inputs, kwargs = move_leaves((inputs, kwargs), self.devices[0])
        with self.precision.autocast(self.devices):
            return Pieces([super().forward(*inputs, **kwargs)], [rows])

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
    def reducing_by(self, factor: Callable[[], torch.Tensor]) -> Iterator[None]:
        """For a backward in this block: gradients are summed over the ranks and multiplied by ``factor()``, a scalar on their
        device, instead of averaged."""
        self._reduction.factor = factor
        try:
            yield
        finally:
            self._reduction.factor = None

    def touch(self) -> torch.Tensor:
        """The zero of :meth:`forward_nothing`, alone."""
        return zero_of(*(parameter for parameter in self._reduced if parameter.requires_grad))

    def take_unused(self) -> list[torch.Tensor]:
        """The parameters for which no rank had a gradient in the last reduction: the reducer leaves zeros there, and the plain
        program leaves ``None``, which optimizers pass over."""
        unused = []
        for parameters, users in self._reduction.users:
            unused += [parameter for parameter, count in zip(parameters, users.wait().tolist(), strict=True) if count == 0]
        self._reduction.users.clear()
        return unused


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


def _reduce_bucket(reduction: Reduction, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    buffer = bucket.buffer()
    buffer.mul_(1 / world_size() if reduction.factor is None else reduction.factor())
    future: torch.futures.Future[list[torch.Tensor]] = dist.all_reduce(buffer, async_op=True).get_future()
    if bucket.index() == 0:
        reduction.users.clear()  # of a backward that failed
    if reduction.factor is not None:  # else nobody will ask
        parameters = bucket.parameters()
        have = [parameter.grad is not None for parameter in parameters]
        reduction.users.append((parameters, PendingSum(torch.tensor(have, dtype=torch.float32, device=parameters[0].device))))
    return future.then(lambda done: done.value()[0])


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
