"""Optimizer state spread over devices or ranks."""
