"""Accelerators that are simulated on the CPU: real numbers, and every byte counted."""

from .cluster import Cluster, simulate

__all__ = ["Cluster", "simulate"]
