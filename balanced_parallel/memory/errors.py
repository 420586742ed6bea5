"""The error for what cannot be told beforehand."""

__all__: list[str] = []

HINT = "give memory.estimate a module that does without it (a size as a plain number, a mask that multiplies)"


class UnknownMemory(ValueError):
    """The memory of an operator cannot be told without values."""
