"""Losses, weights and gradients of sums that a window of micro-batches has accumulated since the last update."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..loss.partial_sums import Terms
from ..loss.weighting import Weight, add_up
from ..runtime.collectives import sum_over_ranks, world_size
from ..runtime.devices import move

__all__: list[str] = []


@dataclass
class Window:
    """One rank's part of it.

    ``total`` is the sum of the losses and ``weight`` what it is to be divided by; gradients are those of the sum divided by
    ``reference``. Once it is ``reduced`` over the ranks, nothing can be added.
    """

    total: Tensor
    divides: bool  # not where the criterion is a sum
    weight: Weight = 0
    reference: float = 1.0
    has_gradients: bool = False
    reduced: bool = False

    def count(self, terms: Terms) -> Weight:
        """Adds the losses and weights of a micro-batch, and returns what it weighs."""
        device = self.total.device
        for term in terms.sums:
            self.total = self.total + move(term.detach(), device)
        return self.weigh([1] * len(terms.sums) if terms.weights is None else terms.weights)  # a sum counts, but is not divided

    def weigh(self, weights: Sequence[Weight]) -> Weight:
        """Adds weights, and returns their sum. What is known without a device stays on the host, where reading it waits for
        nobody."""
        on_host = all(not isinstance(weight, Tensor) or weight.is_cpu for weight in weights)
        weight = sum(map(float, weights)) if on_host else add_up(weights, self.total.device)
        self.weight = self.weight + weight
        return weight

    def foresee(self, to_come: Weight) -> None:
        """Has gradients divided by what the window seems to weigh: if it does, nothing is left to divide in the end. For what
        only a device knows, this does not wait; and what is accumulated keeps its reference."""
        expected = self.weight + to_come
        if self.divides and not self.has_gradients and isinstance(expected, float) and 0 < expected < math.inf:
            self.reference = expected

    def expect(self, to_come: Weight, before: float, *, settled: bool) -> float:
        """Divides gradients while they accumulate, where float16 could not hold them: by about the weight of the whole window,
        as the plain program's are. The divisor grows with the window.

        Args:
            to_come: weight of the rows that are known to follow.
            before: what the window before weighed, over all ranks.
            settled: whether the window is complete. All ranks ask then, and agree.

        Returns:
            The factor for gradients that were divided before.
        """
        expected = max(float(self.weight + to_come), before / world_size())
        if world_size() > 1:
            mine = torch.tensor(expected, dtype=torch.float64)
            expected = float(sum_over_ranks(mine)) if settled else expected * world_size()
        return self.settle(expected, may_shrink=settled)

    def settle(self, expected: float, *, may_shrink: bool = True) -> float:
        """Changes the reference to a power of two near the ``expected`` weight, which rounds nothing, and returns what gradients
        that were divided by the one before are to be multiplied by."""
        before = self.reference
        if self.divides and 0 < expected < math.inf:
            near = 2.0 ** round(math.log2(expected))
            self.reference = near if may_shrink else max(near, before)
        return before / self.reference


def scale_gradients(parameters: Iterable[Tensor], factor: float, *, bucketed: bool = False) -> None:
    """Multiplies the gradients there are.

    Args:
        bucketed: gradients are views of a reducer's buckets, of which each is multiplied as a whole: it holds nothing else.
    """
    if factor == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if bucketed:
        wholes = [gradient if gradient._base is None else gradient._base for gradient in gradients]
        gradients = list({id(whole): whole for whole in wholes}.values())
    if gradients:
        torch._foreach_mul_(gradients, factor)
