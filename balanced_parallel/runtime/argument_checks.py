"""Checks of the types of arguments, with errors that name the argument, the value and what is expected in its place."""

import math
import numbers
import reprlib
from typing import Any

__all__: list[str] = []


def check_type(name: str, value: Any, kinds: Any, expected: str) -> None:
    """Checks that a value is of a type.

    Args:
        name: of the argument.
        value: any object.
        kinds: types, as for ``isinstance``. ``collections.abc.Callable`` is that of a function.
        expected: describes them.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"{name}={reprlib.repr(value)}, expected {expected}")


def check_number(name: str, value: Any, expected: str, *, at_least: float = -math.inf, whole: bool = False) -> None:
    """Checks that a value is a finite number. ``True`` is not a number here.

    Args:
        name: of the argument.
        value: any object.
        expected: describes the numbers that are possible.
        at_least: the smallest one.
        whole: allows integers only.

    Raises:
        TypeError: it is not a number.
        ValueError: it is too small, infinite or nan.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name}={value}, expected {expected}")
    check_type(name, value, numbers.Integral if whole else numbers.Real, expected)
    if not at_least <= value < math.inf:
        raise ValueError(f"{name}={value!r}, expected {expected}")
