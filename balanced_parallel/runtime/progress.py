"""Progress of the ranks, so that an error can name those that others wait for.

A collective that fails says that its time is over, or that a connection is closed, but not why. So each rank leaves the number
of its last reduction in the store of the process group.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from .collectives import rank, world_size

__all__: list[str] = []

_KEY = "balanced_parallel/updates of rank {}"
_updates = 0  # of this process, the present one included


def updates() -> int:
    """Returns the number of the last update whose reduction this rank has begun."""
    return _updates


def continue_from(number: int) -> None:
    """Continues with the number of a checkpoint."""
    global _updates
    _updates = number


def begin_reduction() -> None:
    """Counts an update, after the forward of its last micro-batch."""
    continue_from(_updates + 1)
    if world_size() > 1:
        _store().set(_KEY.format(rank()), str(_updates))


@contextlib.contextmanager
def naming_ranks() -> Iterator[None]:
    """Adds the ranks that have not begun this rank's last reduction to an error of a collective."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        with contextlib.suppress(Exception):  # the store may have ended as well
            missing = _missing()
            if missing:
                error.add_note(f"rank {rank()} waits in the reduction of step {_updates}, and {', '.join(missing)}")
        raise


def _missing() -> list[str]:
    store, found = _store(), []
    for other in range(world_size()):
        key = _KEY.format(other)
        reached = int(store.get(key)) if store.check([key]) else 0
        if reached < _updates:
            found.append(f"rank {other} has not come further than step {reached}")
    return found


def _store() -> Any:
    # there is no public name for the store that all ranks have
    return dist.distributed_c10d._get_default_store()
