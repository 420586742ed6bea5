"""Copies of a module on other devices, with the graph connected to the parameters of the module itself.

torch's ``replicate`` refuses CPUs and makes replicas without parameters (``next(self.parameters())`` raises, pytorch#40457,
``ParameterList`` is empty, #36035). Here a replica's parameters are the differentiable copies, in the place of the originals.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .devices import move

__all__: list[str] = []


def replicate(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """One replica of ``module`` for each of ``devices``, for one forward; the first is the module itself.

    Gradients of the replicas sum into ``module.parameters()``. Buffers are copied, so what a replica but the first writes to
    them is lost, as in ``nn.DataParallel``.

    Raises:
        ValueError: a parameter or buffer of ``module`` is not on the first device, or is not initialised (lazy modules).
        TypeError: the module is a ``ScriptModule``, which cannot be copied part by part; or it was compiled.
    """
    if len(devices) == 1:
        return [module]
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name} is not initialised yet: run the module once on a few rows before it is wrapped")
        if tensor.device != devices[0]:
            raise ValueError(
                f"{name} is on {tensor.device}, expected every parameter and buffer on the first device, {devices[0]}: "
                f"move the module there with .to({str(devices[0])!r})"
            )
    return [module, *(_copy_to(module, device) for device in devices[1:])]


def _copy_to(module: nn.Module, device: torch.device) -> nn.Module:
    tensors: dict[int, torch.Tensor] = {}  # by identity, so that tied parameters stay tied
    for parameter in module.parameters():
        tensors[id(parameter)] = move(parameter, device)
    for buffer in module.buffers():
        tensors[id(buffer)] = buffer.detach().to(device, copy=True)
    shells: dict[nn.Module, nn.Module] = {}

    def copy_tree(original: nn.Module) -> nn.Module:
        if original not in shells:
            _refuse_compiled(original)
            shells[original] = shell = _shell(original, tensors)
            shell._modules = {name: None if child is None else copy_tree(child) for name, child in original._modules.items()}
        return shells[original]

    return copy_tree(module)


def _refuse_compiled(module: nn.Module) -> None:
    """Compiled code belongs to one module on one device, and torch's compiler does not run in several threads at once."""
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"{type(module).__name__} cannot be replicated: pass the module that it was made from")
    if "_orig_mod" in module._modules or module._compiled_call_impl is not None:  # torch.compile(module), module.compile()
        raise TypeError(
            f"{type(module).__name__} is compiled, which binds it to one replica: pass the module without torch.compile, or "
            "use one process per device (torchrun)"
        )


def _shell(original: nn.Module, tensors: dict[int, torch.Tensor]) -> nn.Module:
    """A shallow copy of one module that holds ``tensors`` in the place of its own."""
    shell = type(original).__new__(type(original))
    shell.__dict__ = {name: _swapped(value, tensors) for name, value in original.__dict__.items()}
    for kind in ("_parameters", "_buffers"):
        held = original.__dict__[kind]
        shell.__dict__[kind] = {name: None if tensor is None else tensors[id(tensor)] for name, tensor in held.items()}
    return shell


def _swapped(value: Any, tensors: dict[int, torch.Tensor]) -> Any:
    """An attribute for the shell: a plain list of parameters, as RNNs keep in ``_flat_weights``, is one of their copies."""
    if isinstance(value, list) and any(isinstance(entry, nn.Parameter) for entry in value):
        return [tensors.get(id(entry), entry) for entry in value]
    return value
