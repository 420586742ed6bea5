"""An optimizer whose state is sharded over the devices of one process.

Shards of parameters over the devices of one process.

Each device owns an equal part of the elements: it reduces their gradients, keeps their optimizer state, and updates them.

Parameters whose gradients are on the devices that own their elements.
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..replicas.buckets import Gradients, accumulate
from ..replicas.model import DataParallelModel
from ..replicas.replicas import Sharding
from ..runtime import torch_private, transport
from ..runtime.torch_private import get_gradient, set_gradient

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
        accumulate([self.values], [gradient.reshape(self.values.shape)])

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
                flat.append(transport.pack(layouts, filled, sum(sizes)))
        sums = [flat[0].new_empty(size, device=device) for device, size in zip(self._devices, sizes, strict=True)] if flat else []

        def compute() -> None:
            if not flat:
                return
            transport.reduce_scatter(flat, sums)
            for owned, total in zip(pieces, sums, strict=True):
                for piece, gradient in zip(owned, transport.unpack(self._layouts(owned), total), strict=True):
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
        rows = [transport.unpack(self._layouts(self.pieces), flat) for flat in gathered]
        for device, some, packed in zip(self._devices, places, rows, strict=True):
            own = [i for i, piece in enumerate(self.pieces) if piece.owner == device]
            torch_private.foreach_copy_([packed[i] for i in own], [some[i] for i in own])
        transport.all_gather(_own_slices(gathered, sizes), gathered)
        for device, some, packed in zip(self._devices, places, rows, strict=True):
            others = [i for i, piece in enumerate(self.pieces) if piece.owner != device]
            torch_private.foreach_copy_([some[i] for i in others], [packed[i] for i in others])

    @functools.cached_property
    def _owned(self) -> list[list[Piece]]:
        """The pieces of each device."""
        return [[piece for piece in self.pieces if piece.owner == device] for device in self._devices]

    @functools.cached_property
    def _is_cut(self) -> set[int]:
        """Indices of the parameters of which no piece is the whole."""
        return {piece.index for piece in self.pieces if not piece.is_whole}

    def _layout(self, index: int) -> transport.MemoryLayout:
        parameter = self._parameters[index]
        return transport.MemoryLayout(parameter.shape) if index in self._is_cut else transport.layout_of(parameter)

    def _layouts(self, pieces: Sequence[Piece]) -> list[transport.MemoryLayout]:
        return [self._layout(one.index) if one.is_whole else transport.MemoryLayout(one.values.shape) for one in pieces]


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


Groups = list[dict[str, Any]]


class ReplicaShards:
    """Shards of a :class:`DataParallelModel`, each updated on the device that owns it.

    Args:
        model: its gradients are reduced to their owners while this object exists.
        groups: param groups. Parameters that are not the model's are updated in place.
        optimizer_class: class of the plain optimizer.
        defaults: settings of the plain optimizer.
    """

    def __init__(
        self, model: DataParallelModel, groups: Groups, optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]
    ) -> None:
        self._model = model
        self._groups = groups
        self._owners: list[BucketOwners] = []
        self._sharded: list[nn.Parameter] = []
        if len(set(model.devices)) > 1:
            self._shard()
        pieces = [{**group, "params": [one for given in group["params"] for one in _updated(given)]} for group in groups]
        self.inner = optimizer_class(pieces, **defaults)

    def collect(self) -> None:
        """Moves gradients that a user set on the model's own parameters to the owners."""
        if any(piece.values.dtype != piece.parameter.dtype for owners in self._owners for piece in owners.pieces):
            self._prepare()  # raises an error that says what to do
        if self._sharded:
            self._model.reduce_gradients()
        for parameter in self._sharded:
            if isinstance(parameter, ShardedParameter):
                shard_gradient(parameter)

    def step(self) -> None:
        """Updates each shard on its owner, and copies it to the other devices. A forward in another thread ends before.

        The update begins with the values of the model's own parameters, which a user may have written to.
        """
        self._prepare()
        self.collect()
        with self._model.replicas.in_turn():
            self.inner.step()
            for owners in self._owners:
                owners.publish()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clears the gradients of all shards and of the parameters."""
        if not set_to_none:
            self.collect()  # so that grad becomes zeros, not None, also where it was read before
        self.inner.zero_grad(set_to_none)
        for parameter in self._sharded if set_to_none else ():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the plain optimizer over whole parameters, its tensors on the CPU."""
        number = {id(one): i for i, one in enumerate(one for group in self.inner.param_groups for one in group["params"])}
        found = self.inner.state_dict()
        state, groups, index = {}, [], 0
        for group, saved in zip(self._groups, found["param_groups"], strict=True):
            first = index
            for parameter in group["params"]:
                states = [found["state"].get(number[id(one)]) for one in _updated(parameter)]
                if any(states):
                    state[index] = _join(parameter, states)
                index += 1
            groups.append({**saved, "params": list(range(first, index))})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the state of a plain optimizer over whole parameters.

        Raises:
            ValueError: the param groups have other numbers of parameters.
        """
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != [len(group["params"]) for group in self._groups]:
            raise ValueError(
                f"the state has param groups of {sizes} parameters, expected {[len(group['params']) for group in self._groups]}"
            )
        state, groups, at = {}, [], 0
        for group, saved in zip(self._groups, state_dict["param_groups"], strict=True):
            first = at
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                for piece in pieces_of(parameter) or (None,):
                    if index in state_dict["state"]:
                        state[at] = _cut(parameter, piece, state_dict["state"][index])
                    at += 1
            groups.append({**saved, "params": list(range(first, at))})
        self.inner.load_state_dict({"state": state, "param_groups": groups})

    def _prepare(self) -> None:
        """Brings the values of the model's own parameters to the owners."""
        if self._sharded:
            self._model.replicas.prepare(self._model.module, self._model.devices)

    def _shard(self) -> None:
        model = self._model
        is_shared = any(isinstance(parameter, ShardedParameter) for parameter in model.parameters())
        if is_shared and not model.replicas.gradients.is_sharded:
            raise ValueError("the module's parameters belong to another BalancedOptimizer, expected one: delete it first")
        parameters = [parameter for group in self._groups for parameter in group["params"]]

        def make_owners(parameters: Sequence[nn.Parameter], copies: Sequence[dict[torch.device, Tensor]]) -> BucketOwners:
            owners = BucketOwners(parameters, copies)
            self._owners.append(owners)
            return owners

        sharding = model.replicas.shard(model.module, model.devices, parameters, make_owners)
        for owners in self._owners:
            for parameter in dict.fromkeys(piece.parameter for piece in owners.pieces):
                shard_parameter(parameter, [piece for piece in owners.pieces if piece.parameter is parameter])
                self._sharded.append(parameter)
        weakref.finalize(self, _undo, sharding, self._sharded)


def _undo(sharding: Sharding, parameters: Sequence[nn.Parameter]) -> None:
    sharding.close()
    try:
        for parameter in parameters:
            unshard_parameter(parameter)
    except RuntimeError:
        pass  # simulated devices may have ended, and all their tensors with them


def _updated(parameter: Tensor) -> list[Tensor]:
    """Returns the tensors that the optimizer updates: the parameter, or its pieces."""
    return [piece.values for piece in pieces_of(parameter)] or [parameter]


def _join(parameter: Tensor, states: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Joins the states of a parameter's pieces. Entries shaped like a piece are concatenated; others are equal in all pieces."""
    first = next(state for state in states if state)
    joined = {}
    for name, value in first.items():
        if len(states) > 1 and isinstance(value, Tensor) and value.dim() == 1:
            parts = [state[name].cpu() for state in states if state]
            joined[name] = torch.cat(parts).view(parameter.shape)
        else:
            joined[name] = value.detach().cpu() if isinstance(value, Tensor) else value
    return joined


def _cut(parameter: Tensor, piece: Piece | None, state: dict[str, Any]) -> dict[str, Any]:
    def cut(value: Any) -> Any:
        if piece is None or piece.is_whole or not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value.clone() if isinstance(value, Tensor) else value
        return piece.cut(value).clone()

    return {name: cut(value) for name, value in state.items()}


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
    own = get_gradient(parameter)
    sharded = [(piece, piece.values.grad) for piece in parameter.pieces if piece.values.grad is not None]
    if sharded:
        own = torch.zeros_like(parameter) if own is None else own
        for piece, gradient in sharded:
            piece.cut(own).add_(gradient.to(parameter.device))
            piece.values.grad = None
        set_gradient(parameter, own)
    return own


@torch.no_grad()
def shard_gradient(parameter: Any) -> None:
    """Moves a parameter's own ``grad`` to the owners."""
    own = get_gradient(parameter)
    if own is None:
        return
    for piece in parameter.pieces:
        gradient = cut_gradient(piece, own)
        assert gradient is not None
        piece.add_gradient(gradient.to(piece.owner, copy=True))
    set_gradient(parameter, None)
