"""Allocations of single operators that a trace on fake CPU tensors does not show."""
