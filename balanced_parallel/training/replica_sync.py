"""Synchronisation of gradients over the replicas of one process.

Synchronisation for optimizers that update in the backward: gradients must be final as soon as they are made.
"""

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.optim import Optimizer

from ..loss.criterion import DataParallelCriterion
from ..loss.sums import LossSum, Weight
from ..replicas.buckets import GradientBuckets
from ..replicas.model import DataParallelModel
from ..runtime import torch_private
from ..runtime.collectives import world_size
from ..runtime.torch_private import get_gradient
from ..savings.gradient_release import GradientRelease, release_of
from .strategy import GradientSync, Settings, gradient_sync, run_backward
from .update import scale_gradients, trained_tensors

__all__: list[str] = []


class ReplicaSync:
    """Sums gradients of replicas to the module's parameters, or to their owners, in the backward of the last micro-batch."""

    gradient_scale = 1.0

    def __init__(self, model: DataParallelModel, criterion: DataParallelCriterion) -> None:
        self._model = model
        self._criterion = criterion

    @property
    def _buckets(self) -> list[GradientBuckets]:
        # the model's last: a BalancedOptimizer takes the gradients of parameters that they share from there
        return [self._criterion.replicas.gradients, self._model.replicas.gradients]

    def begin(self) -> None:
        """Does nothing."""

    def count_micro_batches(self, count: int) -> int:
        """Returns ``count``: there is one process."""
        return count

    def first_divisor(self, expected: Weight, before: float) -> float:
        """Returns the expected weight, if the host knows it. One device then computes as the plain program does, bit for bit."""
        return expected if isinstance(expected, float) else 1.0

    def whole_weight(self, expected: Weight, *, last: bool) -> Weight:
        """Returns the expected weight."""
        return expected

    def repeating(self) -> contextlib.AbstractContextManager[None]:
        """Keeps the shares of the devices."""
        return self._model.shares.kept()

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keeps gradients on the replicas."""
        with contextlib.ExitStack() as stack:
            for replicas in (self._model.replicas, self._criterion.replicas):
                stack.enter_context(replicas.no_sync())
            yield

    def forwards_without_rows(self, *, is_reduced: bool) -> Iterator[list[Tensor]]:
        """Yields no zeros, for a backward that only sums the gradients of the replicas."""
        if not is_reduced:
            yield []

    def start(self, local: LossSum) -> None:
        """Does nothing: the loss of this process is the whole loss."""

    def backward(self, losses: Sequence[Tensor], divisor: Weight, *, last: bool) -> None:
        """Runs one backward. The last one sums the gradients of the replicas."""
        if losses:
            run_backward(losses, divisor)
        if last:
            for buckets in self._buckets:
                buckets.reduce()

    def finish(self, local: LossSum, settings: Settings) -> LossSum:
        """Returns ``local``."""
        return local

    def rescale(self, factor: Weight) -> None:
        """Multiplies the gradients of the parameters, and those on the replicas."""
        for buckets in self._buckets:
            buckets.scale(factor)
        # not through the grad of a sharded parameter, which gathers it
        own = [get_gradient(tensor) for tensor in trained_tensors(self._model, self._criterion).values()]
        gradients = [gradient for gradient in own if gradient is not None]
        torch_private.foreach_multiply_(gradients, factor)

    def multiply(self, tensors: Sequence[Tensor], factor: Weight) -> None:
        """Multiplies the gradients of ``tensors``."""
        scale_gradients(tensors, factor)

    def smallest(self, number: float) -> float:
        """Returns ``number``."""
        return number

    def abandon(self) -> bool:
        """Returns False: no other process waits."""
        return False

    def discard(self, *, out_of_memory: bool = False) -> None:
        """Forgets the gradients on the replicas."""
        for buckets in self._buckets:
            buckets.drop()


@gradient_sync.register
def _(model: DataParallelModel, criterion: DataParallelCriterion) -> GradientSync:
    if model.gather_outputs:
        raise TypeError("the model has gather_outputs=True, expected outputs that stay on their devices: leave it out")
    if world_size() > 1:
        raise TypeError(
            f"{world_size()} ranks are running, but a DataParallelModel does not reduce over ranks: "
            "use parallelize(module, criterion)"
        )
    return ReplicaSync(model, criterion)


def releasing(
    sync: GradientSync, optimizers: Sequence[Optimizer], minimum: float, max_grad_norm: float | None, run_again: bool
) -> GradientSync:
    """Returns ``sync``, or a :class:`ReleasingSync` if an optimizer updates in the backward.

    Raises:
        ValueError: gradients are clipped, which needs all of them, or batches run again after an out of memory.
        TypeError: ranks reduce the gradients after the backward has made them.
    """
    releases = [release for release in map(release_of, optimizers) if release is not None]
    if not releases:
        return sync
    if max_grad_norm is not None:
        raise ValueError(
            f"max_grad_norm={max_grad_norm} needs the norm of all gradients, but release_gradients_in_backward applies each of "
            "them before the next one exists: leave out one of them"
        )
    if run_again:
        raise ValueError(
            "micro_batch_size='auto' runs a batch again after an out of memory, but release_gradients_in_backward has updated "
            "parameters by then: leave out one of them"
        )
    if not isinstance(sync, ReplicaSync):
        raise TypeError(
            "ranks reduce gradients after the backward has made them: release_gradients_in_backward needs one process"
        )
    return ReleasingSync(sync, releases, minimum)


class ReleasingSync(ReplicaSync):
    """Divides by the final divisor in the only backward of an update. If it is on a device, the host waits for it before.

    Args:
        sync: of the replicas.
        releases: of the optimizers.
        minimum: of the divisor.
    """

    def __init__(self, sync: ReplicaSync, releases: Sequence[GradientRelease], minimum: float) -> None:
        super().__init__(sync._model, sync._criterion)
        self._releases, self._minimum = releases, minimum
        self._divisor = 0.0

    def start(self, local: LossSum) -> None:
        """Reads the weight of the batch."""
        self._divisor = max(float(local.weight or 0.0), self._minimum)

    def first_divisor(self, expected: Weight, before: float) -> float:
        """Returns the divisor that :meth:`start` has read."""
        return self._divisor

    def whole_weight(self, expected: Weight, *, last: bool) -> Weight:
        """Raises ``ValueError``: gradients in float16 are scaled, and divided once more before the update."""
        raise ValueError(
            "float16 scales gradients, which the update would have to unscale, but release_gradients_in_backward has applied "
            "them by then: use precision='bf16' or 'fp32', or leave it out"
        )

    def backward(self, losses: Sequence[Tensor], divisor: Weight, *, last: bool) -> None:
        """Runs the backward, which updates the parameters, unless no target counts.

        Raises:
            RuntimeError: more micro-batches follow. Gradients of all of them would have to be kept.
        """
        if not last:
            raise RuntimeError(
                "gradients of several micro-batches are accumulated, so they all exist until the update, but "
                "release_gradients_in_backward applies each at once: use step(inputs, targets) with a micro_batch_size of the "
                "whole batch, or leave it out"
            )
        self._pause(self._divisor == 0)
        try:
            super().backward(losses, divisor, last=last)
        finally:
            self._pause(False)

    def _pause(self, is_paused: bool) -> None:
        for release in self._releases:
            release.is_paused = is_paused
