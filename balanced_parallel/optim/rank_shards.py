"""Optimizers over the ranks of a process group: whole parameters that belong to a rank, or the shards of FSDP2."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime import torch_private, transport
from ..runtime.collectives import batch_group, rank, world_size
from ..runtime.torch_private import is_sharded, map_tensors
from .whole_parameters import OwnerOptimizers, Recipe, assign_owners


class ElementRanks:
    """The plain optimizer over groups of ``DTensor``s, sharded as the parameters are. A state dict has whole tensors."""

    def __init__(self, recipe: Recipe) -> None:
        self.inner = recipe.make(recipe.groups)

    def collect(self) -> None:
        """Does nothing: the backward has reduced the gradients."""

    def run(self, method: str) -> None:
        """Calls ``step()``, ``train()`` or ``eval()`` of the optimizer."""
        getattr(self.inner, method)()

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Returns a copy of a parameter's gradient; None if it has no gradient."""
        return None if parameter.grad is None else _whole(parameter.grad)

    def zero_grad(self, set_to_none: bool) -> None:
        """Clears the gradients."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the plain optimizer over whole parameters, its tensors on the CPU."""
        whole: dict[str, Any] = map_tensors(lambda tensor: _whole(tensor).cpu(), self.inner.state_dict())
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the state of a plain optimizer over whole parameters."""
        parameters, state = [each for group in self.inner.param_groups for each in group["params"]], {}
        for key, values in state_dict["state"].items():
            copies = map_tensors(torch.clone, values)  # torch would go on with the caller's tensors
            state[key] = map_tensors(functools.partial(_distributed, like=parameters[key]), copies)
        self.inner.load_state_dict({**state_dict, "state": state})


class ParameterRanks(ElementRanks):
    """Whole parameters, each updated by the rank that owns it, which sends it to the others.

    Parameters of FSDP2 and their gradients are gathered for an update, one after the other. The owner keeps them until its end.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._parameters: list[Any] = [parameter for group in self.inner.param_groups for parameter in group["params"]]
        self._owners = assign_owners(self._parameters, world_size())
        owned = [parameter for parameter, owner in self._owners.items() if owner == rank()]
        self._gathered = {parameter: _empty(parameter).requires_grad_() for parameter in owned if is_sharded(parameter)}
        values = {parameter: self._gathered.get(parameter, parameter) for parameter in owned}
        self._optimizers = OwnerOptimizers(recipe, self.inner, [values] if values else [])
        self._release()

    @torch.no_grad()
    def run(self, method: str) -> None:
        """Calls ``step()``, ``train()`` or ``eval()`` of the optimizer over this rank's parameters, and shares the parameters."""
        for parameter in self._parameters:
            if is_sharded(parameter):
                value, gradient = _whole(parameter), self.gradient(parameter)
                if parameter in self._gathered:
                    self._gathered[parameter].data, self._gathered[parameter].grad = value, gradient
        self._optimizers.run(method)
        for number in range(world_size()):
            learning = [each for each in self._parameters if self._owners[each] == number and each.requires_grad]
            for chunk in transport.chunks(learning, transport.BUFFER_BYTES):
                self._send([learning[i] for i in chunk], number)
        self._release()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the plain optimizer over whole parameters, its tensors on the CPU."""
        local = super().state_dict()
        shared: list[dict[str, Any]] = []
        for number in range(world_size()):  # one by one: a gather has a buffer per rank, of the largest state
            objects: list[Any] = [local if number == rank() else None]
            dist.broadcast_object_list(objects, group=batch_group(), group_src=number)
            shared.append(objects[0])
        state = {key: values for part in shared for key, values in part["state"].items()}
        groups = []
        for place, group in enumerate(self.inner.param_groups):  # settings that count are those of an owner
            owner = self._owners[group["params"][0]] if group["params"] else 0
            groups.append(shared[owner]["param_groups"][place])
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the state of a plain optimizer over whole parameters."""
        whole = map_tensors(_whole, state_dict["state"])
        numbers = [number for number, parameter in enumerate(self._parameters) if self._owners[parameter] == rank()]
        state = {number: map_tensors(torch.clone, whole[number]) for number in numbers if number in whole}
        self.inner.load_state_dict({**state_dict, "state": state})

    def _send(self, parameters: list[Any], owner: int) -> None:
        """Copies the values of parameters from their owner to all ranks."""
        values = [self._gathered.get(each, _empty(each)) if is_sharded(each) else each for each in parameters]
        layouts = [transport.layout_of(value) for value in values]
        flat = transport.pack(layouts, [value.detach() for value in values])
        dist.broadcast(flat, group=batch_group(), group_src=owner)
        received = map(_distributed, transport.unpack(layouts, flat), parameters)
        torch_private.foreach_copy_(torch_private.local_tensors(parameters), torch_private.local_tensors(received))

    def _release(self) -> None:
        for value in self._gathered.values():
            value.data, value.grad = value.new_empty(0), None


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole.detach()


def _empty(parameter: Tensor) -> Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def _distributed(value: Tensor, like: Any) -> Tensor:
    """Returns a value with the shape of ``like`` sharded in the same way, and others as they are. Nothing is sent."""
    if is_sharded(value) or not is_sharded(like) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import DTensor, Replicate

    placements, mesh = [Replicate()] * like.device_mesh.ndim, like.device_mesh
    return DTensor.from_local(value.to(like.device), mesh, placements, run_check=False).redistribute(placements=like.placements)
