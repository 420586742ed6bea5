"""An optimizer that is made once there are parameters."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...optim.balanced import BalancedOptimizer
from ...optim.closures import refuse_closures
from ...replicas.model import DataParallelModel
from ..errors import UnknownMemory

__all__: list[str] = []


@dataclass(frozen=True)
class OptimizerChoice:
    """The optimizer of an update.

    Args:
        make: a class of ``torch.optim``, a ``functools.partial`` of one, or a function of the parameters.
        foreach: selects torch's multi-tensor kernels, the default of torch for parameters on a GPU.
    """

    make: Callable[..., torch.optim.Optimizer]
    foreach: bool

    @property
    def kind(self) -> Any:
        """The class or the function, without the settings of a ``functools.partial``."""
        kind: Any = self.make
        while isinstance(kind, functools.partial):
            kind = kind.func
        return kind

    @property
    def name(self) -> str:
        """The name of the class or the function."""
        return getattr(self.kind, "__name__", repr(self.kind))

    def __deepcopy__(self, memo: dict[int, Any]) -> "OptimizerChoice":
        return self  # its settings keep their values in a trace

    def __call__(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        made = self.make(parameters)
        refuse_closures(made, "an estimate")
        use_kernels([made], self.foreach)
        return made

    def balanced(self, model: DataParallelModel, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Makes a :class:`BalancedOptimizer` for ``model``.

        Raises:
            TypeError: the optimizer was given as a function, not as a class.
        """
        kind: Any = self.make
        settings: dict[str, Any] = {}
        while isinstance(kind, functools.partial):
            kind, settings = kind.func, kind.keywords | settings
        if not isinstance(kind, type):
            raise TypeError(f"optimizer={self.make!r}, expected a class, or a functools.partial of one, with BalancedOptimizer")
        made = BalancedOptimizer(model, kind, parameters, **settings)
        use_kernels([made], self.foreach)
        return made


def use_kernels(optimizers: Iterable[torch.optim.Optimizer], foreach: bool) -> None:
    """Selects the kernels that torch would choose: with ``foreach``, as on a GPU, where Adafactor alone loops over tensors."""
    for optimizer in optimizers:
        for group in optimizer.param_groups if foreach and not isinstance(optimizer, torch.optim.Adafactor) else ():
            if group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = True


def refuse_merges(optimizer: torch.optim.Optimizer, gradients: Iterable[Any]) -> None:
    """Raises :class:`UnknownMemory` if an optimizer merges the rows of sparse gradients. How many differ depends on values.

    Only SGD without momentum adds the rows to the parameter as they are.
    """
    adds = isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)
    if not adds and any(isinstance(one, Tensor) and one.layout == torch.sparse_coo for one in gradients):
        raise UnknownMemory(
            f"{type(optimizer).__name__} merges the rows of a sparse gradient, and how many differ depends on values: give "
            "memory.estimate the module with sparse=False, or SGD without momentum"
        )
