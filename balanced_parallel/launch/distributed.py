"""The same script in one process or, under torchrun, in one process per device: torch's DistributedDataParallel, with the
list of outputs and the exact loss that the replicas of one process give."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import nesting
from ..batchnorm import use_torch_sync_batchnorm
from ..criterion import DataParallelCriterion
from ..devices import DeviceLike
from ..model import DataParallelModel
from ..precision import Precision
from ..ranks import sum_over_ranks, world_size
from ..scattering import Arguments, Pieces, count_rows, move_leaves
from ..terms import Criterion
from ..weighting import Weight, widen, zero_of
from .process_group import join_process_group, rank_device
from .torchrun import TorchrunEnvironment

__all__: list[str] = []


@dataclass
class Reduction:
    """What the reducer sums over the ranks: the gradients of ``parameters``, and in the same buckets, as the gradient of one
    parameter more, ``totals``: the loss, the weight, and for each of the parameters whether it has a gradient. They are those
    of ``whole``."""

    parameters: list[nn.Parameter]
    totals: nn.Parameter
    whole: nn.ModuleList
    mine: torch.Tensor | None = None  # the totals of this rank
    has_absent: bool = False  # whether this rank has no gradient for some of the parameters


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
        totals = nn.Parameter(widen(reduced[0].new_zeros(2 + len(reduced))))
        whole = nn.ModuleList([nn.ParameterList([totals]), module, beside])  # what comes first is in the last bucket
        super().__init__(whole, gradient_as_bucket_view=True)  # the reducer does not ask self.module again
        self._reduction = Reduction(reduced, totals, whole)
        self._left_out: list[nn.Parameter] = []
        self._following: list[Any] = []
        self._frozen = {name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad}
        self._has_hook = False
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
            learned = [leaf for _, leaf in nesting.leaves(output) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
            self._following = [leaf.register_hook(self._follow) for leaf in learned]
        return Pieces([output], [rows])

    def forward_nothing(self) -> torch.Tensor:
        """A forward without the module: a zero that leads to every parameter, and whose backward hands none a gradient. The
        reducer then has what was accumulated."""
        module = self.module
        self.module = _Skipped(module)
        try:
            super().forward()
        finally:
            self.module = module
        return _zero_leading_to(self._reduction.parameters)

    def roots(self) -> list[torch.Tensor]:
        """Roots for a backward that reduces, beside the losses: they lead to what losses left out before, so that no bucket
        waits for that until :meth:`complete`."""
        return [_zero_leading_to(self._left_out)] if self._left_out else []

    def announce(self, total: torch.Tensor, weight: Weight) -> None:
        """The loss and the weight of this rank, for the next backward that reduces, which the caller will :meth:`finish`. This is
        what can be done while no rank waits."""
        for hook in self._following:
            hook.remove()
        totals = self._reduction.totals
        mine = torch.ones_like(totals, dtype=torch.float64 if self._has_hook else None, requires_grad=False)
        mine[0], mine[1] = total, weight
        self._reduction.mine = mine

    def finish(self) -> None:
        """Gives the reducer what a backward has left: the totals, and the parameters that were left out."""
        reduction, mine = self._reduction, self._reduction.mine
        assert mine is not None
        absent = [index for index, parameter in enumerate(reduction.parameters, 2) if parameter.grad is None]
        if absent:
            mine[absent] = 0
        reduction.has_absent = bool(absent)
        reduction.totals.grad = None
        torch.autograd.backward([reduction.totals], [mine.to(reduction.totals)])
        while awaited := self._awaited():
            left_out = [[reduction.totals, *reduction.parameters][index] for index in awaited]
            self._left_out += left_out
            torch.autograd.backward([_zero_leading_to(left_out)])

    def _follow(self, gradient: torch.Tensor) -> None:
        """A backward through an output, of whatever loss, finishes in its end."""

        def follow() -> None:
            if self._awaited():  # not where torch.autograd.grad asks, which accumulates nothing, nor again for a second output
                self.announce(self._reduction.totals.new_zeros(()), 0)
                self.finish()
                if self._reduction.has_absent or self._has_hook:
                    self.take_totals()

        torch.autograd.Variable._execution_engine.queue_callback(follow)

    def _awaited(self) -> list[int]:
        """The parameters that the reducer waits for, up to a hundred. Only the text of its error names them; autograd's graph
        does not show what a reentrant checkpoint used, nor a loss of the user's beside ours."""
        try:
            self._check_reducer_finalized()
        except RuntimeError as error:
            named = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if named is None:
                raise
            return [int(index) for index in named[1].split()]
        return []

    def take_totals(self) -> tuple[float, float]:
        """What all ranks together sent. Gradients of parameters for which no rank had one become ``None``: the reducer leaves
        zeros there, and the plain program nothing, which optimizers pass over."""
        reduction = self._reduction
        assert reduction.totals.grad is not None
        averages, mine = reduction.totals.grad, reduction.mine
        reduction.totals.grad = reduction.mine = None
        if self._has_hook and mine is not None:  # which may round what is in the buckets
            loss, weight, *counts = sum_over_ranks(mine).tolist()
        else:
            loss, weight, *counts = [average * self.process_group.size() for average in averages.tolist()]
        if 0 in counts:
            for parameter, count in zip(reduction.parameters, counts, strict=True):
                parameter.grad = parameter.grad if count else None
        return loss, weight

    def __setstate__(self, state: dict[str, Any]) -> None:
        modules = state["_modules"]
        module, modules["module"] = modules["module"], state["_reduction"].whole
        super().__setstate__(state)  # builds a reducer
        self.module = module

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        super().register_comm_hook(state, hook)
        self._has_hook = True


def _zero_leading_to(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """:func:`zero_of` for the reducer, which waits for all that it was made for, also for those that are frozen now."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            return zero_of(*parameters)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


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
    if world_size() == 1:
        model = DataParallelModel(module, [device], dim=dim, precision=precision)
        return model, DataParallelCriterion(criterion, dim=dim, weight=weight, precision=precision)
    if device.type == "cuda":
        use_torch_sync_batchnorm(module)
    rank_criterion = DataParallelCriterion(criterion, dim=dim, weight=weight, precision=precision).to(device)
    return DistributedModel(module.to(device), device, dim, precision, criterion), rank_criterion
