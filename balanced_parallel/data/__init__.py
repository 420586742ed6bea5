"""Batches whose rows differ in cost, and the batches of each rank."""
