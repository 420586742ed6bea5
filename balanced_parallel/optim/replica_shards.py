"""Shards of parameters over the devices of one process, and the optimizer over them.

Each device owns an equal part of the elements, or whole parameters: it reduces their gradients, keeps their optimizer state, and
updates them. ::

    parameters   | weight            | bias | weight       |        pieces share the memory of the replicas
    owners       | device 0    | device 1    | device 2    |        reduce-scatter -> update of a piece -> all-gather
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..replicas.buckets import Gradients, accumulate
from ..replicas.model import DataParallelModel
from ..runtime import torch_private, transport
from .whole_parameters import OwnerOptimizers, Recipe, assign_owners

T = TypeVar("T", Tensor, Tensor | None)


class _Piece:
    """A run of one parameter's elements, the ``index``-th of a bucket, in the memory of the device that owns it.

    ``values`` is a leaf for the optimizer to update, flat if it is not the whole parameter. ``places`` are the same elements on
    all devices.
    """

    def __init__(
        self, parameter: nn.Parameter, index: int, run: slice, owner: torch.device, copies: Mapping[torch.device, Tensor]
    ) -> None:
        self.parameter, self.index, self.owner, self._run = parameter, index, owner, run
        self.is_whole = run.stop - run.start == parameter.numel()
        self.places = {device: self.cut(copy.detach()) for device, copy in copies.items()}
        self.values = self.places[owner].detach().requires_grad_()

    def cut(self, tensor: Tensor) -> Tensor:
        """Returns this piece of a tensor that is shaped like the parameter."""
        return tensor if self.is_whole else tensor.reshape(-1)[self._run]

    def add_gradient(self, gradient: Tensor) -> None:
        accumulate([self.values], [gradient.reshape(self.values.shape)])

    def repoint(self, copies: Mapping[torch.device, Tensor]) -> None:
        self.places = {device: self.cut(copy.detach()) for device, copy in copies.items()}
        self.values.data = self.places[self.owner]


class BucketOwners:
    """The pieces of one bucket, in the order of their owners, which are the devices in ``copies``, the copies of each parameter.

    ``owners`` are the devices of whole parameters, by number. Without them, each device owns as many bytes.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        copies: Sequence[dict[torch.device, Tensor]],
        owners: Mapping[Tensor, int] | None = None,
    ) -> None:
        self._parameters = parameters
        self._devices = devices = list(copies[0])
        self.pieces: list[_Piece] = []
        self._order = sorted(range(len(parameters)), key=lambda index: owners[parameters[index]] if owners else 0)
        share = -(-sum(parameter.numel() for parameter in parameters) // len(devices))  # collectives need equal sizes
        position = 0
        for index in self._order:
            parameter, copied = parameters[index], copies[index]
            splits = owners is None and all(copy.is_contiguous() for copy in copied.values())
            start, size = 0, parameter.numel()
            while start < size or start == 0:
                owner = min(position // max(share, 1), len(devices) - 1) if owners is None else owners[parameter]
                stop = min(size, start + share * (owner + 1) - position) if splits else size
                self.pieces.append(_Piece(parameter, index, slice(start, stop), devices[owner], copied))
                start, position = stop, position + stop - start
                if size == 0:
                    break
        self._owned = [[piece for piece in self.pieces if piece.owner == device] for device in devices]
        self._is_cut = {piece.index for piece in self.pieces if not piece.is_whole}  # parameters of which no piece is the whole

    def forget(self) -> None:
        """Clears the gradients of all pieces."""
        for piece in self.pieces:
            piece.values.grad = None

    def take(self, replicas: Sequence[Gradients]) -> Callable[[], None]:
        """Allocates sums of the replicas' gradients on the owners. Returns a function that computes them."""
        chosen = [i for i in self._order if any(gradients[i] is not None for gradients in replicas)]
        learned = set(chosen)
        pieces = [[piece for piece in owned if piece.index in learned] for owned in self._owned]
        sizes = _sizes(pieces, len(chosen))
        layouts = [self._layout(i) for i in chosen]
        flat = []
        for gradients in replicas:
            dense = [_check_dense(gradients[i]) for i in chosen]
            if (first := next((gradient for gradient in dense if gradient is not None), None)) is not None:
                pairs = zip(layouts, dense, strict=True)
                filled = [first.new_zeros(layout.shape) if gradient is None else gradient for layout, gradient in pairs]
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
    def fetch(self) -> None:
        """Copies the values of the module's own parameters to the owners, each the pieces that it owns."""
        for owned, device in zip(self._owned[1:], self._devices[1:], strict=True):
            transport.copy_coalesced([[piece.places[device] for piece in owned]], [p.places[self._devices[0]] for p in owned])

    @torch.no_grad()
    def publish(self) -> None:
        """Copies each owner's values to all other devices."""
        sizes = _sizes(self._owned, len(self._parameters))
        places = [[piece.places[device] for piece in self.pieces] for device in self._devices]
        if len(self._parameters) == 1 and all(place.is_contiguous() for row in places for place in row):
            whole = [row[0].as_strided((sum(sizes),), (1,)) for row in places]
            transport.all_gather(_own_slices(whole, sizes), whole)  # in place
            torch.autograd.graph.increment_version([place for row in places for place in row])
            return
        gathered = [row[0].new_empty(sum(sizes)) for row in places]
        unpacked = [transport.unpack(self._layouts(self.pieces), flat) for flat in gathered]
        for device, row, packed in zip(self._devices, places, unpacked, strict=True):
            owned = [i for i, piece in enumerate(self.pieces) if piece.owner == device]
            torch_private.foreach_copy_([packed[i] for i in owned], [row[i] for i in owned])
        transport.all_gather(_own_slices(gathered, sizes), gathered)
        for device, row, packed in zip(self._devices, places, unpacked, strict=True):
            others = [i for i, piece in enumerate(self.pieces) if piece.owner != device]
            torch_private.foreach_copy_([row[i] for i in others], [packed[i] for i in others])

    def _layout(self, index: int) -> transport.MemoryLayout:
        parameter = self._parameters[index]
        return transport.MemoryLayout(parameter.shape) if index in self._is_cut else transport.layout_of(parameter)

    def _layouts(self, pieces: Sequence[_Piece]) -> list[transport.MemoryLayout]:
        return [self._layout(p.index) if p.is_whole else transport.MemoryLayout(p.values.shape) for p in pieces]


def _sizes(pieces: Sequence[Sequence[_Piece]], parameters: int) -> list[int]:
    """Returns the number of elements on each owner: equal numbers if padding suffices. A single parameter is not padded."""
    owned = [sum(piece.values.numel() for piece in run) for run in pieces]
    total, count = sum(owned), len(owned)
    share = -(-total // count)
    even = [max(0, min(share, total - share * number)) for number in range(count)]
    return [share] * count if owned == even and (parameters > 1 or total == share * count) else owned


def _own_slices(flat: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    return [tensor.split(list(sizes))[number] for number, tensor in enumerate(flat)]


def _check_dense(gradient: T) -> T:
    """Returns the gradient. Raises ``TypeError`` if it is sparse."""
    if gradient is not None and gradient.layout != torch.strided:
        raise TypeError(
            "a gradient is sparse, expected dense ones: BalancedOptimizer sends gradients to their owners; set sparse=False in "
            "the embedding, or use a plain optimizer"
        )
    return gradient


_all_shards: weakref.WeakSet["ReplicaShards"] = weakref.WeakSet()


class ReplicaShards:
    """Shards of a :class:`DataParallelModel`, each updated on the device that owns it. Other parameters are updated in place."""

    def __init__(self, model: DataParallelModel, recipe: Recipe, shard: str) -> None:
        self._model, self._groups = model, recipe.groups
        self._owners: list[BucketOwners] = []
        self._pieces: dict[Tensor, list[_Piece]] = {}
        if len(set(model.devices)) > 1:
            self._shard(shard)
        updated = [{**group, "params": self._updated(group["params"])} for group in recipe.groups]
        self.inner: torch.optim.Optimizer = recipe.make(updated)
        self._optimizers: OwnerOptimizers | None = None
        if self._pieces and shard == "parameters":
            by_device: dict[torch.device, dict[Tensor, Tensor]] = {}
            for tensor in (tensor for group in updated for tensor in group["params"]):
                by_device.setdefault(tensor.device, {})[tensor] = tensor
            self._optimizers = OwnerOptimizers(recipe, self.inner, list(by_device.values()))

    @torch.no_grad()
    def collect(self) -> None:
        """Moves gradients that a user set on the model's own parameters to the owners."""
        if any(piece.values.dtype != piece.parameter.dtype for owners in self._owners for piece in owners.pieces):
            self._prepare()  # raises an error that says what to do
        if not self._pieces:
            return
        self._model.reduce_gradients()
        for parameter, pieces in self._pieces.items():
            if (gradient := parameter.grad) is not None:
                for piece in pieces:
                    piece.add_gradient(piece.cut(_check_dense(gradient)).to(piece.owner, copy=True))
                parameter.grad = None

    @torch.no_grad()
    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Returns a copy of a parameter's gradient on its own device; None if it has no gradient."""
        if parameter not in self._pieces:
            return parameter.grad
        self.collect()
        whole = None
        for piece in self._pieces[parameter]:
            if piece.values.grad is not None:
                whole = torch.zeros_like(parameter) if whole is None else whole
                piece.cut(whole).copy_(piece.values.grad)
        return whole

    def run(self, method: str) -> None:
        """Calls ``step()``, ``train()`` or ``eval()`` of the optimizers, from the values of the model's own parameters."""
        self._prepare()
        self.collect()
        with self._model.replicas.in_turn():
            for owners in () if self._model.replicas.copies.are_fresh else self._owners:
                owners.fetch()
            if self._optimizers is None:
                getattr(self.inner, method)()
            else:
                self._optimizers.run(method)
            for owners in self._owners:
                owners.publish()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clears the gradients of all shards and of the parameters."""
        if not set_to_none:
            self.collect()  # so that gradients of the parameters become zeros too, not None
        self.inner.zero_grad(set_to_none)
        for parameter in self._pieces:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the plain optimizer over whole parameters, its tensors on the CPU."""
        tensors = itertools.chain.from_iterable(group["params"] for group in self.inner.param_groups)
        number = {id(tensor): i for i, tensor in enumerate(tensors)}
        inner = self.inner.state_dict()
        state, groups, places = {}, [], itertools.count()
        for group, saved in zip(self._groups, inner["param_groups"], strict=True):
            numbered = {index: parameter for parameter, index in zip(group["params"], places, strict=False)}
            for index, parameter in numbered.items():
                states = [inner["state"].get(number[id(tensor)]) for tensor in self._updated([parameter])]
                if any(entries is not None for entries in states):
                    state[index] = _join(parameter, states)
            groups.append({**saved, "params": list(numbered)})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the state of a plain optimizer over whole parameters."""
        sizes, expected = ([len(group["params"]) for group in groups] for groups in (state_dict["param_groups"], self._groups))
        if sizes != expected:
            raise ValueError(f"the state has param groups of {sizes} parameters, expected {expected}")
        state, groups, at = {}, [], 0
        for group, saved in zip(self._groups, state_dict["param_groups"], strict=True):
            first = at
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                pieces: Sequence[_Piece | None] = self._pieces.get(parameter) or [None]
                for piece in pieces:
                    if index in state_dict["state"]:
                        state[at] = _cut(parameter, piece, state_dict["state"][index])
                    at += 1
            groups.append({**saved, "params": list(range(first, at))})
        self.inner.load_state_dict({"state": state, "param_groups": groups})

    def _prepare(self) -> None:
        """Follows changes of the model's own parameters, but for values that no version counter tells of."""
        if self._pieces:
            self._model.replicas.prepare(self._model.module, self._model.devices, all_values=False)

    def _updated(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Returns the tensors that the optimizer updates: the pieces of a parameter, or the parameter."""
        pieces = ((parameter, self._pieces.get(parameter)) for parameter in parameters)
        return [tensor for parameter, owned in pieces for tensor in ([p.values for p in owned] if owned else [parameter])]

    def _shard(self, shard: str) -> None:
        model = self._model
        parameters = [parameter for group in self._groups for parameter in group["params"]]
        if any(parameter in shards._pieces for shards in _all_shards for parameter in parameters):
            raise ValueError(
                "parameters of the module have a BalancedOptimizer already, expected one for each: leave them out of params=, or "
                "delete the other optimizer first"
            )
        buckets = model.replicas.shard(model.module, model.devices, parameters)
        sharded = [parameter for bucket, _ in buckets for parameter in bucket.parameters]
        whole = assign_owners(sharded, len(set(model.devices))) if shard == "parameters" else None
        for bucket, copies in buckets:
            bucket.owners = owners = BucketOwners(bucket.parameters, copies, whole)
            self._owners.append(owners)
            for piece in owners.pieces:
                self._pieces.setdefault(piece.parameter, []).append(piece)
        _all_shards.add(self)
        weakref.finalize(self, model.replicas.gradients.unshard, [bucket for bucket, _ in buckets])


def _join(parameter: Tensor, states: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Joins the states of a parameter's pieces. Entries shaped like a piece are concatenated; others are equal in all pieces."""
    first: dict[str, Any] = next((state for state in states if state), {})
    joined = {}
    for name, value in first.items():
        if len(states) > 1 and isinstance(value, Tensor) and value.dim() == 1:
            joined[name] = torch.cat([state[name].cpu() for state in states if state]).view(parameter.shape)
        else:
            joined[name] = torch_private.map_tensors(lambda tensor: tensor.detach().cpu(), value)
    return joined


def _cut(parameter: Tensor, piece: _Piece | None, state: dict[str, Any]) -> dict[str, Any]:
    def cut(value: Tensor) -> Tensor:
        return (value if piece is None or value.shape != parameter.shape else piece.cut(value)).clone()

    return {name: torch_private.map_tensors(cut, value) for name, value in state.items()}
