"""Runs one worker per replica. The first failure wins and says which replica; the others are joined; nobody hangs."""

import contextlib
import itertools
import threading
import types
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from .ambient import AmbientState
from .devices import current_stream, on_device

__all__: list[str] = []

T = TypeVar("T")


def run_replicas(work: Sequence[Callable[[], T]], devices: Sequence[torch.device]) -> list[T]:
    """Calls ``work[i]()`` for replica ``i`` with ``devices[i]`` current, all at once, and returns the results in order.

    A single replica runs in the calling thread. Several run in a thread each, which carries the caller's
    :class:`AmbientState` and its stream on that device.

    Raises:
        BaseException: the first failure (in time), of its own type, with the replica and its device added to the message.
    """
    streams = [current_stream(device) for device in devices]
    ambient = AmbientState.capture(devices)
    results: dict[int, T] = {}
    failures: list[BaseException] = []  # in the order in which they happened: list.append is atomic

    def call(index: int) -> None:
        try:
            with on_device(devices[index], streams[index]):
                results[index] = work[index]()
        except BaseException as error:  # noqa: BLE001 - a worker must hand on KeyboardInterrupt and SystemExit too
            failures.append(locate_failure(error, index, devices[index]))

    def call_in_thread(index: int) -> None:
        with ambient.enter():
            call(index)

    if len(work) == 1:
        call(0)
    else:
        threads = [threading.Thread(target=call_in_thread, args=(index,), name=f"replica-{index}") for index in range(len(work))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()  # else the traceback and this frame hold each other, and with them every tensor of the replica
    return [results[index] for index in range(len(work))]


def locate_failure(error: BaseException, index: int, device: torch.device) -> BaseException:
    """``error`` with "in replica ... on device ..." in its message: itself where its message is its only argument, else an
    instance of a subclass of its type with the same arguments and attributes."""
    place = f"in replica {index} on device {device}"
    if len(error.args) <= 1:
        error.args = (f"{error.args[0] if error.args else type(error).__name__} ({place})",)
    if place in str(error):
        return error
    kind = type(error)
    message = f"{error} ({place})"
    located_kind = type(kind.__name__, (kind,), {"__str__": lambda self: message, "__module__": kind.__module__})
    located: BaseException = located_kind.__new__(located_kind, *error.args)
    located.__dict__.update(error.__dict__)
    for name, descriptor in itertools.chain.from_iterable(vars(base).items() for base in kind.__mro__):
        if isinstance(descriptor, (types.MemberDescriptorType, types.GetSetDescriptorType)) and name[0] != "_":
            with contextlib.suppress(AttributeError, TypeError):  # what a built-in type keeps outside of __dict__: errno, reason
                setattr(located, name, getattr(error, name))
    return located.with_traceback(error.__traceback__)
