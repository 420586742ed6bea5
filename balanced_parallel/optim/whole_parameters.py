"""Whole parameters, each updated by one owner: a device of one process, or a rank.

Optimizers such as Muon, SOAP and Shampoo need whole matrices. One plain optimizer runs at each owner, over the parameters that
belong to it. This is exact if no update depends on another parameter, which :func:`check_exact` tries out. ::

    parameters   | embedding         | weight      | weight | bias |
    owners       | device 0          | device 1                    |   the largest first, each to the owner with the fewest bytes
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

Groups = list[dict[str, Any]]


class Recipe(NamedTuple):
    """Arguments of a plain optimizer over whole parameters."""

    optimizer_class: type[Any]
    groups: Groups
    defaults: dict[str, Any]

    def make(self, groups: Groups) -> Any:
        """Makes the optimizer over other tensors."""
        return self.optimizer_class(groups, **self.defaults)


def assign_owners(parameters: Iterable[Tensor], count: int) -> dict[Tensor, int]:
    """Returns the owner of each parameter. The largest comes first, each goes to the owner with the fewest bytes so far.

    Bytes stand for the work as well. Frozen parameters have none.
    """
    loads, owners = [0] * count, {}
    for parameter in sorted(parameters, key=lambda tensor: tensor.nbytes * tensor.requires_grad, reverse=True):
        owners[parameter] = owner = loads.index(min(loads))
        loads[owner] += parameter.nbytes * parameter.requires_grad
    return owners


class OwnerOptimizers:
    """One plain optimizer for each owner in this process. Settings and state are those of ``inner``, which has all parameters.

    ``owned`` has for each owner its parameters, and the tensors that its optimizer updates: themselves, or whole values.
    """

    def __init__(self, recipe: Recipe, inner: torch.optim.Optimizer, owned: Sequence[Mapping[Tensor, Tensor]]) -> None:
        self.inner, self.owned = inner, owned
        self._parts = [recipe.make([_restricted(group, values) for group in inner.param_groups]) for values in owned]
        inner.state.clear()  # some optimizers make it for all parameters
        self._keep_state()

    def run(self, method: str) -> None:
        """Calls ``step()``, ``train()`` or ``eval()`` of each optimizer."""
        for part, values in zip(self._parts, self.owned, strict=True):
            for group, whole in zip(part.param_groups, self.inner.param_groups, strict=True):
                group.update({**whole, "params": group["params"]})
            part.state.clear()
            part.state.update((values[parameter], state) for parameter, state in self.inner.state.items() if parameter in values)
        for part in self._parts:
            getattr(part, method)()
        self._keep_state()

    def _keep_state(self) -> None:
        for part, values in zip(self._parts, self.owned, strict=True):
            self.inner.state.update((parameter, part.state[value]) for parameter, value in values.items() if value in part.state)
            for group, whole in zip(part.param_groups, self.inner.param_groups, strict=True):
                if group["params"]:  # settings may count steps
                    whole.update({**group, "params": whole["params"]})


def _restricted(group: dict[str, Any], values: Mapping[Tensor, Tensor]) -> dict[str, Any]:
    return {**group, "params": [values[parameter] for parameter in group["params"] if parameter in values]}


_UPDATES = 12  # of small tensors; D-Adaptation's first ones hardly differ


def check_exact(recipe: Recipe, shard: str) -> None:
    """Raises ``TypeError`` unless small tensors get the same values from sharded optimizers as from one.

    Some optimizers divide by a norm of all gradients, or draw random numbers. The updates run in a thread of their own, without
    the modes of this one.
    """
    name = recipe.optimizer_class.__name__
    with ThreadPoolExecutor(1) as thread:
        try:
            whole, sharded = (thread.submit(_update_samples, recipe, each).result() for each in (None, shard))
        except Exception as error:
            raise TypeError(f"{name} failed to update small tensors, which shows if shard={shard!r} is exact: {error}") from error
    if not all(map(torch.equal, whole, sharded)):
        expected = "elementwise updates" if shard == "elements" else "updates of single parameters, without random numbers"
        raise TypeError(
            f"{name} with shard={shard!r} differs from {name} over the whole model, expected {expected}: turn off norms or sums "
            "over all parameters (clip with TrainStep(max_grad_norm=...)), or use it without BalancedOptimizer"
        )


def _update_samples(recipe: Recipe, shard: str | None) -> list[Tensor]:
    """Returns small tensors, at most two for each group, after updates by one optimizer, or sharded."""
    generator, limit = torch.Generator().manual_seed(0), 96  # squared, larger than the blocks of quantized state
    samples = [(place, parameter) for place, group in enumerate(recipe.groups) for parameter in group["params"][:2]]

    def draw() -> list[Tensor]:
        tensors = []
        for _, parameter in samples:
            dtype = torch.complex64 if parameter.is_complex() else torch.float32
            shape = [min(size, limit) for size in parameter.shape]
            tensors.append(torch.randn(shape, dtype=dtype, generator=generator).to(parameter.device))
        return tensors

    def cut(tensor: Tensor) -> Sequence[Tensor]:
        return tensor.view(-1).split(tensor.numel() // 2 + 1) if shard == "elements" else [tensor.detach()]

    values, directions = draw(), draw()
    leaves = [[piece.requires_grad_() for piece in cut(value)] for value in values]
    parts = min(2, len(samples)) if shard == "parameters" else 1
    optimizers = []
    for part in range(parts):
        groups: Groups = [{**group, "params": []} for group in recipe.groups]
        for number in range(part, len(samples), parts):
            groups[samples[number][0]]["params"] += leaves[number]
        optimizers.append(recipe.make(groups))
        if hasattr(optimizers[-1], "train"):  # of schedule-free optimizers
            optimizers[-1].train()
    for _ in range(_UPDATES):
        for pieces, direction, noise in zip(leaves, directions, draw(), strict=True):
            for piece, gradient in zip(pieces, cut(direction + noise / 10), strict=True):
                piece.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    return values
