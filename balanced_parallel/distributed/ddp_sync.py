"""Synchronisation of gradients over the ranks of ``DistributedDataParallel``.

    rank 0   forward 0 | backward 0 | forward 1 | backward 1          | finish | update
    rank 1   forward 0 |                        | backward 0          | finish | update
                        no_sync() .............. loss and weight ---> sum
                                                 bucket n, ..., bucket 0 ---> averages

The loss and its weight are one small all-reduce, which starts before the last backward. Buckets are all-reduced by torch's
reducer while that backward runs.
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
from ..runtime.tensors import base_of, versions
from ..training.divisors import is_one, power_of_two
from ..training.gradient_sync import GradientSync, gradient_sync, run_backward
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
        self._bucket_views: dict[Tensor, Tensor] = {}
        self._has_begun = False  # an accumulation
        self._untouched: list[Tensor] = []  # zeros so far, in an accumulation
        self._wait: Callable[[], Tensor] | None = None  # returns loss and weight of all ranks
        self._started: torch.Event | None = None
        self._failures: Callable[[], Tensor] | None = None  # number of ranks whose last backward has failed

    def __reduce__(self) -> Any:  # a copy has no gradients
        return DDPSync, (self._model,)

    @property
    def gradient_scale(self) -> float:
        """The number of ranks: the reducer averages."""
        return float(collectives.world_size())

    def count_micro_batches(self, count: int) -> int:
        """Returns ``count``, or the largest of any rank if layers of the model wait for every rank in each forward."""
        return collectives.max_over_ranks(count) if self._meets_ranks else count

    def first_divisor(self, expected: Weight, before: float) -> float:
        """Returns a power of two near the mean weight of a rank in the previous update. It is the same on all ranks."""
        return float(power_of_two(before / collectives.world_size()))

    def whole_weight(self, expected: Weight, *, last: bool) -> Weight:
        """Returns the weight of all ranks if ``last``, otherwise that of this rank times the number of ranks."""
        whole = self._sum()[1] if last else expected * collectives.world_size()
        return float(whole) if not isinstance(whole, Tensor) or whole.is_cpu else whole

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keeps gradients on this rank."""
        if not self._has_begun:
            self._accumulate_in_buckets()
        with self._model.no_sync():
            yield

    def forward_without_rows(self) -> list[Tensor]:
        """Takes part in the forward of the ranks that have rows: buffers are broadcast."""
        return [self._model.forward_without_rows()]

    def start(self, local: LossSum) -> None:
        """Starts the all-reduce of loss and weight."""
        weight = add_up([0.0 if local.weight is None else local.weight], local.total.device)
        self._wait = collectives.start_sum_over_ranks(torch.stack([local.total.double(), weight.double()]))
        self._started = host_copies.mark(local.total.device)

    def backward(self, losses: Sequence[Tensor], divisor: Weight, *, last: bool) -> None:
        """Runs one backward. The last one completes the reduction, whatever this rank has used."""
        if not last:
            run_backward(losses, divisor)
            return
        self._forget_untouched()
        self._has_begun = False
        roots = [loss for loss in losses if loss.requires_grad]
        try:
            run_backward(roots or [zero_of_parameters(self._model.reduced_parameters)], divisor)
        except Exception:
            self._complete()
            self._start_counting_failures(1)()
            raise
        self._failures = self._start_counting_failures(0)
        for parameter in self._model.reduced_parameters:
            if parameter not in self._bucket_views and parameter.grad is not None and parameter.grad.layout == torch.strided:
                self._bucket_views[parameter] = parameter.grad

    def finish(self, local: LossSum) -> LossSum:
        """Returns loss and weight of all ranks. The host waits for their sum, but not for the backward.

        Raises:
            RuntimeError: the last backward of another rank has failed.
        """
        with host_copies.ahead_of_later_work(local.total.device, self._started):
            total, weight = host_copies.start_copy(self._sum())().tolist()
        self._wait = None
        if self._failures is not None and (count := int(self._failures())):
            raise RuntimeError(
                f"{count} of {collectives.world_size()} ranks failed in the backward, expected none: nothing was "
                "updated, and the step can be repeated"
            )
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
        known = set(map(id, self._model.reduced_parameters))
        for parameter in [one for one in tensors if id(one) not in known and one.grad is not None]:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} with a gradient that the ranks would not "
                "share: make it part of the module or of the criterion that parallelize is given"
            )
        views = self._bucket_views
        gradients = [] if is_one(factor) else [views.get(one, one.grad) for one in tensors if one.grad is not None]
        multi_tensor.multiply_(_buckets_of(gradients), factor)

    def discard(self) -> None:
        """Forgets the gradients that this rank has accumulated."""
        self._wait, self._failures, self._untouched, self._has_begun = None, None, [], False
        for parameter in self._model.reduced_parameters:
            parameter.grad = None

    def _sum(self) -> Tensor:
        assert self._wait is not None
        return self._wait()

    def _accumulate_in_buckets(self) -> None:
        """Sets missing gradients to zeros in the buckets of the reducer, where autograd adds to them.

        The views are those of the previous update. ``data`` gives each its own version counter. A gradient whose version stays 0
        was not touched.
        """
        missing = [parameter for parameter in self._bucket_views if parameter.grad is None]
        views = [self._bucket_views[parameter] for parameter in missing]
        multi_tensor.zero_(_buckets_of(views) if len(missing) == len(self._bucket_views) else views)
        for parameter, view in zip(missing, views, strict=True):
            parameter.grad = view.data
        self._untouched, self._has_begun = missing, True

    def _forget_untouched(self) -> None:
        """Sets gradients of parameters that no micro-batch has used to None. The reducer then decides over all ranks."""
        pairs = [(parameter, parameter.grad) for parameter in self._untouched]
        counters = versions([self._bucket_views[parameter] if gradient is None else gradient for parameter, gradient in pairs])
        for (parameter, _), version in zip(pairs, counters, strict=True):
            if version == 0:
                parameter.grad = None
        self._untouched = []

    def _complete(self) -> None:
        """Runs the hooks of parameters that a failed backward has not reached. Other ranks wait for them."""
        for parameter in self._model.reduced_parameters:
            with contextlib.suppress(RuntimeError):  # it has been reached
                zero_of_parameters([parameter]).backward()

    def _start_counting_failures(self, failures: int) -> Callable[[], Tensor]:
        return collectives.start_sum_over_ranks(torch.tensor(failures, dtype=torch.float64))


def _buckets_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Returns the buckets that gradients are views of. A bucket contains nothing else, so one operation changes all of it."""
    return list({id(bucket): bucket for bucket in map(base_of, gradients)}.values())


@gradient_sync.register
def _(model: DistributedModel, criterion: DataParallelCriterion) -> GradientSync:
    return DDPSync(model)
