"""Synchronisation of gradients over the shards of FSDP2.

    rank 0   forward 0 | backward 0 | forward 1 | backward 1 | finish | update
    rank 1   forward 0 | backward 0 | no rows   | backward 1 | finish | update

Blocks are all-gathered in every forward and backward, so all ranks run equally many micro-batches. Gradients are reduced to their
shards in every backward: whole gradients, which would save this traffic, may not fit where the model does not. Before each
backward the hosts compare the blocks that they have run. The loss and its weight are one small all-reduce of theirs in the end.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..loss.criterion import DataParallelCriterion
from ..loss.weighting import LossSum, Weight, add_up
from ..runtime import collectives, multi_tensor
from ..runtime.host_copies import start_copy
from ..runtime.tensors import is_sharded, local_tensors
from ..training.divisors import is_one, larger, power_of_two
from ..training.gradient_sync import GradientSync, Settings, gradient_sync, run_backward
from .fsdp import ShardedModel

__all__: list[str] = []


class FSDPSync:
    """Sums gradients over ranks in each backward. Every rank takes part in the forwards of all others."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self._whole: Weight | None = None  # weight of all ranks, known for float16 only
        self._divisor: Weight | None = None  # of the gradients that are reduced
        self._given: Weight = 1.0  # the divisor of the last backward
        self._local: Callable[[], Tensor] | None = None  # returns loss and weight of this rank, on the host

    @property
    def gradient_scale(self) -> Weight:
        """The divisor that all ranks have used, over that of this rank's last backward."""
        return 1.0 if self._divisor is None else self._divisor / self._given

    def begin(self) -> None:
        """Does nothing."""

    def count_micro_batches(self, count: int) -> int:
        """Returns the largest ``count`` of any rank."""
        return collectives.max_over_ranks(count)

    def first_divisor(self, expected: Weight, before: float) -> float:
        """Returns a power of two near the weight of the previous update. It is the same on all ranks."""
        return float(power_of_two(before))

    def whole_weight(self, expected: Weight, *, last: bool) -> Weight:
        """Returns the expected weight of all ranks."""
        local = add_up([expected], self._model.devices[0]).double()
        whole = collectives.sum_over_ranks(local)
        self._whole = float(whole) if whole.is_cpu else whole
        return self._whole

    def repeating(self) -> contextlib.AbstractContextManager[None]:
        """Does nothing: each rank has one device."""
        return contextlib.nullcontext()

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Does nothing: gradients are reduced in every backward."""
        return contextlib.nullcontext()

    def forwards_without_rows(self, *, is_reduced: bool) -> Iterator[list[Tensor]]:
        """Takes part in forwards of other ranks that this rank has no rows for. Yields zeros for :meth:`backward`."""
        while count := collectives.max_over_ranks(0):
            for _ in range(count):
                yield [self._model.forward_without_rows()]

    def start(self, local: LossSum) -> None:
        """Starts to copy loss and weight to the host."""
        weight = add_up([0.0 if local.weight is None else local.weight], local.total.device).double()
        self._local = start_copy(torch.stack([local.total.double(), weight]))

    def backward(self, losses: Sequence[Tensor], divisor: Weight, *, last: bool) -> None:
        """Runs one backward, which reduces the gradients."""
        with self._model.summing():
            run_backward(losses, self._common(divisor))

    def finish(self, local: LossSum, settings: Settings) -> LossSum:
        """Returns loss and weight of all ranks. The host waits for them, but not for the last backward."""
        if self._local is None:  # no micro-batch was known to be the last
            self.start(local)
        assert self._local is not None
        local_sums = self._local()
        numbers = torch.cat([local_sums, local_sums.new_tensor(settings.digest())])
        total, whole, *digests = collectives.sum_over_ranks(numbers).tolist()
        self._local = self._whole = None
        settings.check(*digests)
        return LossSum(torch.full_like(local.total, total), whole)

    def rescale(self, factor: Weight) -> None:
        """Does nothing: :meth:`backward` chooses a divisor that is the same on all ranks."""

    def multiply(self, tensors: Sequence[Tensor], factor: Weight) -> None:
        """Multiplies the shards of the reduced gradients.

        Raises:
            ValueError: one of ``tensors`` has a gradient that is not reduced.
        """
        for one in tensors:
            if one.grad is not None and not is_sharded(one):
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(one.shape)} with a gradient that the ranks would not share: "
                    "make it part of the module that parallelize is given"
                )
        if not is_one(factor):
            multi_tensor.multiply_(local_tensors([one.grad for one in tensors if one.grad is not None]), factor)

    def smallest(self, number: float) -> float:
        """Returns the smallest ``number`` of all ranks."""
        return -collectives.max_over_ranks(-number)

    def abandon(self) -> bool:
        """Raises ``RuntimeError``: the other ranks wait for the shards of this one, in the middle of a forward or backward."""
        raise RuntimeError(
            "this rank ran out of memory where other ranks wait for its shards, so the batch cannot run again in smaller pieces: "
            "give micro_batch_size a smaller number, as memory.fit finds it"
        )

    def discard(self, *, out_of_memory: bool = False) -> None:
        """Forgets the gradients."""
        self._local = self._whole = None
        for parameter in self._model.gradients.parameters:
            parameter.grad = None
        reset = getattr(self._model.root, "reset_iter_state", None)  # newer than torch 2.11
        if reset is not None:
            reset()

    def _common(self, divisor: Weight) -> Weight:
        """Returns the divisor of all ranks. Gradients that were reduced with another one are multiplied."""
        self._given, before = divisor, self._divisor
        if self._whole is None:
            self._divisor = None
            return divisor
        gradients = [one.grad for one in self._model.gradients.parameters if one.grad is not None]
        self._divisor = power_of_two(self._whole)
        if gradients and before is not None:
            self._divisor = larger(self._divisor, before)
            multi_tensor.multiply_(local_tensors(gradients), before / self._divisor)
        return self._divisor


@gradient_sync.register
def _(model: ShardedModel, criterion: DataParallelCriterion) -> GradientSync:
    learned = [name for name, parameter in criterion.named_parameters() if parameter.requires_grad]
    if learned:
        raise TypeError(
            f"the criterion has a parameter {learned[0].removeprefix('module.')} to train, which is not sharded: make it part of "
            "the module, call requires_grad_(False) on it if it is frozen, as a teacher, or use strategy='ddp'"
        )
    return FSDPSync(model)
