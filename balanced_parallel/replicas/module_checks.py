"""Errors for modules and methods that cannot run as replicas."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..runtime.modules import is_compiled

__all__: list[str] = []


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
