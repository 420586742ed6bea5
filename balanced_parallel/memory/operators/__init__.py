"""Allocations of single operators that a trace of fake CPU tensors does not have."""
