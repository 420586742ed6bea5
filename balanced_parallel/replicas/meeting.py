"""The replicas of one forward: they exchange values while they run, and some of them take turns."""

import threading
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__: list[str] = []


class Exchange(Protocol):
    """A place where the replicas of one forward exchange values."""

    def exchange(self, index: int, number: int, value: Any) -> list[Any]:
        """Returns the values of round ``number``, in the order of the replicas. ``value`` is that of replica ``index``."""


class Meeting:
    """Exchanges values between the threads of one forward. Waiting for a replica that has ended is an error.

    Replicas of one lane run one at a time, in their order. A turn lasts until the replica ends or waits in an exchange. ::

        lane 0 | replica 0 up to its exchange | replica 2 up to its exchange | replica 0 to its end | replica 2 to its end
        lane 1 | replica 1 up to its exchange | waits                        | replica 1 to its end

    Args:
        lanes: the lane of each replica.
    """

    def __init__(self, lanes: Sequence[Hashable]) -> None:
        self.size = len(lanes)
        self._changed = threading.Condition()
        turns: dict[Hashable, deque[int]] = {lane: deque() for lane in lanes}
        for index, lane in enumerate(lanes):
            turns[lane].append(index)
        self._turns = [turns[lane] for lane in lanes]  # by replica: those of its lane that run, the next one first
        self._rounds: dict[int, dict[int, Any]] = {}  # by round, the values by replica
        self._returned: dict[int, int] = {}  # by round, how many replicas have its values
        self._ended: set[int] = set()

    def begin(self, index: int) -> bool:
        """Waits for the turn of replica ``index``. Returns False if it has ended before."""
        with self._changed:
            self._changed.wait_for(lambda: index in self._ended or self._turns[index][0] == index)
            return index not in self._ended

    def exchange(self, index: int, number: int, value: Any) -> list[Any]:
        """Adds ``value`` to round ``number``, waits for the other replicas, and returns all values in their order.

        Raises:
            RuntimeError: a replica has ended without a value for this round.
        """
        with self._changed:
            values = self._rounds.setdefault(number, {})
            values[index] = value
            turns = self._turns[index]
            turns.rotate(-1)
            self._changed.notify_all()
            while len(values) < self.size or index in self._ended or turns[0] != index:
                if missing := (self._ended - values.keys()) or (self._ended & {index}):
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

    def leave(self, *indices: int) -> None:
        """Marks replicas as ended. Replicas that wait for them fail, and those that have not begun will not begin."""
        with self._changed:
            for index in set(indices) - self._ended:
                self._ended.add(index)
                self._turns[index].remove(index)
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


class _Thread(threading.local):
    replica: Replica | None = None


_thread = _Thread()


def current_replica() -> Replica | None:
    """Returns the replica that this thread runs, or None if it is the only one or none runs."""
    return _thread.replica


def set_current_replica(replica: Replica | None) -> None:
    """Sets the replica that this thread runs."""
    _thread.replica = replica
