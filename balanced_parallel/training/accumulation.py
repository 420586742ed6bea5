"""Loss, weight and gradients of the micro-batches since the last update.

Gradients are those of a sum of losses. They are divided by a prediction of the total weight (``divisor``) as they are made. What
the prediction lacks is one factor, before the update.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..loss.batch_losses import BatchLosses
from ..loss.criterion import DataParallelCriterion
from ..loss.weighting import LossSum, Weight, add_up
from ..runtime.devices import move
from ..runtime.precision import Precision
from .gradient_sync import GradientSync

__all__: list[str] = []


class Accumulation:
    """Micro-batches that are not applied yet, on one rank.

    Args:
        sync: of their gradients.
        criterion: computes the losses.
        trained: the parameters that get gradients, by name.
        device: of the loss.
        precision: of their forward. With float16, gradients are kept near their final size, at the price of a wait per
            micro-batch.
        weight_before: the weight of the last update, over everything.
    """

    def __init__(
        self,
        sync: GradientSync,
        criterion: DataParallelCriterion,
        trained: Mapping[str, Tensor],
        device: torch.device,
        precision: Precision,
        weight_before: float,
    ) -> None:
        dtypes = {tensor.dtype for tensor in trained.values()}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.total = torch.zeros((), dtype=dtype, device=device)
        self.weight: Weight = 0.0
        self.is_reduced = False  # over replicas and ranks: nothing can be added
        self._sync = sync
        self._is_mean = criterion.reduction != "sum"
        self._scaler = precision.scaler_on(device)
        self._in_float16 = self._scaler is not None or torch.float16 in dtypes or _autocasts_to_float16(device)
        self._weight_before = weight_before
        self._divisor = 1.0  # of the gradients that exist
        self._has_gradients = False

    def begin_batch(self, losses: BatchLosses) -> None:
        """Counts the weight that the targets of a batch tell."""
        self.weight = _sum([self.weight, losses.weight], self.total.device)
        self._is_mean = self._is_mean and not losses.is_divided

    def backward(self, losses: Sequence[LossSum], followers: int, *, last: bool) -> None:
        """Counts the losses of a micro-batch, and runs its backward.

        Args:
            losses: one for each replica.
            followers: micro-batches of the same batch that follow, and probably weigh as much.
            last: reduces all gradients.
        """
        weights = [1.0 if one.weight is None else one.weight for one in losses]  # a sum counts, but is not divided
        weight = _sum(weights, self.total.device)
        self.weight = _sum([self.weight, weight], self.total.device)
        for one in losses:
            self.total = self.total + move(one.total.detach(), self.total.device)
        if last:
            self._sync.start(LossSum(self.total, self.weight))
        self._predict_divisor(weight * followers, last=last)
        roots = [one.total if self._scaler is None else self._scaler.scale(one.total) for one in losses]
        self._sync.backward(roots, self._divisor, last=last)
        self._has_gradients, self.is_reduced = True, last

    def finish(self, minimum: float) -> tuple[Tensor, float, float]:
        """Reduces what is not reduced yet.

        Args:
            minimum: of the divisor.

        Returns:
            The loss over everything, its weight, and the factor for the gradients.
        """
        if not self.is_reduced:
            self.backward([LossSum(zero, 0.0) for zero in self._sync.forward_without_rows()], 0, last=True)
        whole = self._sync.finish(LossSum(self.total, self.weight))
        weight = max(float(0.0 if whole.weight is None else whole.weight), minimum)
        divisor = weight if self._is_mean and weight else 1.0
        loss = whole.total / divisor if weight else torch.full_like(whole.total, torch.nan)
        return loss.to(self.total.dtype), weight, self._divisor * self._sync.gradient_scale / divisor

    def _predict_divisor(self, to_come: Weight, *, last: bool) -> None:
        expected = self.weight + to_come
        if not self._is_mean:
            return
        if not self._in_float16:
            if not self._has_gradients:
                self._divisor = _positive(self._sync.first_divisor(expected, self._weight_before))
            return
        whole = self._sync.whole_weight(expected, last=last)
        before, self._divisor = self._divisor, self._near(whole if last else max(whole, self._weight_before), may_shrink=last)
        if self._divisor != before:
            self._sync.rescale(before / self._divisor)

    def _near(self, expected: float, *, may_shrink: bool) -> float:
        """Returns a power of two near the expected weight, which rounds nothing."""
        if not 0 < expected < math.inf:
            return self._divisor
        return power_of_two(expected) if may_shrink else max(power_of_two(expected), self._divisor)


def _autocasts_to_float16(device: torch.device) -> bool:
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.float16


def power_of_two(number: float) -> float:
    """Returns the power of two nearest to a positive number, on a logarithmic scale."""
    return float(2.0 ** round(math.log2(number)))


def _positive(divisor: float) -> float:
    return divisor if 0 < divisor < math.inf else 1.0


def _sum(weights: Sequence[Weight], device: torch.device) -> Weight:
    """Returns the sum of weights. On the host as long as all are there, so that no device is waited for."""
    on_host = all(not isinstance(weight, Tensor) or weight.is_cpu for weight in weights)
    return float(sum(map(float, weights))) if on_host else add_up(weights, device)
