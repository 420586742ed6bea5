"""``BalancedOptimizer``: reduced gradients and optimizer state spread over the devices, or over the ranks."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..replicas.deferred_gradients import bring_together
from ..replicas.model import DataParallelModel
from ..replicas.replicas import Replicas
from ..replicas.untracked_writes import note_written
from ..runtime.collectives import world_size
from .sharding import BucketOwners, Piece, Spread, spread_gradient, spread_parameter, unite_parameter

__all__: list[str] = []

_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")

Groups = list[dict[str, Any]]


class BalancedOptimizer(torch.optim.Optimizer):
    """An optimizer of torch whose work and state are spread over the devices of a model.

    With replicas in one process, each device owns an equal part of the parameters' elements: gradients are reduced to their
    owner, the optimizer steps there, on memory that the replicas share, and the update is copied to the other devices. Per
    step and device that moves ``4 (n - 1) / n`` times the bytes of the parameters, in and out together. Under torchrun it is
    ``torch.distributed.optim.ZeroRedundancyOptimizer``.

    ``state_dict()`` is that of the plain optimizer over ``model.parameters()`` (its tensors on the CPU), so a checkpoint moves
    between one device, many and many ranks. ``param_groups`` hold what is updated, the owners' pieces, for gradient scalers,
    clipping and schedulers. ``parameter.grad`` of the model's own parameters still works: a gradient is brought together where
    somebody asks for it. Call :meth:`step` on the same model that ran the backward.

    Args:
        model: a :class:`DataParallelModel`, or the model that :func:`parallelize` makes under torchrun.
        optimizer_class: an elementwise optimizer of ``torch.optim``, or a subclass of one.
        params: parameters or param groups, as for the plain optimizer; ``None`` is ``model.parameters()``. Parameters that are
            not the model's (a criterion's) are updated where they are.
        defaults: what the optimizer takes: ``lr`` and so on.

    Raises:
        TypeError: another kind of model; or an optimizer that is not elementwise, such as LBFGS, Adafactor or Muon.
        ValueError: the model has a ``BalancedOptimizer`` already.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[Any] | None = None,
        **defaults: Any,
    ) -> None:
        _refuse_others(optimizer_class)
        self._model = model
        self._made_of = optimizer_class, defaults
        self._groups = _as_groups(model.parameters() if params is None else params)
        if not any(group["params"] for group in self._groups):
            raise ValueError("BalancedOptimizer got an empty parameter list, expected parameters to update")
        self._owners: list[BucketOwners] = []
        self._spread: list[nn.Parameter] = []
        self._ready = False
        if isinstance(model, DataParallelModel):
            if len(set(model.devices)) > 1:
                self._take_over(model)
            inner = optimizer_class(self._with_pieces(), **defaults)
        elif world_size() > 1 or dist.is_initialized():
            from torch.distributed.optim import ZeroRedundancyOptimizer

            inner = ZeroRedundancyOptimizer(self._groups, optimizer_class, **defaults)
        else:
            raise TypeError(
                f"the model is a {type(model).__name__}, expected a DataParallelModel or the model that parallelize returns"
            )
        self._inner = inner
        super().__init__(inner.param_groups, inner.defaults)
        self.state = inner.state
        self._ready = True

    def __reduce__(self) -> Any:
        """A copy belongs to the copy of the model that is made with it. Under torchrun every rank makes one."""
        return _rebuild, (self._model, *self._made_of, self._groups, self.state_dict())

    @property
    def param_groups(self) -> Groups:
        """The groups with what is updated in them; gradients that lie elsewhere are brought there first."""
        if self._ready:
            self._settle()
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: Groups) -> None:
        """They are the inner optimizer's."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._ready:
            raise RuntimeError("a BalancedOptimizer takes its param groups when it is made: give all of them in params=")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._settle()
        self._inner.step()
        if self._owners and isinstance(self._model, DataParallelModel):
            for owners in self._owners:
                owners.publish()
            note_written(self._spread)  # for other replicas of the same parameters
            self._model.replicas.mark_fresh()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in () if set_to_none else self._spread:
            bring_together(parameter)  # to be zeros then, and not nothing
        self._inner.zero_grad(set_to_none)
        for parameter in self._spread if set_to_none else ():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """That of the plain optimizer over the same parameters, its tensors on the CPU. Under torchrun every rank calls it."""
        for prepare in self._optimizer_state_dict_pre_hooks.values():
            prepare(self)
        state = self._whole_state()
        for change in self._optimizer_state_dict_post_hooks.values():
            changed = change(self, state)
            state = state if changed is None else changed
        return state

    def _whole_state(self) -> dict[str, Any]:
        if not isinstance(self._model, DataParallelModel):
            return _consolidated(self._inner)
        number = {id(held): i for i, held in enumerate(held for group in self._inner.param_groups for held in group["params"])}
        found = self._inner.state_dict()
        state, groups, index = {}, [], 0
        for group, saved in zip(self._groups, found["param_groups"], strict=True):
            first = index
            for parameter in group["params"]:
                pieces = _pieces_of(parameter)
                states = [found["state"].get(number[id(held)]) for held in _held(parameter)]
                if any(states):
                    state[index] = _joined(parameter, pieces, states)
                index += 1
            groups.append({**saved, "params": list(range(first, index))})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the state of a plain optimizer over the same parameters."""
        state_dict = dict(state_dict)
        for change in self._optimizer_load_state_dict_pre_hooks.values():
            changed = change(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._take_state(state_dict)
        for finish in self._optimizer_load_state_dict_post_hooks.values():
            finish(self)

    def _take_state(self, state_dict: Mapping[str, Any]) -> None:
        if not isinstance(self._model, DataParallelModel):
            self._inner.load_state_dict(dict(state_dict))
            return
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != [len(group["params"]) for group in self._groups]:
            raise ValueError(
                f"the state has param groups of {sizes} parameters, expected {[len(group['params']) for group in self._groups]}"
            )
        state, groups, at = {}, [], 0
        for group, saved in zip(self._groups, state_dict["param_groups"], strict=True):
            first = at
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                for piece in _pieces_of(parameter) or [None]:
                    if index in state_dict["state"]:
                        state[at] = _cut_state(parameter, piece, state_dict["state"][index])
                    at += 1
            groups.append({**saved, "params": list(range(first, at))})
        self._inner.load_state_dict({"state": state, "param_groups": groups})
        self.state = self._inner.state

    def _take_over(self, model: DataParallelModel) -> None:
        """Gives the model's replicas owners for their gradients, for as long as this optimizer lives."""
        replicas = model.replicas
        if replicas.spread:
            raise ValueError("the model has a BalancedOptimizer already, expected one: give it all param groups, or delete it")
        if any(isinstance(parameter, Spread) for parameter in model.parameters()):
            raise ValueError("the module's parameters belong to another BalancedOptimizer, expected one: delete it first")
        tree = replicas.prepare(model.module, model.devices)
        given = {id(parameter) for group in self._groups for parameter in group["params"]}
        learned = [parameter for parameter in tree.parameters if parameter.requires_grad]
        mine = [parameter for parameter in learned if id(parameter) in given]
        replicas.make_buckets([mine, [parameter for parameter in learned if id(parameter) not in given]])
        devices = list(dict.fromkeys(model.devices))
        for bucket in replicas.buckets:
            if id(bucket.parameters[0]) not in given:
                continue
            places = [tree.place[id(parameter)] for parameter in bucket.parameters]
            copies = [{device: replicas.copies.get(device, tree.parameters)[at] for device in devices} for at in places]
            bucket.owners = owners = BucketOwners(bucket.parameters, copies)
            self._owners.append(owners)
            for index, parameter in enumerate(bucket.parameters):
                spread_parameter(parameter, [piece for piece in owners.pieces if piece.index == index])
        self._spread = mine
        replicas.spread = True
        weakref.finalize(self, _give_back, replicas, mine)

    def _with_pieces(self) -> Groups:
        return [{**group, "params": [held for one in group["params"] for held in _held(one)]} for group in self._groups]

    def _settle(self) -> None:
        """Brings values and gradients that somebody put into the model's own parameters to the owners."""
        if self._spread and isinstance(self._model, DataParallelModel):
            self._model.replicas.prepare(self._model.module, self._model.devices)
            for parameter in self._spread:
                if isinstance(parameter, Spread):
                    spread_gradient(parameter)


def _rebuild(model: nn.Module, optimizer_class: Any, defaults: dict[str, Any], groups: Groups, state: Any) -> BalancedOptimizer:
    optimizer = BalancedOptimizer(model, optimizer_class, groups, **defaults)
    optimizer._take_state(state)
    return optimizer


def _give_back(replicas: Replicas, parameters: Sequence[nn.Parameter]) -> None:
    replicas.spread = False
    for bucket in replicas.buckets:
        bucket.owners = None
    with contextlib.suppress(RuntimeError):  # simulated devices may be gone, and all that was on them
        for parameter in parameters:
            unite_parameter(parameter)


def _refuse_others(optimizer_class: type[torch.optim.Optimizer]) -> None:
    known = tuple(getattr(torch.optim, name) for name in _ELEMENTWISE)
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, known):
        name = getattr(optimizer_class, "__name__", repr(optimizer_class))
        raise TypeError(
            f"{name} was given, expected an elementwise optimizer of torch.optim ({', '.join(_ELEMENTWISE)}) or a subclass of "
            "one: an optimizer that needs whole parameters, or all of them, cannot be spread over devices; use it by itself"
        )


def _as_groups(params: Iterable[Any]) -> Groups:
    entries = list(params)
    groups = [dict(entry) for entry in entries] if entries and isinstance(entries[0], dict) else [{"params": entries}]
    for group in groups:
        held = group["params"]
        group["params"] = [held] if isinstance(held, Tensor) else list(held)
    return groups


def _pieces_of(parameter: Tensor) -> list[Piece | None]:
    return list(parameter.pieces) if isinstance(parameter, Spread) else []


def _held(parameter: Tensor) -> list[Tensor]:
    """What is updated: the parameter, or its pieces."""
    return [piece.values for piece in parameter.pieces] if isinstance(parameter, Spread) else [parameter]


def _joined(parameter: Tensor, pieces: Sequence[Piece | None], states: list[dict[str, Any] | None]) -> dict[str, Any]:
    """One parameter's state from that of its pieces: what is shaped like a piece is put together, the rest is the same in all."""
    first = next(state for state in states if state)
    joined = {}
    for name, value in first.items():
        if len(pieces) > 1 and isinstance(value, Tensor) and value.dim() == 1:
            parts = [state[name].cpu() for state in states if state]
            joined[name] = torch.cat(parts).view(parameter.shape)
        else:
            joined[name] = value.detach().cpu() if isinstance(value, Tensor) else value
    return joined


def _cut_state(parameter: Tensor, piece: Piece | None, state: dict[str, Any]) -> dict[str, Any]:
    def cut(value: Any) -> Any:
        if piece is None or piece.is_whole or not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value.clone() if isinstance(value, Tensor) else value
        return piece.cut(value).clone()

    return {name: cut(value) for name, value in state.items()}


def _consolidated(inner: Any) -> dict[str, Any]:
    """The whole state on every rank: rank 0 collects it and hands it on."""
    inner.consolidate_state_dict(to=0)
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        shared = [torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.cpu(), inner.state_dict())]
    dist.broadcast_object_list(shared, src=0)
    whole: dict[str, Any] = shared[0]
    return whole
