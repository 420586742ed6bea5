"""Torch and the machine: devices, streams, threads, process groups, precision."""
