"""Runs the replicas of one forward, each in its own thread.

The first failure is raised, with the replica in its message. All other threads have finished before, and none waits forever.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

import torch

from ..runtime.devices import accelerators, on_device
from ..runtime.streams import current_streams, on_streams, without_default_streams
from ..runtime.thread_state import ThreadState
from .failures import locate_failure
from .meeting import Exchange, Meeting, Replica, current_replica, set_current_replica
from .worker_pool import Worker, WorkerPool, shared_pool

__all__: list[str] = []

INTERRUPTED_SECONDS = 5.0  # after Ctrl-C, for replicas that do not end

T = TypeVar("T")


class Workers(Protocol):
    """A function that runs the replicas of one forward, such as :func:`run_replicas`."""

    def __call__(self, work: Sequence[Callable[[], T]], devices: Sequence[torch.device], *, together: bool = True) -> list[T]:
        """Returns the result of ``work[i]()`` for each replica ``i``, with ``devices[i]`` current.

        Args:
            together: replicas exchange values while they run.
        """


def run_replicas(
    work: Sequence[Callable[[], T]],
    devices: Sequence[torch.device],
    *,
    together: bool = True,
    pool: Callable[[], WorkerPool] = shared_pool,
) -> list[T]:
    """Calls ``work[i]()`` for replica ``i`` with ``devices[i]`` current, all at once, and returns the results in order.

    A single replica runs in the calling thread. Several run in one thread each, with the caller's :class:`ThreadState`, context
    variables, and current stream of every device. Replicas on one device share its random numbers, so they take turns. All
    replicas take turns under modes of torch (:attr:`ThreadState.needs_turns`). On the CPU they run one after the other in the
    calling thread unless they exchange values (``together``).

    Args:
        pool: returns the threads. It is called only if there are several.

    Raises:
        BaseException: the first failure (in time), of its own type, with the replica and its device added to the message.
    """
    if len(work) == 1:
        return [_run_alone(work[0], devices[0])]
    if not together and all(device.type == "cpu" for device in devices):
        meeting = Meeting(devices)
        meeting.leave(*range(len(work)))  # an exchange is an error then
        return run_in_turn(work, devices, meeting)
    # A copy between devices runs on the current stream of its source, so each worker needs the caller's stream of every device.
    streams = current_streams(accelerators())
    chosen = without_default_streams(streams)
    state = ThreadState.capture(devices)
    meeting = Meeting([None] * len(work) if state.needs_turns else devices)
    results: dict[int, T] = {}
    failures: list[BaseException] = []  # in order of time; list.append is atomic

    def call(index: int) -> None:
        device = devices[index]
        try:
            if not meeting.begin(index) or failures:
                return
            set_current_replica(Replica(index, meeting))
            with on_streams(chosen), on_device(device, streams.get(device)), state.enter():
                results[index] = work[index]()
        except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt and SystemExit must reach the caller too
            failures.append(locate_failure(error, index, device))
        finally:
            set_current_replica(None)
            meeting.leave(index)  # after the failure was recorded, so replicas that wait for this one fail second

    contexts = [contextvars.copy_context() for _ in work]
    calls = [functools.partial(context.run, call, index) for index, context in enumerate(contexts)]
    _run_in_workers(calls, devices, meeting, pool())
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()  # breaks the cycle of traceback and frame, which would keep the replica's tensors alive
    return [results[index] for index in range(len(work))]


def _run_in_workers(
    calls: Sequence[Callable[[], None]], devices: Sequence[torch.device], meeting: Meeting, pool: WorkerPool
) -> None:
    """Makes each call in the worker of its slot, and waits for all of them."""
    slots = [(device, list(devices[:index]).count(device)) for index, device in enumerate(devices)]
    workers = [pool.take(slot, f"replica on {slot[0]}") for slot in slots]
    running: dict[int, Worker] = {}
    ended: SimpleQueue[int] = SimpleQueue()

    def give_back(index: int) -> None:
        pool.give_back(slots[index], running.pop(index))

    try:
        for index, worker in enumerate(workers):
            running[index] = worker
            worker.start(calls[index], functools.partial(ended.put, index))
        while running:
            give_back(ended.get())
    except BaseException:  # Ctrl-C
        meeting.leave(*range(len(calls)))
        with contextlib.suppress(Empty):
            while running:
                give_back(ended.get(timeout=INTERRUPTED_SECONDS))
        raise  # a worker that still runs is not given back: it ends after its call


def run_in_turn(work: Sequence[Callable[[], T]], devices: Sequence[torch.device], meeting: Exchange) -> list[T]:
    """Calls ``work[i]()`` for each replica ``i``, one after the other in the calling thread, and returns the results."""
    if len(work) == 1:
        return [_run_alone(work[0], devices[0])]
    before = current_replica()
    results = []
    try:
        for index, call in enumerate(work):
            set_current_replica(Replica(index, meeting))
            results.append(_run_alone(call, devices[index], index))
    finally:
        set_current_replica(before)
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
