"""An optimizer that is made once there are parameters."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...optim.balanced import BalancedOptimizer
from ...replicas.model import DataParallelModel

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

    def __deepcopy__(self, memo: dict[int, Any]) -> "OptimizerChoice":
        return self  # its settings keep their values in a trace

    def __call__(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        return self._with_kernels(self.make(parameters))

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
        return self._with_kernels(BalancedOptimizer(model, kind, parameters, **settings))

    def _with_kernels(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for group in optimizer.param_groups if self.foreach else ():
            if group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = True
        return optimizer
