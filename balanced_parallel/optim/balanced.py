"""``BalancedOptimizer``: reduced gradients and optimizer state sharded over the devices, or over the ranks."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..replicas.model import DataParallelModel
from ..runtime.collectives import batch_group, rank, world_size
from ..runtime.torch_private import is_sharded, map_tensors
from ..runtime.values import check_type
from .replica_shards import Groups, ReplicaShards

_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")


class BalancedOptimizer(torch.optim.Optimizer):
    """An optimizer of torch whose work and state are sharded over the devices of a model.

    With replicas in one process, each device owns an equal part of the parameters' elements. Gradients are reduced to their
    owner. The optimizer steps there, in memory that the replicas share, and the update is copied to the other devices. This moves
    ``4 (n - 1) / n`` times the bytes of the parameters per step and device, in and out together. Under torchrun it is
    ``torch.distributed.optim.ZeroRedundancyOptimizer``, or the plain optimizer over the shards of ``strategy="fsdp"``.

    ``state_dict()`` equals that of the plain optimizer over ``model.parameters()``, with tensors on the CPU, so a checkpoint
    moves between one device, many devices and many ranks. ``param_groups`` hold the owners' pieces and their gradients, for
    gradient scalers, clipping and schedulers. As in ZeRO and FSDP, ``parameter.grad`` of the model's own parameters is None after
    the reduction. :meth:`gradient` gathers it, and :meth:`zero_grad` or ``model.zero_grad()`` clears it; ``zero_grad()`` of the
    module inside does not. Every step begins with the values of ``model.parameters()``: what is written to the pieces is lost.
    Call :meth:`step` on the same model that ran the backward.

    Args:
        model: a :class:`DataParallelModel`, or the model that :func:`parallelize` returns under torchrun.
        optimizer_class: an elementwise optimizer of ``torch.optim``, or a subclass of one.
        params: parameters or param groups; ``None`` is ``model.parameters()``. Those of other modules are updated in place.
        defaults: settings of the optimizer: ``lr`` and so on.

    Raises:
        TypeError: another kind of model; or an optimizer that is not elementwise, such as LBFGS, Adafactor or Muon.
        ValueError: the model has a ``BalancedOptimizer`` already.

    Example:
        >>> model = DataParallelModel(torch.nn.Linear(4, 2), ["cpu"] * 3)
        >>> optimizer = BalancedOptimizer(model, torch.optim.AdamW, lr=1e-3)
        >>> gather(model(torch.zeros(7, 4))).sum().backward()
        >>> optimizer.step()
        >>> [tuple(state["exp_avg"].shape) for state in optimizer.state_dict()["state"].values()]
        [(2, 4), (2,)]
    """

    def __init__(
        self, model: nn.Module, optimizer_class: type[torch.optim.Optimizer], params: Iterable[Any] | None = None, **defaults: Any
    ) -> None:
        _refuse_others(optimizer_class)
        if not isinstance(model, nn.Module):
            raise TypeError(f"the model is an object of type {type(model).__name__}, expected a DataParallelModel")
        groups = _as_groups(model.parameters() if params is None else params)
        if not any(group["params"] for group in groups):
            raise ValueError("BalancedOptimizer got an empty parameter list, expected parameters to update")
        self._model, self._is_ready = model, False
        self.recipe = optimizer_class, groups, defaults  # of the plain optimizer
        self.shards = _shard(model, *self.recipe)
        super().__init__(self.shards.inner.param_groups, self.shards.inner.defaults)
        self.state = self.shards.inner.state
        self._is_ready = True

    def __reduce__(self) -> Any:
        """Makes a copy that belongs to the copy of the model. Under torchrun every rank makes one."""
        return _rebuild, (self._model, *self.recipe, self.state_dict())

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
        self.shards.step()
        return loss

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


def _shard(model: nn.Module, optimizer_class: Any, groups: Groups, defaults: dict[str, Any]) -> "ReplicaShards | _DTensorShards":
    if isinstance(model, DataParallelModel):
        return ReplicaShards(model, groups, optimizer_class, defaults)
    if any(is_sharded(parameter) for group in groups for parameter in group["params"]):
        return _DTensorShards(optimizer_class(groups, **defaults))
    if world_size() > 1 or dist.is_initialized():
        from torch.distributed.optim import ZeroRedundancyOptimizer  # imports torch._dynamo, which takes seconds

        return _RankShards(ZeroRedundancyOptimizer(groups, optimizer_class, process_group=batch_group(), **defaults))
    raise TypeError(f"the model is a {type(model).__name__}, expected a DataParallelModel or the model that parallelize returns")


class _DTensorShards:
    """The plain optimizer over groups of ``DTensor``s, sharded as the parameters are. A state dict has whole tensors."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.step, self.zero_grad = inner.step, inner.zero_grad

    def collect(self) -> None:
        """Does nothing: the backward has reduced the gradients."""

    def gradient(self, parameter: Tensor) -> Tensor | None:
        return None if parameter.grad is None else _whole(parameter.grad)

    def state_dict(self) -> dict[str, Any]:
        whole: dict[str, Any] = map_tensors(lambda tensor: _whole(tensor).cpu(), self.inner.state_dict())
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        from torch.distributed.tensor import distribute_tensor

        def distribute(value: Any, like: Any) -> Any:
            if not isinstance(value, Tensor) or is_sharded(value):
                return value
            value = value.clone()  # torch would go on with the caller's tensors
            has_elements = value.shape == like.shape and value.dim() > 0
            return distribute_tensor(value.to(like.device), like.device_mesh, like.placements) if has_elements else value

        parameters = [parameter for group in self.inner.param_groups for parameter in group["params"]]
        state = {
            key: {name: distribute(value, parameters[key]) for name, value in values.items()}
            for key, values in state_dict["state"].items()
        }
        self.inner.load_state_dict({**state_dict, "state": state})


class _RankShards(_DTensorShards):
    """State sharded over the ranks of the running process group. A step broadcasts the updated parameters."""

    def state_dict(self) -> dict[str, Any]:
        self.inner.consolidate_state_dict(to=0)
        shared: list[Any] = [super().state_dict() if rank() == 0 else None]
        dist.broadcast_object_list(shared, group=batch_group(), group_src=0)
        whole: dict[str, Any] = shared[0]
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(dict(state_dict))


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return whole.detach()


def _rebuild(model: nn.Module, optimizer_class: Any, groups: Groups, defaults: dict[str, Any], state: Any) -> BalancedOptimizer:
    optimizer = BalancedOptimizer(model, optimizer_class, groups, **defaults)
    optimizer.load_state_dict(state)  # a new optimizer has no hooks
    return optimizer


def _refuse_others(optimizer_class: type[torch.optim.Optimizer]) -> None:
    elementwise = tuple(getattr(torch.optim, name) for name in _ELEMENTWISE)
    if isinstance(optimizer_class, torch.optim.Optimizer):
        name = type(optimizer_class).__name__
        raise TypeError(f"an instance of {name} was given, expected the class: BalancedOptimizer(model, {name}, lr=...)")
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, elementwise):
        name = getattr(optimizer_class, "__name__", repr(optimizer_class))
        raise TypeError(
            f"{name} was given, expected an elementwise optimizer of torch.optim ({', '.join(_ELEMENTWISE)}) or a subclass of "
            "one: others need whole parameters, and cannot be spread over devices; use it by itself"
        )


def _as_groups(params: Iterable[Any]) -> Groups:
    check_type("params", params, Iterable, "parameters, or param groups")
    entries = list(params)
    groups = [dict(entry) for entry in entries] if entries and isinstance(entries[0], dict) else [{"params": entries}]
    for group in groups:
        parameters = group["params"]
        group["params"] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return groups


def refuse_closures(optimizer: torch.optim.Optimizer, caller: str) -> None:
    """Raises ``TypeError`` if ``optimizer.step()`` needs a closure, which ``caller``, a name, does not have."""
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    if parameters and parameters[0].default is inspect.Parameter.empty and parameters[0].name == "closure":
        raise TypeError(
            f"{type(optimizer).__name__} evaluates the loss several times per step, and {caller} once: expected an optimizer "
            "whose step() needs no closure; otherwise call optimizer.step(closure) in a loop of your own"
        )
