"""The parts of an existing :class:`TrainStep` in a trace: its optimizers with their state, and its model and criterion."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ...optim.balanced import BalancedOptimizer
from ...replicas.model import DataParallelModel
from .optimizer_choice import use_kernels

__all__: list[str] = []


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
        self.plain = [one for one in optimizers if not isinstance(one, BalancedOptimizer)]
        self.recipes = [one.recipe for one in optimizers if isinstance(one, BalancedOptimizer)]

    def __call__(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Makes one optimizer of all. Those of balanced optimizers get the pieces among ``parameters``."""
        mine = set(map(id, parameters))
        made = []
        for kind, groups, defaults in self.recipes:
            pieces = [{**group, "params": [one for one in group["params"] if id(one) in mine]} for group in groups]
            made.append(kind([group for group in pieces if group["params"]], **defaults))
        return self._together([*self.plain, *made])

    def balanced(self, model: DataParallelModel, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Makes one optimizer of all, with a :class:`BalancedOptimizer` for ``model``.

        Without one among the given ones, the first becomes one.

        Raises:
            TypeError: the first optimizer is not elementwise.
        """
        plain = self.plain
        recipes = self.recipes or [(type(plain[0]), plain[0].param_groups, {})]
        made = [BalancedOptimizer(model, kind, groups, **defaults) for kind, groups, defaults in recipes]
        return self._together([*(plain if self.recipes else plain[1:]), *made])

    def _together(self, optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
        inner = [one.shards.inner if isinstance(one, BalancedOptimizer) else one for one in optimizers]
        for group in (group for one in inner for group in one.param_groups):
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
        return list(itertools.chain.from_iterable(one.param_groups for one in self.inner))

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """The state of all optimizers."""
        return {parameter: state for one in self.inner for parameter, state in one.state.items()}

    def step(self) -> None:
        """Steps every optimizer."""
        for one in self.optimizers:
            one.step()

    def zero_grad(self) -> None:
        """Clears the gradients of all parameters."""
        for one in self.optimizers:
            one.zero_grad()
