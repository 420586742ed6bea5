"""Progress of a long search, for the command line. Functions of the package print nothing."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

__all__: list[str] = []

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def telling(listener: Callable[[str], None]) -> Iterator[None]:
    """Calls ``listener`` in this block with each step of a search, before it starts."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def tell(step: str) -> None:
    """Passes a step to the listener, if there is one."""
    if (listener := _listener.get()) is not None:
        listener(step)
