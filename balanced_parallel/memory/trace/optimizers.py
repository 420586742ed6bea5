"""Optimizers of a trace: one that is made once there are parameters, or copies of those of an existing step."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ...optim.balanced import BalancedOptimizer, refuse_closures
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
        optimizer = self.make(parameters)
        refuse_closures(optimizer, "an estimate")
        use_kernels([optimizer], self.foreach)
        return optimizer

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
        optimizer = BalancedOptimizer(model, kind, parameters, **settings)
        use_kernels([optimizer], self.foreach)
        return optimizer


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
    if not adds and any(isinstance(each, Tensor) and each.layout == torch.sparse_coo for each in gradients):
        raise UnknownMemory(
            f"{type(optimizer).__name__} merges the rows of a sparse gradient, and how many differ depends on values: give "
            "memory.estimate the module with sparse=False, or SGD without momentum"
        )


class ExistingOptimizers:
    """The optimizers of a step, in the place of an :class:`OptimizerChoice`.

    A fake copy of it, made together with the module, has fake copies of the optimizers, of their settings and of the state that
    they have. A :class:`BalancedOptimizer` is made anew, for the traced model.

    Args:
        optimizers: real ones, over parameters of the module and of the criterion.
        foreach: selects torch's multi-tensor kernels, the default of torch for parameters on a GPU.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], foreach: bool) -> None:
        self.foreach = foreach
        self.plain = [optimizer for optimizer in optimizers if not isinstance(optimizer, BalancedOptimizer)]
        self.recipes = [optimizer.recipe for optimizer in optimizers if isinstance(optimizer, BalancedOptimizer)]

    def __call__(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Makes one optimizer of all. Those of balanced optimizers get the pieces among ``parameters``."""
        pieces_of_model = set(map(id, parameters))
        balanced = []
        for kind, groups, defaults in self.recipes:
            pieces = [
                {**group, "params": [piece for piece in group["params"] if id(piece) in pieces_of_model]} for group in groups
            ]
            balanced.append(kind([group for group in pieces if group["params"]], **defaults))
        return self._together([*self.plain, *balanced])

    def balanced(self, model: DataParallelModel, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Makes one optimizer of all, with a :class:`BalancedOptimizer` for ``model``.

        Without one among the given ones, the first becomes one.

        Raises:
            TypeError: the first optimizer is not elementwise.
        """
        plain = self.plain
        recipes = self.recipes or [(type(plain[0]), plain[0].param_groups, {})]
        balanced = [BalancedOptimizer(model, kind, groups, **defaults) for kind, groups, defaults in recipes]
        return self._together([*(plain if self.recipes else plain[1:]), *balanced])

    def _together(self, optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
        inner = [each.shards.inner if isinstance(each, BalancedOptimizer) else each for each in optimizers]
        for group in (group for optimizer in inner for group in optimizer.param_groups):
            if "capturable" in group:
                group["capturable"] = False  # torch refuses it for the CPUs of a trace
        use_kernels(inner, self.foreach)
        return cast(torch.optim.Optimizer, Together(optimizers, inner))


class Together:
    """Several optimizers as one.

    Args:
        inner: the optimizers of torch inside of ``optimizers``.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], inner: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""
        return list(itertools.chain.from_iterable(optimizer.param_groups for optimizer in self.inner))

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """The state of all optimizers."""
        return {parameter: state for optimizer in self.inner for parameter, state in optimizer.state.items()}

    def step(self) -> None:
        """Steps every optimizer."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Clears the gradients of all parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
