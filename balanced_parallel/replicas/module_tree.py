"""The tree of a module's submodules, and its skeletons: copies that share everything except parameters and buffers.

torch's ``replicate`` walks and copies the tree at every forward. Here it is compared with what it was, and the skeletons are
filled again. The weights of RNNs are one more case: cuDNN needs them in one buffer, in its own order, which
``nn.RNNBase.flatten_parameters`` makes for the parameters of a module. Copies on another device need a buffer too, or they are
copied together in every forward. The errors for modules and methods that cannot run as replicas are at the end.
"""

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.torch_private import (
    BUFFERS,
    CHILDREN,
    FORWARD_HOOKS,
    PARAMETERS,
    buffers_of,
    children_of,
    is_compiled,
    parameters_of,
)

__all__: list[str] = []


# Each module with its skeleton, the skeleton's children, the indices of its parameters in the tree, and the names of its lists.
Skeletons = list[tuple[nn.Module, nn.Module, dict[str, nn.Module | None], dict[str, int | None], list[str]]]


class ModuleTree:
    """The modules and parameters of a tree, each listed once. Tied parameters and shared modules stay tied in the skeletons.

    Raises:
        TypeError: a module is a ``ScriptModule``, which cannot be copied part by part; or it was compiled.
        ValueError: a parameter or buffer is not initialised (lazy modules).
    """

    def __init__(self, root: nn.Module) -> None:
        refuse_lazy(root)
        self.modules = list(root.modules())
        for module in self.modules:
            refuse_compiled(module)
        self.rescaled = rescaled_embeddings(root)
        self.children = [dict(children_of(module)) for module in self.modules]
        self.owned = [dict(parameters_of(module)) for module in self.modules]
        parameters = [parameter for owned in self.owned for parameter in owned.values() if parameter is not None]
        self.parameters: list[nn.Parameter] = list({id(parameter): parameter for parameter in parameters}.values())
        self.note_kinds()
        self.place = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self._places = [
            {name: None if parameter is None else self.place[id(parameter)] for name, parameter in owned.items()}
            for owned in self.owned
        ]
        flat = [(rnn, rnn._flat_weights) for rnn in self.modules if isinstance(rnn, nn.RNNBase)]
        self.rnns = [
            (rnn, [self.place[id(weight)] for weight in weights])
            for rnn, weights in flat
            if all(id(weight) in self.place for weight in weights)
        ]
        self._lists = [[name for name, value in module.__dict__.items() if type(value) is list] for module in self.modules]
        identities = [[*map(id, owned.values())] for owned in self.owned]
        sizes = [len(module.__dict__) for module in self.modules]
        self._before = list(zip(self.modules, self.children, self.owned, identities, sizes, strict=True))

    def still_is(self, root: nn.Module) -> bool:
        """Returns True if the tree under ``root`` still has the same modules and the same parameters."""
        if self.modules[0] is not root:
            return False
        for module, children, owned, identities, size in self._before:
            state = module.__dict__
            parameters = state[PARAMETERS]  # without a call for each: this runs in every forward
            if len(state) != size or state[CHILDREN] != children:
                return False
            if parameters.keys() != owned.keys():
                return False
            if parameters and [*map(id, parameters.values())] != identities:  # == on parameters would compare their values
                return False
        return True

    def note_kinds(self) -> None:
        """Notes shapes and dtypes of the parameters."""
        self.kinds = [(parameter.shape, parameter.dtype) for parameter in self.parameters]

    def has_parameters_of(self, other: "ModuleTree") -> bool:
        """Returns True if both trees have the same parameters, of the same shapes and dtypes."""
        return [*map(id, self.parameters)] == [*map(id, other.parameters)] and self.kinds == other.kinds

    def make_skeletons(self) -> Skeletons:
        """Returns an empty copy of each module. :meth:`fill` fills them before each forward."""
        skeletons = [type(module).__new__(type(module)) for module in self.modules]
        for skeleton in skeletons:
            skeleton.__dict__[FORWARD_HOOKS] = OrderedDict()
        skeleton_of = {id(module): skeleton for module, skeleton in zip(self.modules, skeletons, strict=True)}
        children = [
            {name: None if child is None else skeleton_of[id(child)] for name, child in children.items()}
            for children in self.children
        ]
        return list(zip(self.modules, skeletons, children, self._places, self._lists, strict=True))

    def buffers(self) -> list[Tensor]:
        """Returns the buffers of all modules, each once."""
        by_id: dict[int, Tensor] = {}
        for module in self.modules:
            if buffers := module.__dict__[BUFFERS]:
                by_id.update((id(buffer), buffer) for buffer in buffers.values() if buffer is not None)
        return list(by_id.values())

    def fill(self, skeletons: Skeletons, tensors: list[Tensor] | None, buffers: Mapping[int, Tensor]) -> nn.Module:
        """Gives the skeletons the modules' current modes, hooks and attributes, and returns the root's skeleton.

        Args:
            skeletons: result of :meth:`make_skeletons`.
            tensors: replacements of the parameters, in the order of the tree. ``None`` keeps the parameters.
            buffers: replacements of the buffers, by the id of the buffer.
        """
        for module, skeleton, children, places, lists in skeletons:
            state = module.__dict__.copy()
            if children:
                state[CHILDREN] = children.copy()
            if own_buffers := state[BUFFERS]:
                copies = {name: None if buffer is None else buffers[id(buffer)] for name, buffer in own_buffers.items()}
                state[BUFFERS] = copies
            if tensors is not None:
                if places:
                    replaced = {name: None if at is None else tensors[at] for name, at in places.items()}
                    state[PARAMETERS] = replaced
                for name in lists:
                    state[name] = self._swapped(state[name], tensors)
            # A forward that registers hooks at its first call would otherwise register them once for each replica. The handle of
            # a hook needs a dictionary that lives on, as that of the skeleton does.
            hooks, registered = skeleton.__dict__[FORWARD_HOOKS], state[FORWARD_HOOKS]
            if hooks or registered:
                hooks.clear()
                hooks.update(registered)
            state[FORWARD_HOOKS] = hooks
            object.__setattr__(skeleton, "__dict__", state)
            if skeleton.__class__ is not module.__class__:  # as activation checkpointing changes it
                object.__setattr__(skeleton, "__class__", module.__class__)
        return skeletons[0][1]

    @torch.no_grad()
    def take_buffers(self, skeletons: Skeletons) -> None:
        """Copies the buffers of the skeletons to the modules, as if the modules themselves had run."""
        for module, skeleton, *_ in skeletons:
            for name, buffer in buffers_of(module).items():
                if buffer is not None and (value := buffers_of(skeleton)[name]) is not None and value.shape == buffer.shape:
                    buffer.copy_(value)

    @contextmanager
    def parameters_replaced(self, tensors: list[Tensor]) -> Iterator[None]:
        """Replaces the parameters of the modules by ``tensors`` in this block."""
        changes: list[tuple[dict[str, Any], str, Any, Any]] = []  # dictionary, name, new value, old value
        try:
            for i, module in enumerate(self.modules):
                for name, at in self._places[i].items():
                    if at is not None:
                        changes.append((parameters_of(module), name, tensors[at], self.parameters[at]))
                for name in self._lists[i]:
                    before = module.__dict__.get(name)
                    swapped = self._swapped(before, tensors)
                    if swapped is not before:
                        changes.append((module.__dict__, name, swapped, before))
            for attributes, name, value, _ in changes:
                attributes[name] = value
            yield
        finally:
            for attributes, name, value, before in changes:
                if attributes.get(name) is value:  # else the forward has set another value, which stays
                    attributes[name] = before

    def _swapped(self, value: Any, tensors: list[Tensor]) -> Any:
        """Returns a list of parameters, or of weak references to them, with the parameters replaced. Other values stay.

        An RNN has both lists. It flattens its weights again in every forward in which they do not agree with its parameters.
        """
        if type(value) is not list:
            return value
        referents = [entry() if isinstance(entry, weakref.ref) else entry for entry in value]
        if not any(isinstance(referent, nn.Parameter) for referent in referents):
            return value
        swapped = []
        for entry, referent in zip(value, referents, strict=True):
            at = self.place.get(id(referent))
            tensor = None if at is None else tensors[at]
            swapped.append(entry if tensor is None else weakref.ref(tensor) if isinstance(entry, weakref.ref) else tensor)
        return swapped


def flatten_weights(rnns: Sequence[tuple[nn.RNNBase, list[int]]], tensors: Sequence[Tensor]) -> None:
    """Moves new copies of the weights of each RNN to one buffer.

    Args:
        rnns: each with the places of its weights among ``tensors``.
        tensors: copies of all parameters on one device.
    """
    with torch.inference_mode(False):
        for rnn, places in rnns:
            # the method reads sizes and ``_flat_weights`` of its object, and nothing else
            weights = {"_flat_weights": [tensors[at] for at in places]}
            nn.RNNBase.flatten_parameters(SimpleNamespace(**{**vars(rnn), **weights}))  # type: ignore[arg-type]


def check_module(module: Any) -> None:
    """Checks that ``module`` can be wrapped.

    Raises:
        TypeError: it is a class, or not a module, or is wrapped already.
    """
    check_is_module(module)
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise TypeError(f"the module is wrapped in {type(module).__name__} already, expected a plain one: pass its .module")


def check_is_module(module: Any, name: str = "module") -> None:
    """Raises ``TypeError`` if ``module`` is a class or not a module."""
    kind = getattr(module, "__name__", type(module).__name__)
    if isinstance(module, type):
        raise TypeError(f"the {name} is the class {kind}, expected an instance: write {kind}(...)")
    if not isinstance(module, nn.Module):
        raise TypeError(f"the {name} is an object of type {kind}, expected a torch.nn.Module")


def refuse_meta(module: nn.Module) -> None:
    """Checks that no parameter and no buffer is on the meta device.

    Raises:
        ValueError: a tensor has no data.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no data: call module.to_empty(device=...) and initialise it or load a "
                "state_dict before it is wrapped"
            )


def check_device(module: nn.Module, device: torch.device) -> None:
    """Raises ``ValueError`` if a parameter or buffer is on another device."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device}, expected every parameter and buffer on the first device, {device}: "
                f"move the module there with .to({str(device)!r})"
            )


def check_method(module: nn.Module, name: str) -> None:
    """Checks that ``module`` has a method ``name``.

    Raises:
        ValueError: it has none.
    """
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{type(module).__name__} has no method {name!r} to call")


def refuse_compiled(module: nn.Module) -> None:
    """Checks that a module is neither a ``ScriptModule`` nor compiled.

    Compiled code belongs to one module on one device, and torch's compiler does not run in several threads at once.

    Raises:
        TypeError: the module cannot be replicated.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"{type(module).__name__} cannot be replicated: pass the module that it was made from")
    if is_compiled(module):
        raise TypeError(
            f"{type(module).__name__} is compiled, which binds it to one replica: pass the module without torch.compile, or "
            "use one process per device (torchrun)"
        )


def refuse_lazy(module: nn.Module) -> None:
    """Checks that every parameter and buffer has a shape.

    Raises:
        ValueError: a layer is lazy and has not run yet.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name} is not initialised yet: run the module once on a few rows before it is wrapped")


def rescaled_embeddings(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the embeddings with ``max_norm`` by name. Their forward rescales rows of their weight."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {name: part for name, part in module.named_modules() if isinstance(part, kinds) and part.max_norm is not None}


def refuse_rescaled(embeddings: Mapping[str, Any]) -> None:
    """Checks that none of ``embeddings`` is trained, where devices or ranks have weights of their own.

    Raises:
        ValueError: one is. Each device would rescale the rows that it sees, and the weights would differ.
    """
    for name, embedding in embeddings.items():
        if embedding.weight.requires_grad:
            rescaling = f"embedding.weight.copy_(embedding.weight.renorm({embedding.norm_type:g}, 0, {embedding.max_norm:g}))"
            raise ValueError(
                f"the embedding {name!r} has max_norm={embedding.max_norm:g}: its forward rescales rows of its weight, on each "
                "device those that this device sees, and the devices would differ. Expected max_norm=None; rescale all rows "
                f"after each update: with torch.no_grad(): {rescaling}"
            )
