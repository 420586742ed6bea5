"""Who owns which elements of the parameters: each device an equal part, of which it reduces the gradients and keeps the state."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..replicas.deferred_gradients import bring_together, discard
from ..replicas.gradient_sums import Gradients, accumulate, add_up, move_together, own_gradient

__all__: list[str] = []


@dataclass(eq=False)
class Piece:
    """A run of one parameter's elements, in memory of the device that owns it.

    ``values`` is a leaf with the owner's copy as its memory, for an optimizer to update; it has the parameter's shape where
    it is all of the parameter, else it is flat. ``places`` are the same elements in the copies on all devices.
    """

    index: int  # of the parameter in its bucket
    start: int
    stop: int
    is_whole: bool
    owner: torch.device
    values: Tensor
    places: dict[torch.device, Tensor]

    def cut(self, tensor: Tensor) -> Tensor:
        """This piece of a tensor that is shaped like the parameter."""
        return tensor if self.is_whole else tensor.reshape(-1)[self.start : self.stop]

    def add_gradient(self, gradient: Tensor) -> None:
        accumulate(self.values, gradient.reshape(self.values.shape))

    def repoint(self, copies: Mapping[torch.device, Tensor]) -> None:
        """Takes its memory from ``copies`` of the parameter."""
        self.places = {device: self.cut(copy.detach()) for device, copy in copies.items()}
        self.values.data = self.places[self.owner]


class BucketOwners:
    """The pieces of one bucket, as many bytes on each device.

    Args:
        parameters: those of the bucket.
        copies: of each parameter, its copy on each device; the devices are the owners.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], copies: Sequence[dict[torch.device, Tensor]]) -> None:
        devices = list(copies[0])
        total = sum(parameter.numel() for parameter in parameters)
        ends = [total * (number + 1) // len(devices) for number in range(len(devices))]
        self.pieces: list[Piece] = []
        position = 0
        for index, (parameter, copied) in enumerate(zip(parameters, copies, strict=True)):
            start = 0
            while start < parameter.numel() or (start == 0 and parameter.numel() == 0):
                owner = next((number for number, end in enumerate(ends) if position < end), len(devices) - 1)
                splits = all(copy.is_contiguous() for copy in copied.values())
                length = min(parameter.numel() - start, ends[owner] - position) if splits else parameter.numel()
                is_whole = length == parameter.numel()
                piece = Piece(index, start, start + length, is_whole, devices[owner], torch.empty(0), {})
                places = {device: piece.cut(copy.detach()) for device, copy in copied.items()}
                piece.places, piece.values = places, places[piece.owner].detach().requires_grad_()
                self.pieces.append(piece)
                start, position = start + length, position + length
                if length == 0:
                    break

    def take(self, replicas: Sequence[Gradients]) -> None:
        """Sums gradients of the replicas to their owners. Each device sends what it does not own, and receives what it does."""
        for owner in dict.fromkeys(piece.owner for piece in self.pieces):
            mine = [piece for piece in self.pieces if piece.owner == owner]
            cut = [[_cut(piece, gradients[piece.index]) for piece in mine] for gradients in replicas]
            for piece, total in zip(mine, add_up(cut, owner, own=True), strict=True):
                if total is not None:
                    piece.add_gradient(total)

    def repoint(self, copies: Mapping[nn.Parameter, Mapping[torch.device, Tensor]]) -> None:
        """Takes the pieces' memory from ``copies`` of some parameters, which have moved."""
        for parameter in copies:
            for piece in parameter.pieces if isinstance(parameter, Spread) else ():
                piece.repoint(copies[parameter])

    @torch.no_grad()
    def publish(self) -> None:
        """Copies each owner's values to all other devices."""
        devices = list(self.pieces[0].places) if self.pieces else []
        for owner in devices:
            mine = [piece for piece in self.pieces if piece.owner == owner]
            for device in devices:
                if mine and device != owner:
                    moved = move_together([piece.values.detach() for piece in mine], device)
                    torch._foreach_copy_([piece.places[device] for piece in mine], moved)


def _cut(piece: Piece, gradient: Tensor | None) -> Tensor | None:
    if gradient is not None and gradient.layout != torch.strided:
        raise TypeError(
            "a gradient is sparse, expected dense ones: BalancedOptimizer spreads elements over devices; set sparse=False in the "
            "embedding, or use a plain optimizer"
        )
    return None if gradient is None else piece.cut(gradient)


class Spread:
    """A parameter whose gradient lies with its owners. Who asks for ``grad`` finds it here all the same: it is brought together
    then, and spread again before the update. So clipping by hand works, at the price of the traffic."""

    pieces: Sequence[Piece] = ()
    plain: type[Any]  # what it was before

    @property
    def grad(self) -> Tensor | None:
        return _gather_gradient(self)

    @grad.setter
    def grad(self: Any, value: Tensor | None) -> None:
        discard(self)
        for piece in self.pieces:
            piece.values.grad = None
        own_gradient.__set__(self, value)

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
def _spread_class(plain: type[Any]) -> type[Any]:
    return type("SpreadParameter", (Spread, plain), {"plain": plain})


def spread_parameter(parameter: nn.Parameter, pieces: Sequence[Piece]) -> None:
    """From here on its gradients go to the owners of ``pieces``."""
    parameter.__class__ = _spread_class(type(parameter))
    parameter.pieces = pieces  # type: ignore[attr-defined]


def unite_parameter(parameter: nn.Parameter) -> None:
    """An ordinary parameter again, with its gradient."""
    if isinstance(parameter, Spread):
        _gather_gradient(parameter)
        del parameter.pieces
        parameter.__class__ = parameter.plain


@torch.no_grad()
def _gather_gradient(parameter: Any) -> Tensor | None:
    """Brings a parameter's gradient together on its own device."""
    bring_together(parameter)
    own: Tensor | None = own_gradient.__get__(parameter)
    spread = [(piece, piece.values.grad) for piece in parameter.pieces if piece.values.grad is not None]
    if spread:
        own = torch.zeros_like(parameter) if own is None else own.clone()
        for piece, gradient in spread:
            piece.cut(own).add_(gradient.to(parameter.device))
            piece.values.grad = None
        own_gradient.__set__(parameter, own)
    return own


@torch.no_grad()
def spread_gradient(parameter: Any) -> None:
    """Brings what lies in a parameter's own ``grad``, and what replicas hold of it, to the owners."""
    bring_together(parameter)
    own = own_gradient.__get__(parameter)
    if own is None:
        return
    for piece in parameter.pieces:
        gradient = _cut(piece, own)
        assert gradient is not None
        piece.add_gradient(gradient.to(piece.owner, copy=True))
    own_gradient.__set__(parameter, None)
