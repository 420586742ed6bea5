"""Shards of parameters over the devices of one process.

Each device owns an equal part of the elements: it reduces their gradients, keeps their optimizer state, and updates them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
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
        learned = set(chosen)
        pieces = [[piece for piece in owned if piece.index in learned] for owned in self._owned]
        sizes = _sizes(pieces, len(chosen))
        layouts = [self._layout(i) for i in chosen]
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
            for owned, total in zip(pieces, sums, strict=True):
                for piece, gradient in zip(owned, coalesced.unpack(self._layouts(owned), total), strict=True):
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
        sizes = _sizes(self._owned, len(self._parameters))
        places = [[piece.places[device] for piece in self.pieces] for device in self._devices]
        if len(self._parameters) == 1 and all(one.is_contiguous() for some in places for one in some):
            whole = [some[0].as_strided((sum(sizes),), (1,)) for some in places]
            transport.all_gather(_own_slices(whole, sizes), whole)  # in place
            torch.autograd.graph.increment_version([one for some in places for one in some])
            return
        gathered = [some[0].new_empty(sum(sizes)) for some in places]
        rows = [coalesced.unpack(self._layouts(self.pieces), flat) for flat in gathered]
        for device, some, packed in zip(self._devices, places, rows, strict=True):
            own = [i for i, piece in enumerate(self.pieces) if piece.owner == device]
            multi_tensor.copy_([packed[i] for i in own], [some[i] for i in own])
        transport.all_gather(_own_slices(gathered, sizes), gathered)
        for device, some, packed in zip(self._devices, places, rows, strict=True):
            others = [i for i, piece in enumerate(self.pieces) if piece.owner != device]
            multi_tensor.copy_([some[i] for i in others], [packed[i] for i in others])

    @functools.cached_property
    def _owned(self) -> list[list[Piece]]:
        """The pieces of each device."""
        return [[piece for piece in self.pieces if piece.owner == device] for device in self._devices]

    @functools.cached_property
    def _is_cut(self) -> set[int]:
        """Indices of the parameters of which no piece is the whole."""
        return {piece.index for piece in self.pieces if not piece.is_whole}

    def _layout(self, index: int) -> coalesced.Layout:
        parameter = self._parameters[index]
        return coalesced.Layout(parameter.shape) if index in self._is_cut else coalesced.layout_of(parameter)

    def _layouts(self, pieces: Sequence[Piece]) -> list[coalesced.Layout]:
        return [self._layout(one.index) if one.is_whole else coalesced.Layout(one.values.shape) for one in pieces]


def _sizes(pieces: Sequence[Sequence[Piece]], parameters: int) -> list[int]:
    """Returns the number of elements on each owner: equal numbers if padding of the last owners suffices.

    Args:
        pieces: of each owner.
        parameters: number of parameters. A single one may be large and is not copied, so it cannot be padded.
    """
    owned = [sum(map(len, some)) for some in pieces]
    total, count = sum(owned), len(owned)
    share = -(-total // count)
    even = [max(0, min(share, total - share * number)) for number in range(count)]
    return [share] * count if owned == even and (parameters > 1 or total == share * count) else owned


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
