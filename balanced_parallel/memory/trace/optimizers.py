"""Optimizers of a trace: one that is made once there are parameters, or copies of those of an existing step."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...optim.balanced import BalancedOptimizer, is_elementwise, refuse_closures
from ...optim.whole_parameters import Recipe
from ..errors import UnknownMemory


@dataclass(frozen=True)
class OptimizerChoice:
    """The optimizer of an update, to be made. ``foreach`` selects the multi-tensor kernels, torch's default on a GPU."""

    make: Callable[..., torch.optim.Optimizer]
    foreach: bool

    @property
    def plain_make(self) -> Any:
        """The class or the function, without the settings of a ``functools.partial``."""
        return self.make.func if isinstance(self.make, functools.partial) else self.make  # a partial of a partial is flat

    @property
    def name(self) -> str:
        """The name of the class or the function."""
        return getattr(self.plain_make, "__name__", repr(self.plain_make))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a ``functools.partial``."""
        return self.make.keywords if isinstance(self.make, functools.partial) else {}

    @property
    def needs_whole_parameters(self) -> bool:
        """True for classes that are not elementwise, such as Muon and Adafactor: shards are not enough for them."""
        return isinstance(self.plain_make, type) and not is_elementwise(self.plain_make)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OptimizerChoice":
        return self  # its settings keep their values in a trace

    def plain(self, parameters: Iterable[Tensor]) -> list[torch.optim.Optimizer]:
        """Makes the optimizer."""
        optimizer = self.make(parameters)
        refuse_closures(type(optimizer), "an estimate")
        use_kernels([optimizer], self.foreach)
        return [optimizer]

    def state_bytes(self, parameters: Sequence[Tensor]) -> int:
        """Returns about the bytes of state for ``parameters``, from an update of a small one; 0 if this update fails."""
        small = torch.nn.Parameter(torch.zeros(64, 64))
        small.grad = torch.zeros_like(small)
        try:
            (optimizer,) = self.plain([small])
            optimizer.step()
        except Exception:  # noqa: BLE001 - an optimizer may raise anything, and a trace tells it
            return 0
        states = [state for state in optimizer.state[small].values() if isinstance(state, Tensor)]
        return sum(each.nbytes for each in parameters) * sum(each.nbytes for each in states) // small.nbytes

    def balanced(self, model: nn.Module, parameters: Iterable[Tensor]) -> list[torch.optim.Optimizer]:
        """Makes a :class:`BalancedOptimizer` for ``model``."""
        if not isinstance(self.plain_make, type):
            raise TypeError(f"optimizer={self.make!r}, expected a class, or a functools.partial of one, with BalancedOptimizer")
        optimizer = BalancedOptimizer(model, self.plain_make, parameters, **self.settings)
        use_kernels([optimizer], self.foreach)
        return [optimizer]


def inner_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Returns the optimizers of torch, those inside of balanced ones."""
    return [each.shards.inner if isinstance(each, BalancedOptimizer) else each for each in optimizers]


def use_kernels(optimizers: Iterable[torch.optim.Optimizer], foreach: bool) -> None:
    """Selects the kernels that torch would choose: with ``foreach``, as on a GPU, where Adafactor alone loops over tensors."""
    for optimizer in optimizers:
        for group in optimizer.param_groups if foreach and not isinstance(optimizer, torch.optim.Adafactor) else ():
            if group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = True


def refuse_merges(optimizers: Iterable[torch.optim.Optimizer], gradients: Iterable[Any]) -> None:
    """Raises :class:`UnknownMemory` if an optimizer merges the rows of sparse gradients, as all do but SGD without momentum."""
    if not any(isinstance(each, Tensor) and each.layout == torch.sparse_coo for each in gradients):
        return
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.SGD) or any(group["momentum"] for group in optimizer.param_groups):
            raise UnknownMemory(
                f"{type(optimizer).__name__} merges the rows of a sparse gradient, and how many differ depends on values: give "
                "memory.estimate the module with sparse=False, or SGD without momentum"
            )


class ExistingOptimizers:
    """The optimizers of a step with their state, of which a trace has fake copies. Balanced ones are made anew there."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], foreach: bool) -> None:
        self.foreach = foreach
        self.others = [optimizer for optimizer in optimizers if not isinstance(optimizer, BalancedOptimizer)]
        self.recipes = [(each.recipe, each.shard) for each in optimizers if isinstance(each, BalancedOptimizer)]

    def plain(self, parameters: Iterable[Tensor]) -> list[torch.optim.Optimizer]:
        """Returns all optimizers. Those in the place of balanced ones have the pieces among ``parameters``."""
        pieces_of_model = set(map(id, parameters))
        optimizers = [*self.others]
        for (kind, groups, defaults), _ in self.recipes:
            pieces = [
                {**group, "params": [piece for piece in group["params"] if id(piece) in pieces_of_model]} for group in groups
            ]
            optimizers.append(kind([group for group in pieces if group["params"]], **defaults))
        return self._suited(optimizers)

    def balanced(self, model: nn.Module, parameters: Iterable[Tensor]) -> list[torch.optim.Optimizer]:
        """Returns all optimizers, with a :class:`BalancedOptimizer` for ``model``. If there was none, the first becomes one."""
        others, recipes = self.others, self.recipes
        if not recipes:
            first, *others = others
            recipes = [(Recipe(type(first), first.param_groups, {}), None)]
        balanced = [BalancedOptimizer(model, kind, groups, shard, **rest) for (kind, groups, rest), shard in recipes]
        return self._suited([*others, *balanced])

    def _suited(self, optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        inner = inner_optimizers(optimizers)
        for group in (group for optimizer in inner for group in optimizer.param_groups if "capturable" in group):
            group["capturable"] = False  # torch refuses it for the CPUs of a trace
        use_kernels(inner, self.foreach)
        return optimizers
