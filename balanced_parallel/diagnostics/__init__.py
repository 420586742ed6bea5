"""Comparison with the plain program, and problems found before training."""
