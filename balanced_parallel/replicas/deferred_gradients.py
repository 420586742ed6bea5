"""Gradients that stay on the replicas for some time, but can be read and discarded through ``parameter.grad``.

``optimizer.zero_grad()`` and ``parameter.grad = None`` must discard these gradients too, and torch has no hook on either. So
while a bucket has deferred gradients, ``nn.Parameter.grad`` is a property. Reading it sums the deferred gradients first. Setting
it discards them. Autograd does not use this attribute. As soon as no gradients are deferred, it is torch's own again, so an
optimizer's step costs nothing extra.
"""

import threading
import weakref
from typing import Protocol

import torch
from torch import Tensor, nn

from ..runtime.tensors import get_gradient, set_gradient

__all__: list[str] = []


class Holder(Protocol):
    """An object with deferred gradients of some parameters, such as a bucket."""

    def reduce(self) -> None:
        """Sums the deferred gradients into the parameters' ``grad``, and releases them."""

    def discard(self, parameter: Tensor) -> None:
        """Forgets the deferred gradients of one parameter."""

    def holds(self, parameter: Tensor) -> bool:
        """Returns True if there may be deferred gradients of a parameter."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
_lock = threading.Lock()


def hold(holder: Holder) -> None:
    """Registers ``holder``: from now on ``grad`` of its parameters includes its deferred gradients."""
    with _lock:
        _holders.add(holder)
        nn.Parameter.grad = _property  # type: ignore[assignment]


def release(holder: Holder) -> None:
    """Removes ``holder``. After the last one, ``nn.Parameter.grad`` is torch's own attribute again."""
    with _lock:
        _holders.discard(holder)
        if not _holders and nn.Parameter.__dict__.get("grad") is _property:
            del nn.Parameter.grad


def bring_together(parameter: Tensor) -> None:
    """Reduces the deferred gradients of a parameter, and those of all parameters of the same holders."""
    for holder in _holders_of(parameter):
        with torch.inference_mode(False):
            holder.reduce()


def discard(parameter: Tensor) -> None:
    """Forgets the deferred gradients of a parameter."""
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
    return get_gradient(parameter)


def _write(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    discard(parameter)
    set_gradient(parameter, gradient)


def _delete(parameter: nn.Parameter) -> None:
    _write(parameter, None)


_property = property(_read, _write, _delete)
