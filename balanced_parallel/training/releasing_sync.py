"""Synchronisation for optimizers that update in the backward: gradients must be final as soon as they are made."""

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from ..loss.weighting import LossSum, Weight
from ..savings.gradient_release import GradientRelease, release_of
from .gradient_sync import GradientSync
from .replica_sync import ReplicaSync

__all__: list[str] = []


def releasing(sync: GradientSync, optimizers: Sequence[Optimizer], minimum: float, max_grad_norm: float | None) -> GradientSync:
    """Returns ``sync``, or a :class:`ReleasingSync` if an optimizer updates in the backward.

    Raises:
        ValueError: gradients are clipped, which needs all of them.
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
