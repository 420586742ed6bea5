"""A loss as a sum and a weight, divided once."""

from . import sums  # registers with loss_weight

__all__: list[str] = ["sums"]
