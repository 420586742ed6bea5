"""The same script in one process or, under torchrun, in one process per device: torch's DistributedDataParallel, with the
list of outputs and the exact loss that the replicas of one process give."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..batchnorm import use_torch_sync_batchnorm
from ..criterion import DataParallelCriterion
from ..devices import DeviceLike
from ..model import DataParallelModel
from ..precision import Precision
from ..ranks import world_size
from ..scattering import Arguments, Pieces, count_rows, move_leaves
from ..terms import Criterion
from ..weighting import Weight
from .completion import Completion, zero_leading_to
from .process_group import join_process_group, rank_device
from .torchrun import TorchrunEnvironment

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
        self.precision = Precision("fp32" if precision is None else precision)

    def forward(self, *inputs: Any, **kwargs: Any) -> list[Any]:
        rows = count_rows(Arguments(inputs, kwargs), self.dim)
        inputs, kwargs = move_leaves((inputs, kwargs), self.devices[0])
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
        return Pieces([output], [rows])

    def forward_nothing(self) -> torch.Tensor:
        """A forward without the module: a zero that leads to every parameter, and whose backward hands none a gradient. The
        reducer then has what was accumulated."""
        self.completion.begin_sparse_gradients()
        module = self.module
        self.module = _Skipped(module)
        try:
            super().forward()
        finally:
            self.module = module
        return zero_leading_to(self.completion.parameters)

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

    In one process: :class:`DataParallelModel` and :class:`DataParallelCriterion`, also where torchrun started only one: a rank
    that is alone has nothing to reduce, and needs no second place for its gradients. With more ranks: torch's
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
            than devices; ``split`` under torchrun, where each rank brings its own rows. At the forward of a rank: a parameter
            that was frozen here requires a gradient.
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
    if world_size() == 1:
        model = DataParallelModel(module, [device], dim=dim, precision=precision)
        return model, DataParallelCriterion(criterion, dim=dim, weight=weight, precision=precision)
    if device.type == "cuda":
        use_torch_sync_batchnorm(module)
    rank_criterion = DataParallelCriterion(criterion, dim=dim, weight=weight, precision=precision).to(device)
    return DistributedModel(module.to(device), device, dim, precision, criterion), rank_criterion
