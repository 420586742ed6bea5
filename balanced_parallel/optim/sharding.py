"""Shards of parameters over the devices of one process.

Each device owns an equal part of the elements: it reduces their gradients, keeps their optimizer state, and updates them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..replicas.gradient_sums import Gradients, accumulate
from ..runtime import coalesced, multi_tensor, transport

__all__: list[str] = []

T = TypeVar("T", Tensor, Tensor | None)


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

    def __len__(self) -> int:
        return self.stop - self.start

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
        self._parameters = parameters
        self._devices = devices = list(copies[0])
        self.pieces: list[Piece] = []
        share = -(-sum(parameter.numel() for parameter in parameters) // len(devices))  # collectives need equal sizes
        position = 0
        for index, (parameter, copied) in enumerate(zip(parameters, copies, strict=True)):
            start = 0
            while start < parameter.numel() or (start == 0 and parameter.numel() == 0):
                owner = min(position // max(share, 1), len(devices) - 1)
                splits = all(copy.is_contiguous() for copy in copied.values())
                length = min(parameter.numel() - start, share * (owner + 1) - position) if splits else parameter.numel()
                is_whole = length == parameter.numel()
                piece = Piece(parameter, index, start, start + length, is_whole, devices[owner], torch.empty(0), {})
                places = {device: piece.cut(copy.detach()) for device, copy in copied.items()}
                piece.places, piece.values = places, places[piece.owner].detach().requires_grad_()
                self.pieces.append(piece)
                start, position = start + length, position + length
                if length == 0:
                    break

    def take(self, replicas: Sequence[Gradients]) -> Callable[[], None]:
        """Allocates sums of the replicas' gradients on the owners. Returns a function that computes them."""
        chosen = [i for i in range(len(self._parameters)) if any(gradients[i] is not None for gradients in replicas)]
        layouts = [coalesced.layout_of(self._parameters[i]) for i in chosen]
        sizes = self._sizes(chosen)
        flat = []
        for gradients in replicas:
            known = [_check_dense(gradients[i]) for i in chosen]
            first = next((gradient for gradient in known if gradient is not None), None)
            if first is not None:
                filled = [
                    first.new_zeros(layout.shape) if gradient is None else gradient
                    for layout, gradient in zip(layouts, known, strict=True)
                ]
                flat.append(coalesced.pack(layouts, filled, sum(sizes)))
        sums = [flat[0].new_empty(size, device=device) for device, size in zip(self._devices, sizes, strict=True)] if flat else []

        def compute() -> None:
            if not flat:
                return
            transport.reduce_scatter(flat, sums)
            for device, total in zip(self._devices, sums, strict=True):
                owned = [piece for piece in self._owned(device) if piece.index in chosen]
                for piece, gradient in zip(owned, coalesced.unpack(_layouts(owned), total), strict=True):
                    piece.add_gradient(gradient)

        return compute

    def repoint(self, copies: Mapping[nn.Parameter, Mapping[torch.device, Tensor]]) -> None:
        """Takes the pieces' memory from ``copies`` of some parameters, which have moved."""
        for piece in self.pieces:
            if piece.parameter in copies:
                piece.repoint(copies[piece.parameter])

    @torch.no_grad()
    def publish(self) -> None:
        """Copies each owner's values to all other devices."""
        sizes = self._sizes(range(len(self._parameters)))
        places = [[piece.places[device] for piece in self.pieces] for device in self._devices]
        if len(self._parameters) == 1 and all(one.is_contiguous() for some in places for one in some):
            whole = [some[0].as_strided((sum(sizes),), (1,)) for some in places]
            transport.all_gather(_own_slices(whole, sizes), whole)  # in place
            torch.autograd.graph.increment_version([one for some in places for one in some])
            return
        layouts = _layouts(self.pieces)
        gathered = [some[0].new_empty(sum(sizes)) for some in places]
        for device, some, flat in zip(self._devices, places, gathered, strict=True):
            rows = coalesced.unpack(layouts, flat)
            mine = [i for i, piece in enumerate(self.pieces) if piece.owner == device]
            multi_tensor.copy_([rows[i] for i in mine], [some[i] for i in mine])
        transport.all_gather(_own_slices(gathered, sizes), gathered)
        for device, some, flat in zip(self._devices, places, gathered, strict=True):
            rows = coalesced.unpack(layouts, flat)
            others = [i for i, piece in enumerate(self.pieces) if piece.owner != device]
            multi_tensor.copy_([some[i] for i in others], [rows[i] for i in others])

    def _owned(self, device: torch.device) -> list[Piece]:
        return [piece for piece in self.pieces if piece.owner == device]

    def _sizes(self, chosen: Collection[int]) -> list[int]:
        """Returns the number of elements of some parameters on each owner: equal numbers if padding of the last suffices."""
        owned = [sum(len(piece) for piece in self._owned(device) if piece.index in chosen) for device in self._devices]
        total, count = sum(owned), len(owned)
        share = -(-total // count)
        even = [max(0, min(share, total - share * number)) for number in range(count)]
        # a single large parameter is not copied, so it cannot be padded
        return [share] * count if owned == even and (len(chosen) > 1 or total == share * count) else owned


def _layouts(pieces: Sequence[Piece]) -> list[coalesced.Layout]:
    return [coalesced.layout_of(one.parameter) if one.is_whole else coalesced.layout_of(one.values) for one in pieces]


def _own_slices(flat: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    return [one.split(list(sizes))[number] for number, one in enumerate(flat)]


def cut_gradient(piece: Piece, gradient: Tensor | None) -> Tensor | None:
    """Returns a piece of a parameter's gradient."""
    return None if gradient is None else piece.cut(_check_dense(gradient))


def _check_dense(gradient: T) -> T:
    """Returns the gradient.

    Raises:
        TypeError: it is sparse.
    """
    if gradient is not None and gradient.layout != torch.strided:
        raise TypeError(
            "a gradient is sparse, expected dense ones: BalancedOptimizer spreads elements over devices; set sparse=False in the "
            "embedding, or use a plain optimizer"
        )
    return gradient
