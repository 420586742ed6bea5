"""Whole parameters, each updated by one owner: a device of one process, or a rank.

Optimizers such as Muon, SOAP and Shampoo need whole matrices. One plain optimizer runs at each owner, over the parameters that
belong to it. This is exact if no update depends on another parameter, which :func:`check_exact` tries out. ::

    parameters   | embedding         | weight      | weight | bias |
    owners       | device 0          | device 1                    |   the largest first, each to the owner with the fewest bytes
"""

import inspect
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
    """Returns the owner of each parameter. Bytes stand for the work as well, and frozen parameters have none."""
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
        self._parts = [
            recipe.make(
                [{**group, "params": [values[p] for p in group["params"] if p in values]} for group in inner.param_groups]
            )
            for values in owned
        ]
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


_UPDATES = 12  # of small tensors; D-Adaptation's first ones hardly differ


def check_exact(recipe: Recipe, shard: str) -> None:
    """Raises ``TypeError`` unless small tensors get the same values from sharded optimizers as from one.

    Others divide by a norm of all gradients, for example, or draw random numbers. A thread of its own has no modes of torch.
    """
    name = recipe.optimizer_class.__name__
    with ThreadPoolExecutor(1) as thread:
        for dtype in (torch.float64, torch.float32):  # many kernels and some devices have no float64
            trial = thread.submit(_is_exact, recipe, shard, dtype)
            if trial.exception() is None:
                break
    if (error := trial.exception()) is not None:
        raise TypeError(f"{name} failed to update small tensors, which shows if shard={shard!r} is exact: {error}") from error
    if not trial.result():
        expected = "elementwise updates" if shard == "elements" else "updates and state of single parameters, no random numbers"
        raise TypeError(
            f"{name} with shard={shard!r} differs from {name} over the whole model, expected {expected}: turn off norms or sums "
            "over all parameters (clip with TrainStep(max_grad_norm=...)), or use it without BalancedOptimizer"
        )


def _is_exact(recipe: Recipe, shard: str, dtype: torch.dtype) -> bool:
    rate = inspect.signature(recipe.optimizer_class).parameters.get("lr")
    if rate is not None and rate.default is not rate.empty:  # a small one hides that all parameters have one step size
        groups = [{name: value for name, value in group.items() if name != "lr"} for group in recipe.groups]
        defaults = {name: value for name, value in recipe.defaults.items() if name != "lr"}
        recipe = Recipe(recipe.optimizer_class, groups, defaults)
    whole, sharded = (_update_samples(recipe, shard, dtype, is_cut=is_cut) for is_cut in (False, True))
    return whole is not None and sharded is not None and all(map(torch.equal, whole, sharded))


def _update_samples(recipe: Recipe, shard: str, dtype: torch.dtype, *, is_cut: bool) -> list[Tensor] | None:
    """Returns small tensors, at most two for each group, after updates by one optimizer, or sharded.

    Returns None if the optimizer has state besides that of each parameter, such as a number of steps: it has no owner.
    """
    samples = [(place, parameter) for place, group in enumerate(recipe.groups) for parameter in group["params"][:2]][:16]
    limit = 96 if shard == "elements" else 8  # a matrix has more elements than a block of quantized state
    generator = torch.Generator().manual_seed(0)

    def draw(parameter: Tensor) -> Tensor:
        shape, kind = [min(size, limit) for size in parameter.shape], dtype.to_complex() if parameter.is_complex() else dtype
        return torch.randn(shape, dtype=kind, generator=generator).to(parameter.device)

    def cut(tensor: Tensor) -> Sequence[Tensor]:
        return tensor.view(-1).split(tensor.numel() // 3 + 1) if is_cut and shard == "elements" else [tensor.detach()]

    values, directions = ([draw(parameter) for _, parameter in samples] for _ in range(2))
    noise = 1.0 if shard == "elements" else 0.1  # D-Adaptation needs steady gradients
    leaves = [[piece.requires_grad_() for piece in cut(value)] for value in values]
    parts = 2 if is_cut and shard == "parameters" else 1
    groups: list[Groups] = [[{**group, "params": []} for group in recipe.groups] for _ in range(parts)]
    for number, (place, _) in enumerate(samples):
        groups[number % parts][place]["params"] += leaves[number]
    optimizers = [recipe.make(part) for part in groups if any(group["params"] for group in part)]
    for optimizer in optimizers:
        getattr(optimizer, "train", bool)()  # schedule-free optimizers have it
    for _ in range(_UPDATES):
        for (_, parameter), pieces, direction in zip(samples, leaves, directions, strict=True):
            for piece, gradient in zip(pieces, cut(direction + noise * draw(parameter)), strict=True):
                piece.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    has_other_state = any(not isinstance(key, Tensor) for optimizer in optimizers for key in optimizer.state)
    return None if has_other_state else values
