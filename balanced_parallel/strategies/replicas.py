"""Synchronisation of gradients over the replicas of one process."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..loss.criterion import DataParallelCriterion
from ..loss.sums import LossSum, Weight, power_of_two, run_backward
from ..replicas.model import DataParallelModel
from ..replicas.replicas import window
from ..runtime.collectives import world_size
from ..runtime.torch_private import foreach_multiply_
from ..training.settings import Settings
from ..training.sync import GradientSync, UpdateSync, gradient_sync


class ReplicaSync(GradientSync, UpdateSync):
    """Sums gradients of replicas to the module's parameters, or to their owners, in the backward of
    the last micro-batch.

    No update has a state of its own here. Gradients that are not reduced yet are in the buckets of
    the replicas.
    """

    def __init__(self, model: DataParallelModel, criterion: DataParallelCriterion) -> None:
        self.model = model
        self.criterion = criterion

    def open(self) -> UpdateSync:
        """Returns itself."""
        return self

    def divisor(self, expected: Weight, before: float, in_float16: bool) -> Weight:
        """Returns the expected weight, if the host knows it.

        One device then computes as the plain program does, bit for bit.
        """
        if in_float16:
            return power_of_two(
                expected.clamp(min=before)
                if isinstance(expected, Tensor)
                else max(expected, before)
            )
        return expected if isinstance(expected, float) and 0 < expected < math.inf else 1.0

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Leaves the gradients in the buckets in this block."""
        return window(self.model, self.criterion, deferred=True)

    def forwards_without_rows(self, *, is_reduced: bool) -> Iterator[list[Tensor]]:
        """Yields nothing to run, if the gradients of the replicas are not summed yet."""
        if not is_reduced:
            yield []  # The backward only sums the gradients of the replicas.

    def backward(self, losses: Sequence[Tensor], divisor: Weight, local: LossSum | None) -> None:
        """Runs the backward. The last one sums the gradients of the replicas."""
        both = self.criterion.replicas, self.model.replicas
        if losses:
            compiled = [
                replicas
                for replicas in both
                if replicas.tree is not None and replicas.tree.is_compiled
            ]
            # Compiled backwards fail in the threads of the engine, one for each device
            # (pytorch#185372).
            with torch.autograd.set_multithreading_enabled(
                torch.autograd.is_multithreading_enabled() and not compiled
            ):
                run_backward(losses, divisor)
        # The model comes last: a BalancedOptimizer takes the gradients of parameters that both
        # share from there.
        for replicas in both if local is not None else ():
            if replicas.gradients.buckets:  # only with several devices
                replicas.gradients.reduce()

    def count_micro_batches(self, count: int) -> int:
        """Returns the number."""
        return count

    def finish(self, local: LossSum, settings: Callable[[], Settings]) -> LossSum:
        """Returns the loss and the weight of this process."""
        return local

    def multiply(self, tensors: Sequence[Tensor], factor: Weight) -> None:
        """Multiplies the gradients of these tensors."""
        if isinstance(factor, Tensor) or factor != 1:
            foreach_multiply_(
                [tensor.grad for tensor in tensors if tensor.grad is not None], factor
            )

    def discard(self, error: BaseException, divide: Callable[[], object] = bool) -> bool:
        """Drops the gradients in the buckets."""
        for replicas in (self.criterion.replicas, self.model.replicas):
            replicas.gradients.drop()
        return False


@gradient_sync.register
def _(model: DataParallelModel, criterion: DataParallelCriterion) -> GradientSync:
    if type(model).forward is not DataParallelModel.forward:
        raise TypeError(
            f"{type(model).__name__} has a forward of its own, which a step does not call: put it into the module"
        )
    if model.gather_outputs:
        raise TypeError(
            "the model has gather_outputs=True, expected outputs that stay on their devices: leave it out"
        )
    if world_size() > 1:
        raise TypeError(
            f"{world_size()} ranks are running, but DataParallelModel is for one: use parallelize(module, criterion)"
        )
    return ReplicaSync(model, criterion)
