"""A loss as a sum and a weight, divided once."""

from . import kinds as kinds  # registers with loss_weight
