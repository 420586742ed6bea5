"""The tree of a module's submodules, and skeletons: copies of it that share everything but parameters and buffers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__: list[str] = []

# Each module with its skeleton, the skeleton's children, the places of its parameters in the tree, and the names of its lists.
Skeletons = list[tuple[nn.Module, nn.Module, dict[str, nn.Module | None], dict[str, int | None], list[str]]]


class ModuleTree:
    """The modules of a tree, each once, and its parameters, each once: what is tied stays tied.

    Raises:
        TypeError: a module is a ``ScriptModule``, which cannot be copied part by part; or it was compiled.
        ValueError: a parameter or buffer is not initialised (lazy modules).
    """

    def __init__(self, root: nn.Module) -> None:
        _refuse_lazy(root)
        self.modules = list(root.modules())
        for module in self.modules:
            refuse_compiled(module)
        self.children = [dict(module._modules) for module in self.modules]
        self.owned = [dict(module._parameters) for module in self.modules]
        held = [parameter for owned in self.owned for parameter in owned.values() if parameter is not None]
        self.parameters: list[nn.Parameter] = list({id(parameter): parameter for parameter in held}.values())
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.place = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self._places = [
            {name: None if parameter is None else self.place[id(parameter)] for name, parameter in owned.items()}
            for owned in self.owned
        ]
        self._lists = [[name for name, value in module.__dict__.items() if type(value) is list] for module in self.modules]
        identities = [[*map(id, owned.values())] for owned in self.owned]
        sizes = [len(module.__dict__) for module in self.modules]
        self._known = list(zip(self.modules, self.children, self.owned, identities, sizes, strict=True))

    def still_is(self, root: nn.Module) -> bool:
        """Whether the tree under ``root`` has the same modules and the same parameters."""
        if self.modules[0] is not root:
            return False
        for module, children, owned, identities, size in self._known:
            state = module.__dict__
            held = state["_parameters"]
            if len(state) != size or state["_modules"] != children or held.keys() != owned.keys():
                return False
            if held and [*map(id, held.values())] != identities:  # == on parameters would compare their values
                return False
        return True

    def has_the_same_shapes(self) -> bool:
        """Returns whether no parameter was resized. A graph of earlier forwards has the old shapes."""
        return [parameter.shape for parameter in self.parameters] == self.shapes

    def has_parameters_of(self, other: "ModuleTree") -> bool:
        """Returns whether both trees have the same parameters, of the same shapes."""
        return [*map(id, self.parameters)] == [*map(id, other.parameters)] and self.shapes == other.shapes

    def check_device(self, device: torch.device) -> None:
        """Raises ``ValueError`` if a parameter or buffer is on another device."""
        buffers = [buffer for module in self.modules for buffer in module._buffers.values() if buffer is not None]
        if all(tensor.device == device for tensor in (*self.parameters, *buffers)):
            return
        root = self.modules[0]
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            if tensor.device != device:
                raise ValueError(
                    f"{name} is on {tensor.device}, expected every parameter and buffer on the first device, {device}: "
                    f"move the module there with .to({str(device)!r})"
                )

    def make_skeletons(self) -> Skeletons:
        """An empty copy of each module, to be filled before each forward."""
        skeletons = [type(module).__new__(type(module)) for module in self.modules]
        skeleton_of = {id(module): skeleton for module, skeleton in zip(self.modules, skeletons, strict=True)}
        children = [
            {name: None if child is None else skeleton_of[id(child)] for name, child in held.items()} for held in self.children
        ]
        return list(zip(self.modules, skeletons, children, self._places, self._lists, strict=True))

    def fill(self, skeletons: Skeletons, tensors: list[Tensor] | None, copy_buffer: Callable[[Tensor], Tensor]) -> nn.Module:
        """Makes the skeletons what the modules are now (modes, hooks, attributes), and returns the root's.

        Args:
            skeletons: from :meth:`make_skeletons`.
            tensors: what to put in the place of the parameters; ``None`` leaves them.
            copy_buffer: called once for each buffer.
        """
        copied: dict[int, Tensor] = {}
        for module, skeleton, children, places, lists in skeletons:
            state = module.__dict__.copy()
            if children:
                state["_modules"] = children.copy()
            if buffers := state["_buffers"]:
                for buffer in buffers.values():
                    if buffer is not None and id(buffer) not in copied:
                        # with a graph where it learns, through which all replicas' gradients come to it
                        copied[id(buffer)] = copy_buffer(buffer if buffer.requires_grad else buffer.detach())
                state["_buffers"] = {name: None if held is None else copied[id(held)] for name, held in buffers.items()}
            if tensors is not None:
                if places:
                    state["_parameters"] = {name: None if at is None else tensors[at] for name, at in places.items()}
                for name in lists:
                    state[name] = self._swapped(state[name], tensors)
            object.__setattr__(skeleton, "__dict__", state)
        return skeletons[0][1]

    @contextmanager
    def parameters_replaced(self, tensors: list[Tensor]) -> Iterator[None]:
        """Puts ``tensors`` in the place of the modules' own parameters, for the length of the block."""
        put: list[tuple[dict[str, Any], str, Any, Any]] = []  # where, as what, in the place of what
        try:
            for i, module in enumerate(self.modules):
                for name, at in self._places[i].items():
                    if at is not None:
                        put.append((module._parameters, name, tensors[at], self.parameters[at]))
                for name in self._lists[i]:
                    before = module.__dict__.get(name)
                    swapped = self._swapped(before, tensors)
                    if swapped is not before:
                        put.append((module.__dict__, name, swapped, before))
            for holder, name, value, _ in put:
                holder[name] = value
            yield
        finally:
            for holder, name, value, before in put:
                if holder.get(name) is value:  # else forward has put something else there, which stays
                    holder[name] = before

    def _swapped(self, value: Any, tensors: list[Tensor]) -> Any:
        """A plain list of parameters, as RNNs keep in ``_flat_weights``, becomes one of their copies."""
        if type(value) is not list or not any(isinstance(entry, nn.Parameter) for entry in value):
            return value
        return [tensors[self.place[id(entry)]] if id(entry) in self.place else entry for entry in value]


def refuse_compiled(module: nn.Module) -> None:
    """Compiled code belongs to one module on one device, and torch's compiler does not run in several threads at once."""
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"{type(module).__name__} cannot be replicated: pass the module that it was made from")
    if "_orig_mod" in module._modules or module._compiled_call_impl is not None:  # torch.compile(module), module.compile()
        raise TypeError(
            f"{type(module).__name__} is compiled, which binds it to one replica: pass the module without torch.compile, or "
            "use one process per device (torchrun)"
        )


def _refuse_lazy(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name} is not initialised yet: run the module once on a few rows before it is wrapped")
