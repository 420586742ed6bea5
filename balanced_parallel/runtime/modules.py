"""Dictionaries of one module: its children, parameters and buffers by name. Base classes of batch norms and dropouts.

``named_children``, ``named_parameters`` and ``named_buffers`` omit entries that are None, and the second name of a child. They
also give no way to replace an entry in a replica. No public functions do this. The common base classes of batch norms and of
dropouts are private as well.
"""

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout

__all__: list[str] = ["BatchNorm", "Dropout"]


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns the direct submodules. Changes to the dictionary change the module."""
    return module._modules


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the module's own parameters, without those of its submodules. Changes to the dictionary change the module."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns the module's own buffers, without those of its submodules. Changes to the dictionary change the module."""
    return module._buffers


def shared_id(module: nn.Module) -> int:
    """Returns a number that a module shares with its shallow copies, such as its replicas: they have the same table of hooks."""
    return id(module._state_dict_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Returns True for the module that ``torch.compile(module)`` returns, and for a module after ``module.compile()``."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
