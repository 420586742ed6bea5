"""Synchronisation of gradients over the ranks of ``DistributedDataParallel``.

    rank 0   forward 0 | backward 0 | forward 1 | backward 1                          | finish | update
    rank 1   forward 0 |                        | backward 0                          | finish | update
                        no_sync() .............. bucket n, ..., bucket 0 ---> averages  sum

Buckets are all-reduced by torch's reducer while the last backward runs. The loss, its weight and failures are one small
all-reduce of the hosts behind it. The loss is on its way to the host before that backward is launched, so the host does not wait
for the backward.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..loss.criterion import DataParallelCriterion
from ..loss.weighting import LossSum, Weight, add_up
from ..replicas.sync_batchnorm import meets_other_ranks
from ..runtime import collectives, host_copies, multi_tensor
from ..runtime.autograd import reached_leaves
from ..runtime.tensors import base_of, versions
from ..training.divisors import is_one, power_of_two
from ..training.gradient_sync import GradientSync, Settings, gradient_sync, run_backward
from ..training.gradients import scale_gradients
from .ddp import DistributedModel
from .unused_parameters import zero_of_parameters

__all__: list[str] = []


class DDPSync:
    """Averages gradients over ranks, in the backward of each rank's last micro-batch.

    While micro-batches accumulate, gradients lie in the reducer's buckets already: they exist once in memory.
    """

    def __init__(self, model: DistributedModel) -> None:
        self._model = model
        self._meets_ranks = meets_other_ranks(model.modules())
        self._reduced = {id(parameter): parameter for parameter in model.reduced_parameters}
        self._bucket_views: dict[int, Tensor] = {}  # by the id of the parameter
        self._buckets: list[Tensor] = []
        self._has_begun = False  # an accumulation
        self._untouched: Sequence[Tensor] = []  # zeros so far, in an accumulation
        self._local: Callable[[], Tensor] | None = None  # returns loss and weight of this rank, on the host
        self._whole_weight: Tensor | None = None
        self._is_reducing = False  # other ranks wait for this one
        self._failures = 0, 0  # numbers of ranks, by the agreement of this update: out of memory, for another reason
        self._is_agreed = self._is_abandoned = False

    def __reduce__(self) -> Any:  # a copy has no gradients
        return DDPSync, (self._model,)

    @property
    def gradient_scale(self) -> float:
        """The number of ranks: the reducer averages."""
        return float(collectives.world_size())

    def begin(self) -> None:
        """Begins an update."""
        self._is_agreed = self._is_abandoned = False
        self._model.begin_update()
        self._whole_weight = None

    def count_micro_batches(self, count: int) -> int:
        """Returns ``count``, or the largest of any rank if layers of the model wait for every rank in each forward."""
        return collectives.max_over_ranks(count) if self._meets_ranks else count

    def first_divisor(self, expected: Weight, before: float) -> float:
        """Returns a power of two near the mean weight of a rank in the previous update. It is the same on all ranks."""
        return float(power_of_two(before / collectives.world_size()))

    def whole_weight(self, expected: Weight, *, last: bool) -> Weight:
        """Returns the weight of all ranks if ``last``, otherwise that of this rank times the number of ranks."""
        if not last:
            return expected * collectives.world_size()
        if self._whole_weight is None:  # once per update, also if this rank gives it up later
            self._whole_weight = collectives.sum_over_ranks(self._weight)
        return float(self._whole_weight) if self._whole_weight.is_cpu else self._whole_weight

    def repeating(self) -> contextlib.AbstractContextManager[None]:
        """Does nothing: each rank has one device."""
        return contextlib.nullcontext()

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

    def start(self, local: LossSum) -> None:
        """Starts to copy loss and weight to the host."""
        self._weight = add_up([0.0 if local.weight is None else local.weight], local.total.device).double()
        self._local = host_copies.start_copy(torch.stack([local.total.double(), self._weight]))

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

    def rescale(self, factor: Weight) -> None:
        """Multiplies the gradients that this rank has accumulated."""
        self._forget_untouched()
        scale_gradients(self._model.reduced_parameters, factor)

    def multiply(self, tensors: Sequence[Tensor], factor: Weight) -> None:
        """Multiplies the reduced gradients.

        Raises:
            ValueError: one of ``tensors`` has a gradient that is not reduced.
        """
        present = [one for one in tensors if one.grad is not None]
        for parameter in [one for one in present if id(one) not in self._reduced]:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} with a gradient that the ranks would not "
                "share: make it part of the module or of the criterion that parallelize is given"
            )
        if not is_one(factor):
            others = [one.grad for one in present if one.grad is not None and id(one) not in self._bucket_views]
            multi_tensor.multiply_([*self._buckets, *others], factor)

    def smallest(self, number: float) -> float:
        """Returns the smallest ``number`` of all ranks."""
        return -collectives.max_over_ranks(-number)

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
        self._whole_weight = None
        numbers = torch.cat([local, local.new_tensor([*digest, out_of_memory, others])])
        total, weight, digests, squares, memory_failures, failures = collectives.sum_over_ranks(numbers).tolist()
        self._failures = int(memory_failures), int(failures)
        return total, weight, digests, squares

    def _refuse_failures(self, *, but_memory: bool = False) -> None:
        ranks, (out_of_memory, others) = collectives.world_size(), self._failures
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
        missing = [one for key, one in self._reduced.items() if key in self._bucket_views and one.grad is None]
        views = [self._bucket_views[id(parameter)] for parameter in missing]
        multi_tensor.zero_(self._buckets if len(missing) == len(self._bucket_views) else views)
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
