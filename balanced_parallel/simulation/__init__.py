"""Simulated accelerators: kernels run on the CPU, and memory and traffic are counted in bytes."""

from .cluster import Cluster, simulate

__all__ = ["Cluster", "simulate"]
