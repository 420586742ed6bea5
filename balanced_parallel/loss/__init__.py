"""A loss as a sum and a weight, divided once."""
