"""The error of estimates that depend on values."""

HINT = "give memory.estimate a module without it (a size as a plain number, a mask that multiplies)"


class UnknownMemory(ValueError):
    """The memory of an operator depends on values, and fake tensors have none."""
