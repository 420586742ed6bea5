"""Queries and settings of torch and the machine: devices, streams, threads, process groups,
precision.
"""
