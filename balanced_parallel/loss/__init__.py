"""A loss as a sum and a weight, divided once."""

from . import linear_heads  # registers with loss_weight

__all__: list[str] = ["linear_heads"]
