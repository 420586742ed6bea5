"""Categories of memory. The ledger detects inputs and activations, hooks report the tensors of modules and optimizers."""

import ctypes
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..runtime.torch_private import leaves_of_tree, local_tensors


class Category(IntEnum):
    """Category of an allocation. The numbers are those of ``native/ledger.h``, which calls the last one ``Other``."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER_STATE = 2
    INPUTS = 3
    ACTIVATIONS = 4
    TEMPORARIES = 5

    @property
    def title(self) -> str:
        """Name in tables: ``optimizer state``."""
        return self.name.lower().replace("_", " ")


class MemoryLabels:
    """Labels memory of parameters, gradients and optimizer state in the ledger, by hooks on all modules and optimizers.

    A label applies to past peaks as well: a peak in the backward shows gradients, although the optimizer labels them later.
    """

    def __init__(self, native: ctypes.CDLL) -> None:
        self.native = native
        self.steps = 0  # finished: a forward has followed the optimizer's update
        self._has_updated = False
        self.modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Installs the hooks for the duration of the block."""
        with (
            register_module_forward_pre_hook(self._before_forward),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            yield

    def label_gradients(self) -> None:
        """Labels the gradients of all modules that ran, for a peak before the first step of an optimizer."""
        for module in list(self.modules.values()):
            leaves = [parameter for parameter in module.parameters(recurse=False) if parameter.is_leaf]
            self.label([leaf.grad for leaf in leaves], Category.GRADIENTS)

    def label(self, tensors: Iterable[Any], category: Category) -> None:
        """Labels the memory of all tensors on simulated devices, of a sharded one its shard. Other values are ignored."""
        for local in local_tensors(tensors):
            if isinstance(local, torch.Tensor) and local.device.type == "sim" and local.layout == torch.strided:
                self.native.simulation_tag(local.untyped_storage()._cdata, category)

    def _before_forward(self, module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():  # the compiler would make the hook a part of its graphs
            return
        self.native.simulation_in_optimizer(False)  # _after_step does not run if a step fails
        self.steps, self._has_updated = self.steps + self._has_updated, False
        is_new = self.modules.get(id(module)) is not module
        self.modules[id(module)] = module
        # The first time with all submodules: some modules use parameters of their children without calling the children.
        self.label(module.parameters() if is_new else module._parameters.values(), Category.PARAMETERS)
        self.label(module.buffers() if is_new else module._buffers.values(), Category.PARAMETERS)

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        for group in optimizer.param_groups:
            self.label(group["params"], Category.PARAMETERS)
            self.label([parameter.grad for parameter in group["params"]], Category.GRADIENTS)
        self.native.simulation_in_optimizer(True)

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.native.simulation_in_optimizer(False)
        self._has_updated = True
        self.label(leaves_of_tree(list(optimizer.state.values())), Category.OPTIMIZER_STATE)
