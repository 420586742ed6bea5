"""Loss, weight and gradients of the micro-batches since the last update.

Gradients are those of a sum of losses. They are divided by a prediction of the total weight (``divisor``) as they are made. What
the prediction lacks is one factor, before the update.

A weight on a device is copied to the host before the backward of its micro-batch is launched, and read after the last one. So the
host waits for no backward.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..loss.batch_losses import BatchLosses
from ..loss.criterion import DataParallelCriterion
from ..loss.weighting import LossSum, Weight, add_up
from ..runtime.devices import move
from ..runtime.host_copies import start_copy
from ..runtime.precision import Precision, scaled
from ..runtime.progress import begin_reduction
from .divisors import larger, power_of_two
from .gradient_sync import GradientSync, Settings

__all__: list[str] = []


class Accumulation:
    """Micro-batches that are not applied yet, on one rank.

    Args:
        sync: of their gradients.
        criterion: computes the losses.
        trained: the parameters that get gradients, by name.
        device: of the loss.
        precision: of their forward. With float16, gradients are kept near their final size.
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
        dtypes = {tensor.dtype.to_real() for tensor in trained.values()}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.total = torch.zeros((), dtype=dtype, device=device)
        self.weight: Weight = 0.0
        self._weight_on_host: Weight | Callable[[], Tensor] = 0.0
        self.is_reduced = False  # over replicas and ranks: nothing can be added
        self._sync = sync
        self._is_mean = criterion.reduction != "sum"
        self._scaler = precision.scaler_on(device)
        self._in_float16 = self._scaler is not None or torch.float16 in dtypes or _autocasts_to_float16(device)
        self._weight_before = weight_before
        self._divisor: Weight = 1.0  # of the gradients that exist
        self._has_gradients = False

    def begin_batch(self, losses: BatchLosses) -> None:
        """Counts the weight that the targets of a batch tell."""
        self._add_weight(losses.weight)
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
        self._add_weight(weight)
        for one in losses:
            self.total = self.total + move(one.total.detach(), self.total.device)
        if last:
            begin_reduction()
            self._sync.start(LossSum(self.total, self.weight))
        self._predict_divisor(weight * followers, last=last)
        roots = [scaled(one.total, self._scaler) for one in losses]
        self._sync.backward(roots, self._divisor, last=last)
        self._has_gradients, self.is_reduced = True, last

    def finish(self, minimum: float, settings: Settings) -> tuple[Tensor, float, Weight]:
        """Reduces what is not reduced yet.

        Args:
            minimum: of the divisor.
            settings: of the ranks, which compare them.

        Returns:
            The loss over everything, its weight, and the factor for the gradients.
        """
        for zeros in self._sync.forwards_without_rows(is_reduced=self.is_reduced):
            self.backward([LossSum(zero, 0.0) for zero in zeros], 0, last=True)
        whole = self._sync.finish(LossSum(self.total, self.weight), settings)
        known = self._weight_on_host if whole.weight is self.weight else whole.weight
        weight = max(float(known() if callable(known) else known or 0.0), minimum)
        divisor = weight if self._is_mean and weight else 1.0
        loss = whole.total / divisor if weight else torch.full_like(whole.total, torch.nan)
        return loss.to(self.total.dtype), weight, self._divisor * self._sync.gradient_scale / divisor

    def _predict_divisor(self, to_come: Weight, *, last: bool) -> None:
        if not self._is_mean:
            return
        expected = _sum([self.weight, to_come], self.total.device)
        if not self._in_float16:
            if not self._has_gradients:
                self._divisor = _positive(self._sync.first_divisor(expected, self._weight_before))
            return
        before, whole = self._divisor, self._sync.whole_weight(expected, last=last)
        near = power_of_two(whole if last else larger(whole, self._weight_before), otherwise=before)
        self._divisor = near if last else larger(near, before)
        if self._has_gradients and (isinstance(self._divisor, Tensor) or self._divisor != before):
            self._sync.rescale(before / self._divisor)

    def _add_weight(self, weight: Weight) -> None:
        """Adds a weight. A sum on a device starts its way to the host."""
        before, self.weight = self.weight, _sum([self.weight, weight], self.total.device)
        if self.weight is not before:
            self._weight_on_host = start_copy(self.weight) if isinstance(self.weight, Tensor) else self.weight


def _autocasts_to_float16(device: torch.device) -> bool:
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.float16


def _positive(divisor: float) -> float:
    return divisor if 0 < divisor < math.inf else 1.0


def _sum(weights: Sequence[Weight], device: torch.device) -> Weight:
    """Returns the sum of weights. It is a number if all are on the host, and no device is read."""
    on_devices = [weight for weight in weights if isinstance(weight, Tensor) and not weight.is_cpu]
    on_host = float(sum(float(weight) for weight in weights if not isinstance(weight, Tensor) or weight.is_cpu))
    if not on_devices:
        return on_host
    return add_up([*on_devices, on_host] if on_host else on_devices, device)
