"""Workers that run the replicas of one forward, each in its own thread.

The first failure is raised, with a note that names the replica. All other threads have finished
before, and none waits forever. torch's ``parallel_apply`` runs each forward in new threads, in
which cuDNN searches for plans again and leaks them, and passes only the autocast flag of CUDA, no
dtype (pytorch#105682, #125186). Here a replica's forward, its criterion and the next forward run in
the same thread, with the state of the calling thread.
"""

import atexit
import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from ..runtime import torch_private
from ..runtime.devices import Devices, accelerators, on_device
from ..runtime.streams import current_streams, on_streams
from ..runtime.torch_private import DeviceContext

_JOIN_SECONDS = 5.0  # The interpreter waits as long for a thread whose call does not end.
Call = Callable[[], object]


class Worker:
    """A thread that makes one call after the other, until the interpreter ends."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Call, Call] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        _workers.append(self)
        # Python without its lock keeps the context in which a thread was started.
        contextvars.Context().run(self.thread.start)

    def start(self, call: Call, then: Call) -> None:
        """Starts ``call()`` in the thread, and ``then()`` after all references to ``call`` are
        gone.
        """
        self._calls.put((call, then))

    def end(self) -> None:
        """Ends the thread after its last call."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            call, then = item
            del item
            call()
            del call
            then()


# All threads of the process, and by device those that wait for a call. Models that run one after
# the other use the same threads, in which cuDNN keeps its plans.
_workers: list[Worker] = []
_idle: dict[torch.device, list[Worker]] = {}


@atexit.register
def end_workers() -> None:
    """Ends all threads before the interpreter does.

    A thread that runs then could use what is gone already.
    """
    _idle.clear()
    for worker in _workers:
        worker.end()
    while _workers:
        thread = _workers.pop().thread
        if thread.is_alive():  # Ctrl-C may have come before it was started.
            thread.join(_JOIN_SECONDS)


def _take_worker(device: torch.device) -> Worker:
    """Returns the worker of a device that ran last and is idle, or a new one.

    Forwards at the same time need several. Threads that a fork left behind are dropped.
    """
    idle = _idle.setdefault(device, [])
    with contextlib.suppress(IndexError):  # none is left, or another thread was faster
        while not (worker := idle.pop()).thread.is_alive():
            pass
        return worker
    return Worker(f"replica on {device}")


# takes replica and value; returns the values of all replicas
Exchange = Callable[[int, Any], list[Any]]


class Meeting:
    """Exchanges values between the threads of one forward.

    Waiting for a replica that has ended is an error.

    Replicas of one lane run one at a time, in their order. A turn lasts until the replica ends or
    waits in an exchange. ::

        lane 0 | replica 0 up to its exchange | replica 2 up to its exchange | replica 0 to its end | replica 2 to its end
        lane 1 | replica 1 up to its exchange | waits                        | replica 1 to its end
    """

    def __init__(self, lanes: Sequence[Hashable]) -> None:
        self._changed = threading.Condition()
        self._lanes = lanes
        # Each replica has a value of each exchange.
        self._values: list[list[Any]] = [[] for _ in lanes]
        self._ended: set[int] = set()

    def _has_turn(self, index: int) -> bool:
        """Returns True if the replicas of its lane before it are further, and the others as far."""
        count = len(self._values[index])
        return all(
            other in self._ended or len(values) >= count + (other < index)
            for other, values in enumerate(self._values)
            if self._lanes[other] == self._lanes[index]
        )

    def begin(self, index: int) -> bool:
        """Waits for the turn of replica ``index``. Returns False if it has ended before."""
        with self._changed:
            self._changed.wait_for(lambda: index in self._ended or self._has_turn(index))
            return index not in self._ended

    def exchange(self, index: int, value: Any) -> list[Any]:
        """Waits until all replicas have exchanged as often as replica ``index``, and returns their
        values in order.
        """
        with self._changed:
            self._values[index].append(value)
            count = len(self._values[index])
            self._changed.notify_all()
            while (
                min(map(len, self._values)) < count
                or index in self._ended
                or not self._has_turn(index)
            ):
                behind = {other for other, values in enumerate(self._values) if len(values) < count}
                if missing := (self._ended & behind) or (self._ended & {index}):
                    raise RuntimeError(
                        f"replica {min(missing)} ended without the exchange that replica {index} waits in, expected the same "
                        "synchronised layers in each, and as many calls of SumOverRows"
                    )
                self._changed.wait()
            return [values[count - 1] for values in self._values]

    def leave(self, *indices: int) -> None:
        """Marks replicas as ended.

        Replicas that wait for them fail, and those that have not begun will not begin.
        """
        with self._changed:
            self._ended.update(indices)
            self._changed.notify_all()


@dataclass
class Replica:
    """The replica that a thread runs, if it is one of several."""

    index: int
    meeting: Exchange | None  # None if the replicas run one after the other

    def exchange(self, value: Any) -> list[Any]:
        """Returns ``value`` of every replica, in their order.

        All replicas must call this equally often.
        """
        if self.meeting is None:
            raise RuntimeError(
                f"replica {self.index} waits for the others in a synchronised layer or in SumOverRows, and they run one after "
                "the other, expected a SumOverRows that is an attribute of the module or of the criterion, or "
                "DataParallelCriterion(function, sums_rows=True)"
            )
        return self.meeting(self.index, value)


_running: contextvars.ContextVar[Replica | None] = contextvars.ContextVar("replica", default=None)


def current_replica() -> Replica | None:
    """Returns the replica that this thread runs, or None if it is the only one or none runs."""
    return _running.get()


INTERRUPTED_SECONDS = 5.0  # Ctrl-C waits as long for replicas that do not end.
T = TypeVar("T")
Workers = Callable[..., list[Any]]  # takes the arguments of run_replicas
_CPU = {torch.device("cpu")}


def run_replicas(
    work: Sequence[Callable[[], T]], devices: Devices, *, together: bool = True
) -> list[T]:
    """Calls ``work[i]()`` for replica ``i`` with ``devices[i]`` current, all at once, and returns
    the results in order.

    A single replica runs in the calling thread. Several run in one thread each, with the caller's
    :class:`ThreadState`, context variables, and current stream of every device. Replicas on one
    device share its random numbers, so they take turns, and under modes of torch all do. On the CPU
    they run one after the other in the calling thread unless they exchange values (``together``).
    The first failure (in time) is raised, with a note that names the replica.
    """
    if len(work) == 1 or (not together and set(devices) == _CPU):
        return run_in_turn(work, devices, None)
    # A copy between devices runs on the current stream of its source, so each worker needs the
    # caller's stream of every device.
    streams = current_streams(accelerators())
    others = {
        device: stream
        for device, stream in streams.items()
        if stream is not None and stream.stream_id != 0
    }
    state = ThreadState(devices)
    meeting = Meeting([None] * len(work) if state.needs_turns else devices)
    results: dict[int, T] = {}
    failures: list[BaseException] = []  # The first one is the cause. list.append is atomic.

    def call(index: int) -> None:
        device = devices[index]
        try:
            if not meeting.begin(index) or failures:
                return
            # The context is that of this call alone.
            _running.set(Replica(index, meeting.exchange))
            with on_streams(others), on_device(device, streams.get(device)), state.enter():
                results[index] = work[index]()
        except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt and SystemExit must reach the caller too
            error.add_note(f"in replica {index} on device {device}")
            failures.append(error)
        finally:
            # Replicas that wait for this one fail second, as its failure is recorded.
            meeting.leave(index)

    calls = [
        functools.partial(contextvars.copy_context().run, call, index) for index in range(len(work))
    ]
    _run_in_workers(calls, devices, meeting)
    if failures:
        try:
            raise failures[0]
        finally:
            # breaks the cycle of traceback and frame, which would keep the replica's tensors alive
            failures.clear()
    return [results[index] for index in range(len(work))]


def _run_in_workers(calls: Sequence[Call], devices: Devices, meeting: Meeting) -> None:
    """Makes each call in a worker of its device, and waits for all of them."""
    running: dict[int, Worker] = {}
    ended: SimpleQueue[int] = SimpleQueue()

    def wait(timeout: float | None) -> None:
        while running:
            index = ended.get(timeout=timeout)
            _idle[devices[index]].append(running.pop(index))

    try:
        for index, device in enumerate(devices):
            running[index] = _take_worker(device)
            running[index].start(calls[index], functools.partial(ended.put, index))
        wait(None)
    except BaseException:  # Ctrl-C
        meeting.leave(*range(len(calls)))
        with contextlib.suppress(Empty):
            wait(INTERRUPTED_SECONDS)
        raise  # A worker that still runs is not used again.


def run_in_turn(
    work: Sequence[Callable[[], T]], devices: Devices, meeting: Exchange | None
) -> list[T]:
    """Calls ``work[i]()`` for each replica ``i``, one after the other in the calling thread, and
    returns the results.
    """
    token = _running.set(_running.get())
    results = []
    try:
        for index, (call, device) in enumerate(zip(work, devices, strict=True)):
            if len(work) > 1:
                _running.set(Replica(index, meeting))
            try:
                with on_device(device, None):  # The stream is that of the thread.
                    results.append(call())
            except BaseException as error:
                error.add_note(f"in replica {index} on device {device}")
                raise
    finally:
        _running.reset(token)
    return results


class ThreadState:
    """State of the calling thread, as ``with`` blocks of torch set it, with autocast for the types
    of ``devices`` and the CPU.
    """

    def __init__(self, devices: Devices) -> None:
        kinds = sorted({"cpu", *[device.type for device in devices]})
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        ]
        # autocast keeps the parameters that it has cast
        self.autocast_cache = torch.is_autocast_cache_enabled()
        self.threads = torch.get_num_threads()  # OpenMP has a number for each thread.
        self.saved_tensor_hooks = torch_private.saved_tensor_hooks()
        # the last one called first; the default device is one
        self.function_modes = torch_private.function_modes()
        self.dispatch_modes = torch_private.dispatch_modes()

    @property
    def needs_turns(self) -> bool:
        """True if a mode sees the operators of all replicas, and may expect one module to run at a
        time.
        """
        return not all(
            isinstance(mode, DeviceContext) for mode in (*self.function_modes, *self.dispatch_modes)
        )

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Sets this state in the calling thread for the duration of the block."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        with (
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.grad),
            contextlib.ExitStack() as stack,
        ):
            for kind, enabled, dtype in self.autocast:
                if enabled != torch.is_autocast_enabled(kind) or (
                    enabled and dtype != torch.get_autocast_dtype(kind)
                ):
                    stack.enter_context(torch.autocast(kind, dtype, enabled, self.autocast_cache))
            if self.saved_tensor_hooks is not None:
                stack.enter_context(
                    torch.autograd.graph.saved_tensors_hooks(*self.saved_tensor_hooks)
                )
            stack.enter_context(torch_private.pushed(self.function_modes, self.dispatch_modes))
            yield
