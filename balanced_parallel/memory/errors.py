"""The error of estimates that depend on values."""

__all__: list[str] = []


HINT = "give memory.estimate a module without it (a size as a plain number, a mask that multiplies)"


class UnknownMemory(ValueError):
    """The memory of an operator depends on values, and fake tensors have none."""
