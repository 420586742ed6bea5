"""What a window of micro-batches has accumulated since the last update: losses, weights, and gradients of sums."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .ranks import PendingSum
from .terms import Terms
from .weighting import add_up

__all__: list[str] = []


@dataclass
class Window:
    """One rank's part of it.

    ``total`` is the sum of the losses and ``weight`` what it is to be divided by; gradients are those of the sum divided by
    ``reference``; ``totals`` are the sums of loss and weight over the ranks, on their way since the gradients are.
    """

    total: Tensor
    weight: Tensor | float = 0.0
    reference: float = 1.0
    totals: PendingSum | None = None

    def sum_over_ranks(self) -> None:
        """Sends loss and weight on their way, now that nothing will be added, while the reducing backward runs."""
        weight = torch.as_tensor(self.weight, device=self.total.device)
        self.totals = PendingSum(torch.stack([self.total.double(), weight.double()]))

    def count(self, terms: Terms) -> Tensor:
        """Adds the losses and weights of a micro-batch, and returns what it weighs."""
        device = self.total.device
        self.total = self.total + add_up([term.detach() for term in terms.sums], device)
        weights = [1] * len(terms.sums) if terms.weights is None else terms.weights  # a sum counts, but is not divided
        on_host = all(not isinstance(weight, Tensor) or weight.device.type == "cpu" for weight in weights)
        # what is known without a device stays on the host, where reading it waits for nobody
        weight = add_up(weights, torch.device("cpu") if on_host else device)
        self.weight = self.weight + weight
        return weight

    def factor(self, divides: bool) -> Tensor:
        """What makes gradients of this window, summed over the ranks, those of the loss, or of the sum if it is not divided.
        On the device: nobody waits for it."""
        assert self.totals is not None
        weight = self.totals.wait()[1]
        return self.reference / torch.where(weight == 0, 1.0, weight) if divides else torch.full_like(weight, self.reference)


def scale_gradients(parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
    """Multiplies the gradients there are, in one kernel where torch has one."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and factor != 1:
        torch._foreach_mul_(gradients, factor)
