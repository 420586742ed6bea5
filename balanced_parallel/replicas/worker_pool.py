"""Threads that live as long as the models that use them.

cuDNN's plans and handles are ``thread_local``. ``nn.DataParallel`` runs each forward in new threads, which search for plans again
and leak them. Here a replica's forward, its criterion and the next forward run in the same thread.
"""

import atexit
import threading
import weakref
from collections.abc import Callable, Hashable
from queue import SimpleQueue

__all__: list[str] = []

_JOIN_SECONDS = 5.0  # at exit, for a thread whose call does not end

Call = Callable[[], object]


class Worker:
    """A thread that makes one call after the other. It ends with the last reference to this object.

    It keeps no reference to a call that has returned.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Call, Call] | None] = SimpleQueue()
        self.thread = threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
        self.thread.start()
        _workers.add(self)

    def start(self, call: Call, then: Call) -> None:
        """Starts ``call()`` in the thread, and ``then()`` after all references to ``call`` are gone."""
        self._calls.put((call, then))

    def end(self) -> None:
        """Ends the thread after its last call."""
        self._calls.put(None)

    __del__ = end  # does not join: the collector runs in any thread, and under any lock


def _serve(calls: "SimpleQueue[tuple[Call, Call] | None]") -> None:
    while (item := calls.get()) is not None:
        call, then = item
        del item
        call()
        del call
        then()


_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()


@atexit.register
def _end_workers() -> None:
    """Ends all threads before the interpreter does. A thread that runs then could use what is gone already."""
    workers = list(_workers)
    for worker in workers:
        worker.end()
    for worker in workers:
        worker.thread.join(_JOIN_SECONDS)


class WorkerPool:
    """Idle workers. Each belongs to a slot, such as the second replica on a device.

    A slot has several workers if a forward runs inside of another one, or in several threads at once. No method waits.
    """

    def __init__(self) -> None:
        self._idle: dict[Hashable, list[Worker]] = {}

    def take(self, slot: Hashable, name: str) -> Worker:
        """Returns the idle worker of ``slot`` that ran last, or a new one. Threads that a fork has left behind are dropped."""
        idle = self._idle.get(slot, [])
        while idle:
            try:
                worker = idle.pop()
            except IndexError:  # another thread was faster
                break
            if worker.thread.is_alive():
                return worker
        return Worker(name)

    def give_back(self, slot: Hashable, worker: Worker) -> None:
        """Keeps a worker whose call has ended for the next one of ``slot``."""
        self._idle.setdefault(slot, []).append(worker)


_shared: "weakref.WeakValueDictionary[type, WorkerPool]" = weakref.WeakValueDictionary()


def shared_pool() -> WorkerPool:
    """Returns the pool of all models. It ends, with its threads, when no model refers to it any more."""
    return _shared.setdefault(WorkerPool, WorkerPool())
