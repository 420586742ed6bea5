"""What the bytes are for. The ledger sees inputs and activations by itself; modules and optimizers say which are theirs."""

import ctypes
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

__all__: list[str] = []

_gradient: Any = torch.Tensor.grad  # without summing what lies elsewhere, as replicas and optimizers do for a reader


class Category(IntEnum):
    """In the order of ``native/ledger.h``."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER_STATE = 2
    INPUTS = 3
    ACTIVATIONS = 4
    OTHER = 5

    @property
    def title(self) -> str:
        return self.name.lower().replace("_", " ")


class Labels:
    """Tells the ledger, while :meth:`watching`, which memory holds parameters, gradients and optimizer state.

    It listens to every module's forward and every optimizer's step. What it says holds for the past too: a peak before the
    optimizer saw its gradients is shown with gradients.
    """

    def __init__(self, native: ctypes.CDLL) -> None:
        self.native = native
        self.modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as hooks:
            hooks.enter_context(register_module_forward_pre_hook(self._before_forward))
            for handle in (
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ):
                hooks.callback(handle.remove)
            yield

    def label_gradients(self) -> None:
        """Gradients of the modules that ran, for a peak that no optimizer has followed yet."""
        for module in list(self.modules.values()):
            leaves = [held for held in module._parameters.values() if held is not None and held.is_leaf]
            self.label(map(_gradient.__get__, leaves), Category.GRADIENTS)

    def label(self, tensors: Iterable[Any], category: Category) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "sim" and tensor.layout == torch.strided:
                self.native.simulation_tag(tensor.untyped_storage()._cdata, category)

    def _before_forward(self, module: nn.Module, args: object) -> None:
        self.native.simulation_in_optimizer(False)  # a step that failed did not say that it ended
        is_new = self.modules.get(id(module)) is not module
        self.modules[id(module)] = module
        # all below it the first time: some modules use their children's parameters without calling the children
        self.label(module.parameters() if is_new else module._parameters.values(), Category.PARAMETERS)
        self.label(module.buffers() if is_new else module._buffers.values(), Category.PARAMETERS)

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.label(parameters, Category.PARAMETERS)
        self.label((parameter.grad for parameter in parameters), Category.GRADIENTS)
        self.native.simulation_in_optimizer(True)

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.native.simulation_in_optimizer(False)
        self.label(tree_leaves(list(optimizer.state.values())), Category.OPTIMIZER_STATE)
