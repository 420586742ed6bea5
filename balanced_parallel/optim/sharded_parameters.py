"""Parameters whose gradients are on the devices that own their elements."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..replicas.deferred_gradients import bring_together, discard
from ..runtime.tensors import get_gradient, set_gradient
from .sharding import Piece, cut_gradient

__all__: list[str] = []


class ShardedParameter:
    """A parameter whose gradient is on the owners of its pieces.

    Reading ``grad`` gathers the gradient. It is sharded again before the update. So clipping by hand works, but moves gradients
    twice.
    """

    pieces: Sequence[Piece] = ()
    plain: type[Any]  # the class of the parameter before

    @property
    def grad(self) -> Tensor | None:
        """The whole gradient, on the device of the parameter."""
        return _gather_gradient(self)

    @grad.setter
    def grad(self: Any, value: Tensor | None) -> None:
        discard(self)
        for piece in self.pieces:
            piece.values.grad = None
        set_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return nn.Parameter, (self.detach(), self.requires_grad)


@functools.cache
def _sharded_class(plain: type[Any]) -> type[Any]:
    return type("ShardedParameter", (ShardedParameter, plain), {"plain": plain})


def shard_parameter(parameter: nn.Parameter, pieces: Sequence[Piece]) -> None:
    """Sends the gradients of a parameter to the owners of ``pieces`` from now on."""
    parameter.__class__ = _sharded_class(type(parameter))
    parameter.pieces = pieces  # type: ignore[attr-defined]


def unshard_parameter(parameter: nn.Parameter) -> None:
    """Turns a sharded parameter into an ordinary one again, with its gradient."""
    if isinstance(parameter, ShardedParameter):
        _gather_gradient(parameter)
        del parameter.pieces
        parameter.__class__ = parameter.plain


def pieces_of(parameter: Tensor) -> Sequence[Piece]:
    """Returns the pieces of a sharded parameter; empty for other parameters."""
    return parameter.pieces if isinstance(parameter, ShardedParameter) else ()


@torch.no_grad()
def _gather_gradient(parameter: Any) -> Tensor | None:
    """Gathers a parameter's gradient on its own device."""
    bring_together(parameter)
    own = get_gradient(parameter)
    sharded = [(piece, piece.values.grad) for piece in parameter.pieces if piece.values.grad is not None]
    if sharded:
        own = torch.zeros_like(parameter) if own is None else own.clone()
        for piece, gradient in sharded:
            piece.cut(own).add_(gradient.to(parameter.device))
            piece.values.grad = None
        set_gradient(parameter, own)
    return own


@torch.no_grad()
def shard_gradient(parameter: Any) -> None:
    """Moves a parameter's own ``grad``, and its gradients on the replicas, to the owners."""
    bring_together(parameter)
    own = get_gradient(parameter)
    if own is None:
        return
    for piece in parameter.pieces:
        gradient = cut_gradient(piece, own)
        assert gradient is not None
        piece.add_gradient(gradient.to(piece.owner, copy=True))
    set_gradient(parameter, None)
