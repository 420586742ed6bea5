"""A loss as a sum and a weight, divided once."""

from . import sums as sums  # registers with loss_weight
