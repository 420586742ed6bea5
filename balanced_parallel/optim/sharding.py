"""Shards of parameters over the devices of one process.

Each device owns an equal part of the elements: it reduces their gradients, keeps their optimizer state, and updates them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..replicas.gradient_sums import Gradients, accumulate, add_up, move_together
from ..runtime import multi_tensor

__all__: list[str] = []


@dataclass(eq=False)
class Piece:
    """A run of one parameter's elements, in the memory of the device that owns it.

    ``values`` is a leaf for the optimizer to update. It shares the memory of the owner's copy. It has the shape of the parameter
    if it is the whole parameter, and is flat otherwise. ``places`` are the same elements in the copies on all devices.
    """

    parameter: nn.Parameter
    index: int  # of the parameter in its bucket
    start: int
    stop: int
    is_whole: bool
    owner: torch.device
    values: Tensor
    places: dict[torch.device, Tensor]

    def cut(self, tensor: Tensor) -> Tensor:
        """Returns this piece of a tensor that is shaped like the parameter."""
        return tensor if self.is_whole else tensor.reshape(-1)[self.start : self.stop]

    def add_gradient(self, gradient: Tensor) -> None:
        """Adds to the gradient that the owner has."""
        accumulate(self.values, gradient.reshape(self.values.shape))

    def repoint(self, copies: Mapping[torch.device, Tensor]) -> None:
        """Takes its memory from ``copies`` of the parameter."""
        self.places = {device: self.cut(copy.detach()) for device, copy in copies.items()}
        self.values.data = self.places[self.owner]


class BucketOwners:
    """The pieces of one bucket, cut into as many bytes for each device.

    Args:
        parameters: of the bucket.
        copies: for each parameter, its copy on each device. The devices are the owners.
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
                piece = Piece(parameter, index, start, start + length, is_whole, devices[owner], torch.empty(0), {})
                places = {device: piece.cut(copy.detach()) for device, copy in copied.items()}
                piece.places, piece.values = places, places[piece.owner].detach().requires_grad_()
                self.pieces.append(piece)
                start, position = start + length, position + length
                if length == 0:
                    break

    def take(self, replicas: Sequence[Gradients]) -> None:
        """Sums gradients of the replicas to their owners. Each device sends the elements that it does not own."""
        for owner in dict.fromkeys(piece.owner for piece in self.pieces):
            owned = [piece for piece in self.pieces if piece.owner == owner]
            cut = [[cut_gradient(piece, gradients[piece.index]) for piece in owned] for gradients in replicas]
            for piece, total in zip(owned, add_up(cut, owner, own=True), strict=True):
                if total is not None:
                    piece.add_gradient(total)

    def repoint(self, copies: Mapping[nn.Parameter, Mapping[torch.device, Tensor]]) -> None:
        """Takes the pieces' memory from ``copies`` of some parameters, which have moved."""
        for piece in self.pieces:
            if piece.parameter in copies:
                piece.repoint(copies[piece.parameter])

    @torch.no_grad()
    def publish(self) -> None:
        """Copies each owner's values to all other devices."""
        devices = list(self.pieces[0].places) if self.pieces else []
        for owner in devices:
            owned = [piece for piece in self.pieces if piece.owner == owner]
            for device in devices:
                if owned and device != owner:
                    moved = move_together([piece.values.detach() for piece in owned], device)
                    multi_tensor.copy_([piece.places[device] for piece in owned], moved)


def cut_gradient(piece: Piece, gradient: Tensor | None) -> Tensor | None:
    """Returns a piece of a parameter's gradient.

    Raises:
        TypeError: the gradient is sparse.
    """
    if gradient is not None and gradient.layout != torch.strided:
        raise TypeError(
            "a gradient is sparse, expected dense ones: BalancedOptimizer spreads elements over devices; set sparse=False in the "
            "embedding, or use a plain optimizer"
        )
    return None if gradient is None else piece.cut(gradient)
