"""Failures of replicas: the original exception, with the replica and its device in the message."""

import contextlib
import itertools
import types

import torch

__all__: list[str] = []


def locate_failure(error: BaseException, index: int, device: torch.device) -> BaseException:
    """Returns ``error`` with "in replica ... on device ..." in its message.

    If the message is the only argument of ``error``, it is changed. Otherwise an instance of a subclass of its type is returned,
    with the same arguments and attributes. If its type allows neither, a note is added to ``error``.
    """
    place = f"in replica {index} on device {device}"
    try:
        return error if _change_message(error, place) else _as_subclass(error, place)
    except Exception:  # noqa: BLE001 - its constructor or __str__ may raise anything
        error.add_note(place)
        return error


def _change_message(error: BaseException, place: str) -> bool:
    """Appends ``place`` to the only argument if that is the message, and returns True. Otherwise nothing changes."""
    arguments = error.args
    if len(arguments) > 1:
        return False
    message = arguments[0] if arguments else type(error).__name__
    with contextlib.suppress(Exception):
        before = str(error)
        error.args = (f"{message} ({place})",)
        if place in (text := str(error)) and before.strip("'") in text:
            return True
    error.args = arguments
    return False


def _as_subclass(error: BaseException, place: str) -> BaseException:
    kind = type(error)
    message = f"{error} ({place})"
    located_kind = type(kind.__name__, (kind,), {"__str__": lambda self: message, "__module__": kind.__module__})
    located: BaseException = located_kind.__new__(located_kind, *error.args)
    located.args = error.args
    located.__dict__.update(error.__dict__)
    for name, descriptor in itertools.chain.from_iterable(vars(base).items() for base in kind.__mro__):
        if isinstance(descriptor, (types.MemberDescriptorType, types.GetSetDescriptorType)) and not name.startswith("__"):
            with contextlib.suppress(AttributeError, TypeError):  # attributes outside of __dict__: errno, reason
                setattr(located, name, getattr(error, name))
    return located.with_traceback(error.__traceback__)
