"""Runs the replicas of one forward, each in its own thread.

The first failure is raised, with the replica in its message. All other threads are joined before, and none waits forever.
"""

import contextvars
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from ..runtime.devices import current_stream, on_device
from ..runtime.thread_state import ThreadState
from .failures import locate_failure

__all__: list[str] = []

T = TypeVar("T")


class Exchange(Protocol):
    """A place where the replicas of one forward exchange values."""

    def exchange(self, index: int, number: int, value: Any) -> list[Any]:
        """Returns the values of round ``number``, in the order of the replicas. ``value`` is that of replica ``index``."""


class Workers(Protocol):
    """A function that runs the replicas of one forward, such as :func:`run_replicas`."""

    def __call__(self, work: Sequence[Callable[[], T]], devices: Sequence[torch.device], *, together: bool = True) -> list[T]:
        """Returns the result of ``work[i]()`` for each replica ``i``, with ``devices[i]`` current.

        Args:
            together: replicas exchange values while they run.
        """


class Meeting:
    """Exchanges values between the threads of one forward. Waiting for a replica that has ended is an error."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, Any]] = {}  # by round, the values by replica
        self._returned: dict[int, int] = {}  # by round, how many replicas have its values
        self._ended: set[int] = set()

    def exchange(self, index: int, number: int, value: Any) -> list[Any]:
        """Adds ``value`` to round ``number``, waits for the other replicas, and returns all values in their order.

        Raises:
            RuntimeError: a replica has ended without a value for this round.
        """
        with self._changed:
            values = self._rounds.setdefault(number, {})
            values[index] = value
            self._changed.notify_all()
            while len(values) < self.size:
                if missing := self._ended - values.keys():
                    raise RuntimeError(
                        f"replica {min(missing)} ended without the exchange that replica {index} waits in: every replica has "
                        "to run the same synchronised layers"
                    )
                self._changed.wait()
            in_order = [values[other] for other in range(self.size)]
            self._returned[number] = self._returned.get(number, 0) + 1
            if self._returned[number] == self.size:
                del self._rounds[number]
            return in_order

    def has_left(self, index: int) -> bool:
        """Returns True if replica ``index`` has ended."""
        return index in self._ended

    def leave(self, index: int) -> None:
        """Marks replica ``index`` as ended. Replicas that wait for it fail."""
        with self._changed:
            self._ended.add(index)
            self._changed.notify_all()


@dataclass
class Replica:
    """The replica that a thread runs, if it is one of several."""

    index: int
    meeting: Exchange
    exchanges: int = 0

    def exchange(self, value: Any) -> list[Any]:
        """Returns ``value`` of every replica, in their order. All replicas must call this equally often."""
        self.exchanges += 1
        return self.meeting.exchange(self.index, self.exchanges, value)


_thread = threading.local()


def current_replica() -> Replica | None:
    """Returns the replica that this thread runs, or None if it is the only one or none runs."""
    return getattr(_thread, "replica", None)


def run_replicas(work: Sequence[Callable[[], T]], devices: Sequence[torch.device], *, together: bool = True) -> list[T]:
    """Calls ``work[i]()`` for replica ``i`` with ``devices[i]`` current, all at once, and returns the results in order.

    A single replica runs in the calling thread. Several run in one thread each, with the caller's :class:`ThreadState` and
    stream on that device. On the CPU they run one after the other in the calling thread unless they exchange values
    (``together``). Each operator uses all cores there, so threads would only compete for the interpreter, and the order of
    random numbers would vary.

    Raises:
        BaseException: the first failure (in time), of its own type, with the replica and its device added to the message.
    """
    if len(work) == 1:
        return [_run_alone(work[0], devices[0])]
    meeting = Meeting(len(work))
    if not together and all(device.type == "cpu" for device in devices):
        for index in range(len(work)):
            meeting.leave(index)  # an exchange is an error then
        return run_in_turn(work, devices, meeting)
    streams = [current_stream(device) for device in devices]
    ambient = ThreadState.capture(devices)
    results: dict[int, T] = {}
    failures: list[BaseException] = []  # in order of time; list.append is atomic

    def call(index: int) -> None:
        if meeting.has_left(index):
            return
        _thread.replica = Replica(index, meeting)
        try:
            with ambient.enter(), on_device(devices[index], streams[index]):
                results[index] = work[index]()
        except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt and SystemExit must reach the caller too
            failures.append(locate_failure(error, index, devices[index]))
        finally:
            meeting.leave(index)  # after the failure was recorded, so replicas that wait for this one fail second

    contexts = [contextvars.copy_context() for _ in work]
    _run_threads([functools.partial(context.run, call, index) for index, context in enumerate(contexts)], meeting)
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()  # breaks the cycle of traceback and frame, which would keep the replica's tensors alive
    return [results[index] for index in range(len(work))]


def _run_threads(work: Sequence[Callable[[], None]], meeting: Meeting) -> None:
    """Calls each function in its own thread, and joins all threads."""
    threads = [threading.Thread(target=call, name=f"replica-{index}") for index, call in enumerate(work)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C: threads that were not started must not be waited for
        for index in range(len(threads)):
            meeting.leave(index)
        for thread in threads:
            if thread.is_alive():  # a thread that has not begun its work skips it
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
        del located  # breaks the cycle of traceback and frame
