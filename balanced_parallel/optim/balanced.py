"""``BalancedOptimizer``: reduced gradients and optimizer state sharded over the devices, or over the ranks."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..replicas.model import DataParallelModel
from ..runtime.collectives import world_size
from ..runtime.torch_private import is_sharded
from ..runtime.values import check_type
from .rank_shards import ElementRanks, ParameterRanks
from .replica_shards import ReplicaShards
from .whole_parameters import Groups, Recipe, check_exact

_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")


class BalancedOptimizer(torch.optim.Optimizer):
    """An optimizer whose work and state are sharded over the devices of a model, or over the ranks.

    In one process each device owns an equal part of the parameters' elements, or whole parameters. Gradients are reduced to their
    owner. The optimizer steps there, in memory that the replicas share, and the update is copied to the other devices. Under
    torchrun each rank owns whole parameters. With ``strategy="fsdp"`` an elementwise optimizer updates the shards.

    ``state_dict()`` equals that of the plain optimizer over ``model.parameters()``, with tensors on the CPU, so a checkpoint
    moves between one device, many devices and many ranks. ``param_groups`` hold the owners' pieces and their gradients, for
    gradient scalers, clipping and schedulers. As in ZeRO and FSDP, ``parameter.grad`` of the model's own parameters is None after
    the reduction. :meth:`gradient` gathers it, and :meth:`zero_grad` or ``model.zero_grad()`` clears it; ``zero_grad()`` of the
    module inside does not. Every step begins with the values of ``model.parameters()``: what is written to the pieces is lost.
    Call :meth:`step` on the same model that ran the backward.

    Args:
        model: a :class:`DataParallelModel`, or the model that :func:`parallelize` returns under torchrun.
        optimizer_class: an optimizer of ``torch.optim`` or of another library.
        params: parameters or param groups; ``None`` is ``model.parameters()``. Those of other modules are updated in place.
        shard: ``"elements"``, or whole ``"parameters"``, the largest first, each to the owner with the fewest bytes. ``None`` is
            elements for SGD, Adam, AdamW, Adagrad, Adadelta, Adamax, NAdam, RAdam, RMSprop, Rprop and ASGD of torch and their
            subclasses; otherwise, and for ranks of DDP, parameters.
        defaults: settings of the optimizer: ``lr`` and so on.

    Raises:
        TypeError: another kind of model; or an optimizer that is not exact with these shards, as updates of small tensors show,
            or that needs a closure.
        ValueError: parameters have a ``BalancedOptimizer`` already, or ``"elements"`` for ranks of DDP.

    Example:
        >>> model = DataParallelModel(torch.nn.Linear(4, 2), ["cpu"] * 3)
        >>> optimizer = BalancedOptimizer(model, torch.optim.AdamW, lr=1e-3)
        >>> gather(model(torch.zeros(7, 4))).sum().backward()
        >>> optimizer.step()
        >>> [tuple(state["exp_avg"].shape) for state in optimizer.state_dict()["state"].values()]
        [(2, 4), (2,)]
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[Any] | None = None,
        shard: str | None = None,
        **defaults: Any,
    ) -> None:
        _check_class(optimizer_class)
        if shard not in (None, "elements", "parameters"):
            raise ValueError(f"shard={shard!r}, expected 'elements', 'parameters' or None")
        if not isinstance(model, nn.Module):
            raise TypeError(f"the model is an object of type {type(model).__name__}, expected a DataParallelModel")
        groups = _as_groups(model.parameters() if params is None else params)
        if not any(group["params"] for group in groups):
            raise ValueError("BalancedOptimizer got an empty parameter list, expected parameters to update")
        self._model, self._is_ready = model, False
        self.recipe, self.shard = Recipe(optimizer_class, groups, defaults), shard
        self.shards = _shard(model, self.recipe, shard)
        super().__init__(self.shards.inner.param_groups, self.shards.inner.defaults)
        self.state = self.shards.inner.state
        self._is_ready = True

    def __reduce__(self) -> Any:
        """Makes a copy that belongs to the copy of the model. Under torchrun every rank makes one."""
        return _rebuild, (self._model, self.recipe, self.shard, self.state_dict())

    @property
    def param_groups(self) -> Groups:
        """The groups of the optimizer over the shards. Gradients on other devices are moved to the owners first."""
        if self._is_ready:
            self.shards.collect()
        return self.shards.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: Groups) -> None:
        """Ignores what the base class sets: the groups are those of the optimizer over the shards."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ``RuntimeError``: shards are made once, of all parameters."""
        if self._is_ready:
            raise RuntimeError("a BalancedOptimizer takes its param groups when it is made: give all of them in params=")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates each shard on the device that owns it. Returns the result of the closure."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self.shards.run("step")
        return loss

    def train(self) -> None:
        """Begins the training mode of optimizers that have modes, such as schedule-free ones. Every rank must call this."""
        if hasattr(self.recipe.optimizer_class, "train"):
            self.shards.run("train")

    def eval(self) -> None:
        """Begins the evaluation mode of optimizers that have modes. Every rank must call this."""
        if hasattr(self.recipe.optimizer_class, "eval"):
            self.shards.run("eval")

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Returns a copy of the whole gradient of one of the model's parameters, or None. Every rank must call this."""
        return self.shards.gradient(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all parameters and of their shards."""
        self.shards.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the plain optimizer, with tensors on the CPU. Every rank must call this."""
        for prepare in self._optimizer_state_dict_pre_hooks.values():  # torch has no public list of hooks, here and below
            prepare(self)
        state = self.shards.state_dict()
        for change in self._optimizer_state_dict_post_hooks.values():
            changed = change(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the state of a plain optimizer over the same parameters."""
        state_dict = dict(state_dict)
        for change in self._optimizer_load_state_dict_pre_hooks.values():
            changed = change(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self.shards.load_state_dict(state_dict)
        self.state = self.shards.inner.state
        for finish in self._optimizer_load_state_dict_post_hooks.values():
            finish(self)


def _shard(model: nn.Module, recipe: Recipe, shard: str | None) -> ReplicaShards | ElementRanks:
    is_elementwise = issubclass(recipe.optimizer_class, tuple(getattr(torch.optim, name) for name in _ELEMENTWISE))
    kind = shard or ("elements" if is_elementwise else "parameters")
    if isinstance(model, DataParallelModel):
        count = len(set(model.devices))
    elif world_size() > 1 or dist.is_initialized():
        count = world_size()
    else:
        raise TypeError(
            f"the model is a {type(model).__name__}, expected a DataParallelModel or the model that parallelize returns"
        )
    if count > 1 and not is_elementwise:
        check_exact(recipe, kind)
    if isinstance(model, DataParallelModel):
        return ReplicaShards(model, recipe, kind)
    if kind == "elements" and any(is_sharded(parameter) for group in recipe.groups for parameter in group["params"]):
        return ElementRanks(recipe)
    if shard == "elements":
        raise ValueError("shard='elements' with ranks of DDP, expected 'parameters' or None: each rank owns whole parameters")
    return ParameterRanks(recipe)


def _rebuild(model: nn.Module, recipe: Recipe, shard: str | None, state: Any) -> BalancedOptimizer:
    optimizer = BalancedOptimizer(model, recipe.optimizer_class, recipe.groups, shard, **recipe.defaults)
    optimizer.load_state_dict(state)  # a new optimizer has no hooks
    return optimizer


def _check_class(optimizer_class: type[torch.optim.Optimizer]) -> None:
    if isinstance(optimizer_class, torch.optim.Optimizer):
        name = type(optimizer_class).__name__
        raise TypeError(f"an instance of {name} was given, expected the class: BalancedOptimizer(model, {name}, lr=...)")
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, torch.optim.Optimizer):
        name = getattr(optimizer_class, "__name__", repr(optimizer_class))
        raise TypeError(f"{name} was given, expected a class of optimizers, such as torch.optim.AdamW")
    refuse_closures(optimizer_class, "BalancedOptimizer")


def _as_groups(params: Iterable[Any]) -> Groups:
    check_type("params", params, Iterable, "parameters, or param groups")
    entries = list(params)
    groups = [dict(entry) for entry in entries] if entries and isinstance(entries[0], dict) else [{"params": entries}]
    for group in groups:
        parameters = group["params"]
        group["params"] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return groups


def refuse_closures(optimizer_class: type[torch.optim.Optimizer], caller: str) -> None:
    """Raises ``TypeError`` if ``step()`` of an optimizer needs a closure, which ``caller``, a name, does not have."""
    parameters = list(inspect.signature(optimizer_class.step).parameters.values())[1:]
    if parameters and parameters[0].default is inspect.Parameter.empty and parameters[0].name == "closure":
        raise TypeError(
            f"{optimizer_class.__name__} evaluates the loss several times per step, and {caller} once: expected an optimizer "
            "whose step() needs no closure; otherwise call optimizer.step(closure) in a loop of your own"
        )
