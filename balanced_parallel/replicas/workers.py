"""Runs one worker per replica. The first failure wins and says which replica; the others are joined; nobody hangs."""

import contextlib
import contextvars
import functools
import itertools
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from ..runtime.devices import current_stream, on_device
from ..runtime.thread_state import ThreadState

__all__: list[str] = []

T = TypeVar("T")


class Exchange(Protocol):
    """A place where the replicas of one forward exchange values."""

    def exchange(self, index: int, number: int, value: Any) -> list[Any]:
        """Returns the values that the replicas bring to round ``number``, in their order. Replica ``index`` brings ``value``."""


class Workers(Protocol):
    """A way to run the replicas of one forward. :func:`run_replicas` is the one for real devices."""

    def __call__(self, work: Sequence[Callable[[], T]], devices: Sequence[torch.device], *, together: bool = True) -> list[T]:
        """Returns the result of ``work[i]()`` for each replica ``i``, with ``devices[i]`` current.

        Args:
            together: replicas exchange values while they run.
        """


class Meeting:
    """Exchange of values between the replicas of one forward. Waiting for a replica that has ended is an error, not a hang."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, Any]] = {}
        self._collected: dict[int, int] = {}
        self._ended: set[int] = set()

    def exchange(self, index: int, number: int, value: Any) -> list[Any]:
        """Brings ``value`` to round ``number``, waits for all others, and returns everyone's, in the order of the replicas."""
        with self._changed:
            brought = self._rounds.setdefault(number, {})
            brought[index] = value
            self._changed.notify_all()
            while len(brought) < self.size:
                if missing := self._ended - brought.keys():
                    raise RuntimeError(
                        f"replica {min(missing)} ended without the exchange that replica {index} waits in: every replica has "
                        "to run the same synchronised layers"
                    )
                self._changed.wait()
            everyone = [brought[other] for other in range(self.size)]
            self._collected[number] = self._collected.get(number, 0) + 1
            if self._collected[number] == self.size:
                del self._rounds[number]
            return everyone

    def has_left(self, index: int) -> bool:
        return index in self._ended

    def leave(self, index: int) -> None:
        with self._changed:
            self._ended.add(index)
            self._changed.notify_all()


@dataclass
class Replica:
    """One replica among several of the running forward, as code inside of it sees itself."""

    index: int
    meeting: Exchange
    exchanges: int = 0

    def exchange(self, value: Any) -> list[Any]:
        """``value`` of every replica, in their order. Each has to call it the same number of times."""
        self.exchanges += 1
        return self.meeting.exchange(self.index, self.exchanges, value)


_thread = threading.local()


def current_replica() -> Replica | None:
    """The replica that this thread runs, where it is one of several."""
    return getattr(_thread, "replica", None)


def run_replicas(work: Sequence[Callable[[], T]], devices: Sequence[torch.device], *, together: bool = True) -> list[T]:
    """Calls ``work[i]()`` for replica ``i`` with ``devices[i]`` current, all at once, and returns the results in order.

    A single replica runs in the calling thread. Several run in a thread each, which carries the caller's
    :class:`ThreadState` and its stream on that device. On the CPU, where each operator has all cores to itself already,
    they run one after the other in the calling thread unless they have to meet (``together``): threads would only take turns
    at the interpreter, and draw random numbers in an order of their own.

    Raises:
        BaseException: the first failure (in time), of its own type, with the replica and its device added to the message.
    """
    if len(work) == 1:
        return [_run_alone(work[0], devices[0])]
    meeting = Meeting(len(work))
    if not together and all(device.type == "cpu" for device in devices):
        for index in range(len(work)):
            meeting.leave(index)  # an exchange is an error, not a hang
        return run_in_turn(work, devices, meeting)
    streams = [current_stream(device) for device in devices]
    ambient = ThreadState.capture(devices)
    results: dict[int, T] = {}
    failures: list[BaseException] = []  # in the order in which they happened: list.append is atomic

    def call(index: int) -> None:
        if meeting.has_left(index):
            return
        _thread.replica = Replica(index, meeting)
        try:
            with ambient.enter(), on_device(devices[index], streams[index]):
                results[index] = work[index]()
        except BaseException as error:  # noqa: BLE001 - a worker must hand on KeyboardInterrupt and SystemExit too
            failures.append(locate_failure(error, index, devices[index]))
        finally:
            meeting.leave(index)  # after the failure was noted: those who wait for this replica fail second

    contexts = [contextvars.copy_context() for _ in work]
    _run_threads([functools.partial(context.run, call, index) for index, context in enumerate(contexts)], meeting)
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()  # else the traceback and this frame hold each other, and with them every tensor of the replica
    return [results[index] for index in range(len(work))]


def _run_threads(work: Sequence[Callable[[], None]], meeting: Meeting) -> None:
    """Runs each in a thread, and joins all of them."""
    threads = [threading.Thread(target=call, name=f"replica-{index}") for index, call in enumerate(work)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C: some may not have been started, and the others are not to wait for them
        for index in range(len(threads)):
            meeting.leave(index)
        for thread in threads:
            if thread.is_alive():  # one that has not come so far finds that it has left
                thread.join()
        raise


def run_in_turn(work: Sequence[Callable[[], T]], devices: Sequence[torch.device], meeting: Exchange) -> list[T]:
    """Calls ``work[i]()`` for each replica ``i``, one after the other in the calling thread, and returns the results."""
    if len(work) == 1:
        return [_run_alone(work[0], devices[0])]
    before = current_replica()
    results = []
    try:
        for index, call in enumerate(work):
            _thread.replica = Replica(index, meeting)
            results.append(_run_alone(call, devices[index], index))
    finally:
        _thread.replica = before
    return results


def _run_alone(work: Callable[[], T], device: torch.device, index: int = 0) -> T:
    """Runs a replica in the calling thread, on the thread's own stream."""
    try:
        with on_device(device, None):
            return work()
    except BaseException as error:
        located = locate_failure(error, index, device)
        if located is error:
            raise
    try:
        raise located
    finally:
        del located  # else the traceback and this frame hold each other


def locate_failure(error: BaseException, index: int, device: torch.device) -> BaseException:
    """Returns ``error`` with "in replica ... on device ..." in its message.

    It is itself where its message is its only argument, else an instance of a subclass of its type with the same arguments and
    attributes. Where its type can be neither changed nor made so, it is itself with a note.
    """
    place = f"in replica {index} on device {device}"
    try:
        return error if _change_message(error, place) else _as_subclass(error, place)
    except Exception:  # noqa: BLE001 - from a constructor or a __str__ of its own
        error.add_note(place)
        return error


def _change_message(error: BaseException, place: str) -> bool:
    """Puts ``place`` into the only argument, if that is the message; else nothing changes."""
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
            with contextlib.suppress(AttributeError, TypeError):  # what is kept outside of __dict__: errno, reason
                setattr(located, name, getattr(error, name))
    return located.with_traceback(error.__traceback__)
