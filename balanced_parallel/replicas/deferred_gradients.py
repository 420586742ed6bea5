"""Gradients that stay with the replicas for a while, seen as if they were in the parameters' ``grad`` already.

Nobody is told of ``optimizer.zero_grad()`` or ``parameter.grad = None``, which are to discard those gradients too. So for as
long as any are held, ``nn.Parameter.grad`` itself asks the holders: to read it sums what is held, to set it discards that.
Autograd does not go through this attribute. Between windows it is torch's own again, so that an optimizer's step costs nothing.
"""

import threading
import weakref
from typing import Protocol

import torch
from torch import Tensor, nn

from .gradient_sums import own_gradient

__all__: list[str] = []


class Holder(Protocol):
    """Holds gradients of some parameters."""

    def reduce(self) -> None:
        """Sums what is held into the parameters' ``grad``, and releases it."""

    def discard(self, parameter: Tensor) -> None:
        """Forgets what is held of one parameter."""

    def holds(self, parameter: Tensor) -> bool: ...


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
_lock = threading.Lock()


def hold(holder: Holder) -> None:
    """Makes the parameters of ``holder`` ask it for their gradients."""
    with _lock:
        _holders.add(holder)
        nn.Parameter.grad = _asking  # type: ignore[assignment]


def release(holder: Holder) -> None:
    with _lock:
        _holders.discard(holder)
        if not _holders and nn.Parameter.__dict__.get("grad") is _asking:
            del nn.Parameter.grad


def bring_together(parameter: Tensor) -> None:
    """Sums what is held of the parameter, and of those that are held with it."""
    for holder in _holders_of(parameter):
        with torch.inference_mode(False):
            holder.reduce()


def discard(parameter: Tensor) -> None:
    """Forgets what is held of the parameter."""
    for holder in _holders_of(parameter):
        holder.discard(parameter)


def _holders_of(parameter: Tensor) -> list[Holder]:
    if not _holders:
        return []
    with _lock:
        holders = list(_holders)
    return [holder for holder in holders if holder.holds(parameter)]


def _read(parameter: nn.Parameter) -> Tensor | None:
    bring_together(parameter)
    gradient: Tensor | None = own_gradient.__get__(parameter)
    return gradient


def _write(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    discard(parameter)
    own_gradient.__set__(parameter, gradient)


def _clear(parameter: nn.Parameter) -> None:
    discard(parameter)
    own_gradient.__delete__(parameter)


_asking = property(_read, _write, _clear)
