"""An optimizer whose state is sharded over the devices of one process."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..replicas.model import DataParallelModel
from ..replicas.replicas import Sharding
from ..replicas.untracked_writes import note_written
from .sharded_parameters import ShardedParameter, pieces_of, shard_gradient, shard_parameter, unshard_parameter
from .sharding import BucketOwners, Piece

__all__: list[str] = []

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
        """Moves values and gradients that a user set on the model's own parameters to the owners."""
        if self._sharded:
            self._model.replicas.prepare(self._model.module, self._model.devices)
            for parameter in self._sharded:
                if isinstance(parameter, ShardedParameter):
                    shard_gradient(parameter)

    def step(self) -> None:
        """Updates each shard on its owner, and copies it to the other devices. A forward in another thread ends before."""
        with self._model.replicas.in_turn():
            self.inner.step()
            for owners in self._owners:
                owners.publish()
            if self._owners:
                note_written(self._sharded)  # for other replicas of the same parameters
                self._model.replicas.mark_fresh()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clears the gradients of all shards and of the parameters."""
        for parameter in () if set_to_none else self._sharded:
            shard_gradient(parameter)  # so that grad becomes zeros, not None, also where it was read before
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
