"""``BalancedOptimizer``: reduced gradients and optimizer state sharded over the devices, or over
the ranks.

Optimizers such as Muon, SOAP and Shampoo need whole matrices. A plain optimizer runs over the
parameters that belong to each owner, a device or a rank. This is exact if no update depends on
another parameter, which :func:`check_exact` tries out. ::

    parameters   | embedding         | weight      | weight | bias |
    owners       | device 0          | device 1                    |   the largest first, each to the owner with the fewest bytes
"""

import functools
import inspect
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT, StateDict

from ..replicas.model import DataParallelModel
from ..replicas.owners import BucketOwners, Piece
from ..runtime import torch_private, transport
from ..runtime.collectives import batch_group, rank, world_size
from ..runtime.torch_private import is_sharded, map_tensors
from ..runtime.values import (
    check_type,
    forget_gradients,
    naming_arguments,
    set_gradient,
    set_memory,
)

_ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "ASGD",
)


Groups = list[dict[str, Any]]
OptimizerCall = Callable[[torch.optim.Optimizer], object]
Loss = TypeVar("Loss")  # the result of a closure


class Recipe(NamedTuple):
    """Arguments of a plain optimizer over whole parameters."""

    optimizer_class: type[Any]
    groups: Groups
    defaults: dict[str, object]

    def make(self, groups: Groups) -> torch.optim.Optimizer:
        """Makes the optimizer over other tensors."""
        return self.optimizer_class(groups, **self.defaults)  # type: ignore[no-any-return]


def _parameters_of(groups: Groups) -> list[Any]:
    return [parameter for group in groups for parameter in group["params"]]


def _replaced(groups: Groups, tensors: Mapping[Tensor, Tensor]) -> Groups:
    """Returns param groups over ``tensors`` of their parameters.

    Parameters that have none are left out.
    """
    params = [[tensors[each] for each in group["params"] if each in tensors] for group in groups]
    return [{**group, "params": part} for group, part in zip(groups, params, strict=True)]


class BalancedOptimizer(torch.optim.Optimizer):
    """An optimizer whose work and state are sharded over the devices of a model, or over the ranks.

    In one process each device owns an equal part of the parameters' elements, or whole parameters.
    Gradients are reduced to their owner. The optimizer steps there, in memory that the replicas
    share, and the update is copied to the other devices. Under torchrun each rank owns whole
    parameters. With ``strategy="fsdp"`` an elementwise optimizer updates the shards.

    ``state_dict()`` equals that of the plain optimizer over ``model.parameters()``, with tensors on
    the CPU, so a checkpoint moves between one device, many devices and many ranks. ``param_groups``
    hold the owners' pieces and their gradients, for gradient scalers, clipping and schedulers.
    ``parameter.grad`` of the model's own parameters stands for these: lines of a loop that read,
    change, replace or clear it do what they do with the plain optimizer. An operation gathers this
    gradient alone, and writes it back to the owners. Every step begins with the values of
    ``model.parameters()``: a write to the pieces is an error, and lost through ``.data``. Call
    :meth:`step` on the same model that ran the backward.

    Args:
        model: a :class:`DataParallelModel`, or the model that :func:`parallelize` returns under
            torchrun.
        optimizer_class: an optimizer of ``torch.optim`` or of another library.
        params: parameters or param groups; ``None`` is ``model.parameters()``. Those of other
            modules are updated in place.
        shard: ``"elements"``, or whole ``"parameters"``, the largest first, each to the owner with
            the fewest bytes. ``None`` is elements for SGD, Adam, AdamW, Adagrad, Adadelta, Adamax,
            NAdam, RAdam, RMSprop, Rprop and ASGD of torch and their subclasses; otherwise, and for
            ranks of DDP, parameters.
        defaults: settings of the optimizer: ``lr`` and so on.

    Raises:
        TypeError: another kind of model; or an optimizer that is not exact with these shards, as
            updates of small tensors show, or that needs a closure.
        ValueError: parameters have a ``BalancedOptimizer`` already, or ``"elements"`` for ranks of
            DDP.

    Example:
        >>> model = DataParallelModel(torch.nn.Linear(4, 2), ["cpu"] * 3)
        >>> optimizer = BalancedOptimizer(model, torch.optim.AdamW, lr=1e-3)
        >>> gather(model(torch.zeros(7, 4))).sum().backward()
        >>> optimizer.step()
        >>> [tuple(state["exp_avg"].shape) for state in optimizer.state_dict()["state"].values()]
        [(2, 4), (2,)]
    """

    @naming_arguments
    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        params: ParamsT | None = None,
        shard: str | None = None,
        **defaults: object,
    ) -> None:
        if not (
            isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
        ):
            raise TypeError(
                f"the optimizer is an object of type {type(optimizer_class).__name__}, expected a class of optimizers, and its "
                "settings: BalancedOptimizer(model, torch.optim.AdamW, lr=...)"
            )
        refuse_closures(optimizer_class, "BalancedOptimizer")
        if shard not in (None, "elements", "parameters"):
            raise ValueError(f"shard={shard!r}, expected 'elements', 'parameters' or None")
        check_type("model", model, nn.Module, "a DataParallelModel, or what parallelize returns")
        params = model.parameters() if params is None else params
        check_type("params", params, Iterable, "parameters, or param groups")
        groups = _ParamGroups(params, {}).param_groups
        self._is_ready = False
        self.steps = 0  # A step is counted once its hooks have run.
        self.recipe = Recipe(optimizer_class, groups, defaults)
        self.shard = shard
        self.shards = _shard(model, self.recipe, shard)
        super().__init__(self.shards.inner.param_groups, self.shards.inner.defaults)
        self.state = self.shards.inner.state
        self.register_state_dict_post_hook(_whole_state, prepend=True)
        self._is_ready = True

    def __reduce__(self) -> NoReturn:
        """Raises ``TypeError``: a copy would have the parameters of this model, and none of its
        hooks.
        """
        raise TypeError(
            "a BalancedOptimizer was copied or pickled, expected its state_dict(): copy the model, and load the state into a "
            "BalancedOptimizer of the copy"
        )

    @property
    def param_groups(self) -> Groups:
        """The groups of the optimizer over the shards.

        Gradients on other devices are moved to the owners first.
        """
        self.shards.collect()
        return self.shards.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: Groups) -> None:
        """Ignores what the base class sets: the groups are those of the optimizer over the shards."""

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Raises ``RuntimeError``: shards are made once, of all parameters."""
        if self._is_ready:
            raise RuntimeError(
                "a BalancedOptimizer takes its param groups when it is made: give all of them in params="
            )

    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:  # type: ignore[override]
        """Updates each shard on the device that owns it. Returns the result of the closure."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self.steps += 1
        self.shards.run(operator.methodcaller("step"))
        return loss

    def take_part(self, steps: int) -> None:
        """Exchanges what the other ranks wait for, after a hook has failed on this rank before the
        step.

        ``steps`` is the number of steps before the update. With another number, the exchange has
        begun.
        """
        if self.steps == steps and isinstance(self.shards, _ParameterRanks):
            self.shards.run(lambda optimizer: None)

    def train(self) -> None:
        """Begins the training mode of optimizers that have modes, such as schedule-free ones.

        Every rank must call this.
        """
        if hasattr(self.recipe.optimizer_class, "train"):
            self.shards.run(operator.methodcaller("train"))

    def eval(self) -> None:
        """Begins the evaluation mode of optimizers that have modes. Every rank must call this."""
        if hasattr(self.recipe.optimizer_class, "eval"):
            self.shards.run(operator.methodcaller("eval"))

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Returns a copy of the whole gradient of one of the model's parameters, or None.

        Every rank must call this.
        """
        return None if parameter.grad is None else _whole(parameter.grad).clone()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all parameters and of their shards."""
        self.shards.zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the state of a plain optimizer over the same parameters."""
        torch_private.load_with_hooks(self, dict(state_dict), self._load)

    def _load(self, state_dict: StateDict) -> None:
        self.shards.load_state_dict(state_dict)
        self.state = self.shards.inner.state


def _whole_state(optimizer: torch.optim.Optimizer, state: StateDict) -> StateDict:
    """Returns the state of the plain optimizer in place of that of the shards.

    Every rank must call this.
    """
    assert isinstance(optimizer, BalancedOptimizer)
    return optimizer.shards.state_dict()


def is_elementwise(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Returns True for optimizers of torch that update each element by itself, and for their
    subclasses.
    """
    return issubclass(optimizer_class, tuple(getattr(torch.optim, name) for name in _ELEMENTWISE))


def _shard(model: nn.Module, recipe: Recipe, shard: str | None) -> "_ReplicaShards | _ElementRanks":
    kind = shard or ("elements" if is_elementwise(recipe.optimizer_class) else "parameters")
    if isinstance(model, DataParallelModel):
        count = len(set(model.devices))
    elif world_size() > 1 or dist.is_initialized():
        count = world_size()
    else:
        raise TypeError(
            f"the model is a {type(model).__name__}, expected a DataParallelModel or the model that parallelize returns"
        )
    if count > 1 and not is_elementwise(recipe.optimizer_class):
        check_exact(recipe, kind)
    if isinstance(model, DataParallelModel):
        return _ReplicaShards(model, recipe, kind)
    if kind == "elements" and any(
        is_sharded(parameter) for group in recipe.groups for parameter in group["params"]
    ):
        return _ElementRanks(recipe)
    if shard == "elements":
        raise ValueError(
            "shard='elements' with ranks of DDP, expected 'parameters' or None: each rank owns whole parameters"
        )
    return _ParameterRanks(recipe)


class _ParamGroups(torch.optim.Optimizer):
    """Param groups of whole parameters, as torch reads them."""


def refuse_closures(optimizer_class: type[torch.optim.Optimizer], caller: str) -> None:
    """Raises ``TypeError`` if ``step()`` of an optimizer needs a closure, which ``caller``, a name,
    does not have.
    """
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TypeError(
            f"{optimizer_class.__name__} evaluates the loss several times per step, and {caller} once: expected an optimizer "
            "whose step() needs no closure; otherwise call optimizer.step(closure) in a loop of your own"
        )


# The shards of all optimizers of the process. Two models may share a parameter, and no two
# optimizers may update it.
_all_shards: weakref.WeakSet["_ReplicaShards"] = weakref.WeakSet()


class _ReplicaShards:
    """Shards of a :class:`DataParallelModel`, each updated on the device that owns it.

    Other parameters are updated in place.
    """

    def __init__(self, model: DataParallelModel, recipe: Recipe, shard: str) -> None:
        self._model = model
        self._groups = recipe.groups
        self._parameters = _parameters_of(recipe.groups)
        self._owners: list[BucketOwners] = []
        self._pieces: dict[Tensor, list[Piece]] = {}
        if len(set(model.devices)) > 1:
            self._shard(shard)
        updated = []
        for group in recipe.groups:
            tensors = itertools.chain(*map(self._updated, group["params"]))
            updated.append({**group, "params": [*tensors]})
        self.inner = recipe.make(updated)
        self._versions = self._count_writes()

    def _count_writes(self) -> list[int]:
        pieces = itertools.chain(*self._pieces.values())
        return torch_private.versions([piece.values for piece in pieces])

    @torch.no_grad()
    def collect(self) -> None:
        """Gives the pieces the gradients of the model's own parameters."""
        if self._pieces:
            self._model.reduce_gradients()
        for owners in self._owners:
            owners.follow()

    def run(self, call: OptimizerCall) -> None:
        """Calls a method of the optimizer, from the values of the model's own parameters."""
        if self._versions != self._count_writes():
            self._versions = self._count_writes()
            raise RuntimeError(
                "a tensor of optimizer.param_groups was written to, a piece of a parameter, so the write is lost, expected one "
                "to model.parameters() under torch.no_grad()"
            )
        replicas = self._model.replicas
        if self._pieces:
            replicas.prepare(self._model.module, self._model.devices, self._pieces)
        self.collect()
        with replicas.publishing(self._pieces):
            try:
                call(self.inner)
            finally:
                self._versions = self._count_writes()
            for owners in self._owners:
                owners.publish()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clears the gradients of all shards and of the parameters."""
        if set_to_none:
            forget_gradients(self._pieces)
        self.collect()
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> StateDict:
        """Returns the state of the plain optimizer over whole parameters, its tensors on the CPU."""
        state = {}
        numbers = itertools.count()
        for number, parameter in enumerate(self._parameters):
            tensors = self._updated(parameter)
            states = [self.inner.state[tensor] for tensor in tensors if tensor in self.inner.state]
            if states:
                state[number] = _join(parameter, states)
        groups = [
            {**group, "params": [next(numbers) for _ in whole["params"]]}
            for group, whole in zip(
                self.inner.state_dict()["param_groups"], self._groups, strict=True
            )
        ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the state of a plain optimizer over whole parameters."""
        state = {}
        groups = []
        numbers = itertools.count()
        parameters = iter(self._parameters)
        for group in state_dict["param_groups"]:
            params = []
            for index in group["params"]:
                parameter: Any = next(parameters, None)
                for piece in self._pieces.get(parameter, [None]):
                    params.append(next(numbers))
                    if index in state_dict["state"]:
                        state[params[-1]] = _cut(parameter, piece, state_dict["state"][index])
            groups.append({**group, "params": params})
        self.inner.load_state_dict({"state": state, "param_groups": groups})

    def _updated(self, parameter: Tensor) -> list[Tensor]:
        """Returns the tensors that the optimizer updates: the pieces of a parameter, or the
        parameter.
        """
        pieces = self._pieces.get(parameter)
        return [parameter] if pieces is None else [piece.values for piece in pieces]

    def _shard(self, shard: str) -> None:
        model = self._model
        if any(
            parameter in shards._pieces for shards in _all_shards for parameter in self._parameters
        ):
            raise ValueError(
                "parameters of the module have a BalancedOptimizer already, expected one for each: leave them out of params=, or "
                "delete the other optimizer first"
            )
        buckets = model.replicas.shard(model.module, model.devices, self._parameters)
        sharded = [parameter for bucket, _ in buckets for parameter in bucket.parameters]
        whole = assign_owners(sharded, len(set(model.devices))) if shard == "parameters" else None
        for bucket, copies in buckets:
            owners = BucketOwners(bucket.parameters, copies, whole)
            bucket.own(owners)
            self._owners.append(owners)
            for piece in owners.pieces:
                self._pieces.setdefault(piece.parameter(), []).append(piece)
            weakref.finalize(self, bucket.own)
        _all_shards.add(self)


def _join(parameter: Tensor, states: list[StateDict]) -> StateDict:
    """Joins the states of a parameter's pieces.

    Entries shaped like a piece are concatenated; others are equal in all pieces.
    """
    joined = {}
    for name, value in states[0].items():
        if len(states) > 1 and isinstance(value, Tensor) and value.dim() == 1:
            joined[name] = torch.cat([state[name].cpu() for state in states]).view(parameter.shape)
        else:
            joined[name] = torch_private.map_tensors(lambda tensor: tensor.detach().cpu(), value)
    return joined


def _cut(parameter: Tensor, piece: Piece | None, state: StateDict) -> StateDict:
    def cut(value: Tensor) -> Tensor:
        return (
            value if piece is None or value.shape != parameter.shape else piece.cut(value)
        ).clone()

    return {name: torch_private.map_tensors(cut, value) for name, value in state.items()}


class _ElementRanks:
    """The plain optimizer over groups of ``DTensor``s, sharded as the parameters are, with the
    methods of ``_ReplicaShards``.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.inner = recipe.make(recipe.groups)

    def collect(self) -> None:
        """Does nothing: the backward has reduced the gradients."""

    def run(self, call: OptimizerCall) -> None:
        call(self.inner)

    def zero_grad(self, set_to_none: bool) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> StateDict:
        return map_tensors(lambda tensor: _whole(tensor).cpu(), self.inner.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        parameters = _parameters_of(self.inner.param_groups)
        # torch would go on with the caller's tensors
        copies = map_tensors(torch.clone, state_dict["state"])
        state = {
            key: map_tensors(functools.partial(_distributed, like=parameters[key]), copies[key])
            for key in copies
        }
        self.inner.load_state_dict({**state_dict, "state": state})


class _ParameterRanks(_ElementRanks):
    """Whole parameters, each updated by the rank that owns it and sent to the others.

    Those of FSDP2 are gathered before.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)  # A parameter that it refuses is an error on all ranks.
        self._parameters = _parameters_of(self.inner.param_groups)
        self._owners = assign_owners(self._parameters, world_size())
        self._sharded = [
            each for each in self._parameters if each.requires_grad and is_sharded(each)
        ]
        self._gathered: dict[Tensor, Tensor] = {}
        for parameter in filter(is_sharded, self._parameters):
            if parameter.requires_grad:
                # an optimizer may look at values when it is made
                value = _whole(parameter).requires_grad_()
            else:
                value = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype)
            if self._owners[parameter] == rank():
                self._gathered[parameter] = value
        owned = [parameter for parameter, owner in self._owners.items() if owner == rank()]
        self._values = {parameter: self._gathered.get(parameter, parameter) for parameter in owned}
        self._parameter_of = {value: parameter for parameter, value in self._values.items()}
        whole = self.inner.param_groups
        self.inner = recipe.make(_replaced(whole, self._values))
        # Between steps the optimizer has all parameters, and the state of those of this rank.
        self._owned = [group["params"] for group in self.inner.param_groups]
        self._whole = [group["params"] for group in whole]
        self._use(self._whole, self._parameter_of)
        self._release()

    @torch.no_grad()
    def run(self, call: OptimizerCall) -> None:
        for parameter in self._sharded:
            value = _whole(parameter)
            gradient = None if parameter.grad is None else _whole(parameter.grad)
            if parameter in self._gathered:
                set_memory(self._gathered[parameter], value)
                set_gradient(self._gathered[parameter], gradient)
        self._use(self._owned, self._values)
        try:
            call(self.inner)
        finally:  # The others wait for what this rank owns, also if it fails.
            self._use(self._whole, self._parameter_of)
            forget_gradients(self._gathered.values())
            for number in range(world_size()):
                learning = [
                    each
                    for each in self._parameters
                    if self._owners[each] == number and each.requires_grad
                ]
                for chunk in transport.chunks(learning, transport.BUFFER_BYTES):
                    self._send([learning[i] for i in chunk], number)
            self._release()

    def _use(self, groups: Sequence[list[Tensor]], tensors: Mapping[Tensor, Tensor]) -> None:
        """Gives the optimizer the tensors of its groups, and the state of those that they replace."""
        for group, params in zip(self.inner.param_groups, groups, strict=True):
            group["params"] = params
        state = self.inner.state
        for tensor in [*state]:
            state[tensors[tensor]] = state.pop(tensor)

    def state_dict(self) -> StateDict:
        local = super().state_dict()
        shared: list[StateDict] = []
        # one by one: a gather has a buffer per rank, of the largest state
        for number in range(world_size()):
            objects: list[Any] = [local if number == rank() else None]
            dist.broadcast_object_list(objects, group=batch_group(), group_src=number)
            shared += objects
        state = itertools.chain(*(part["state"].items() for part in shared))
        groups = []
        # settings that count are those of an owner
        for place, group in enumerate(self.inner.param_groups):
            owner = self._owners[group["params"][0]] if group["params"] else 0
            groups.append(shared[owner]["param_groups"][place])
        return {"state": dict(sorted(state)), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        whole = map_tensors(_whole, state_dict["state"])
        owned = [
            number for number, each in enumerate(self._parameters) if self._owners[each] == rank()
        ]
        state = {
            number: map_tensors(torch.clone, whole[number]) for number in owned if number in whole
        }
        self.inner.load_state_dict({**state_dict, "state": state})

    def _send(self, parameters: list[Tensor], owner: int) -> None:
        """Copies the values of parameters from their owner to all ranks."""
        values = [self._gathered.get(each, each).detach() for each in parameters]
        layouts = [
            transport.MemoryLayout(each.shape) if is_sharded(each) else transport.layout_of(each)
            for each in values
        ]
        # Another rank owns these, and this one has no whole values.
        if any(map(is_sharded, values)):
            flat = torch.empty(
                sum(each.numel() for each in values), dtype=values[0].dtype, device=values[0].device
            )
        else:
            flat = transport.pack(layouts, values)
        dist.broadcast(flat, group=batch_group(), group_src=owner)
        received = map(_distributed, transport.unpack(layouts, flat), parameters)
        torch_private.foreach_copy_(
            torch_private.local_tensors(parameters), torch_private.local_tensors(received)
        )

    def _release(self) -> None:
        forget_gradients(self._gathered.values())
        for value in self._gathered.values():
            set_memory(value, value.new_empty(0))


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole.detach()


def _distributed(value: Tensor, like: Tensor) -> Tensor:
    """Returns a value with the shape of ``like`` sharded in the same way, and others as they are.

    Nothing is sent.
    """
    if is_sharded(value) or not is_sharded(like) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import DTensor, Replicate

    placements = [Replicate()] * like.device_mesh.ndim
    mesh = like.device_mesh
    return DTensor.from_local(
        value.to(like.device), mesh, placements, run_check=False
    ).redistribute(placements=like.placements)


def assign_owners(parameters: Iterable[Tensor], count: int) -> dict[Tensor, int]:
    """Returns the owner of each parameter.

    Bytes stand for the work as well, and frozen parameters have none.
    """
    loads = [0] * count
    owners = {}
    for parameter in sorted(
        parameters, key=lambda tensor: tensor.nbytes * tensor.requires_grad, reverse=True
    ):
        owners[parameter] = owner = loads.index(min(loads))
        loads[owner] += parameter.nbytes * parameter.requires_grad
    return owners


_UPDATES = 12  # D-Adaptation's first updates of small tensors hardly differ.


def check_exact(recipe: Recipe, shard: str) -> None:
    """Raises ``TypeError`` unless small tensors get the same values from sharded optimizers as from
    one.

    Others divide by a norm of all gradients, for example, or draw random numbers. A thread of its
    own has no modes of torch.
    """
    name = recipe.optimizer_class.__name__
    with ThreadPoolExecutor(1) as thread:
        trial = thread.submit(_is_exact, recipe, shard)
    if (error := trial.exception()) is not None:
        raise TypeError(
            f"{name} failed to update small tensors without a closure, which shows if shard={shard!r} is exact: {error}"
        ) from error
    if not trial.result():
        expected = (
            "elementwise updates"
            if shard == "elements"
            else "updates and state of single parameters, no random numbers"
        )
        raise TypeError(
            f"{name} with shard={shard!r} differs from {name} over the whole model, expected {expected}: turn off norms or sums "
            "over all parameters (clip with TrainStep(max_grad_norm=...)), or use it without BalancedOptimizer"
        )


def _is_exact(recipe: Recipe, shard: str) -> bool:
    rate = getattr(inspect.signature(recipe.optimizer_class).parameters.get("lr"), "default", None)
    # A small rate hides that all parameters have one step size.
    default = {"lr": rate} if isinstance(rate, float) else {}
    generator = torch.Generator().manual_seed(3)
    # A matrix has more elements than a block of quantized state. D-Adaptation needs steady
    # gradients.
    limit, noise = (64, 1.0) if shard == "elements" else (8, 0.1)

    def draw(parameter: Tensor) -> Tensor:
        """Returns random values of a small parameter, a direction, and all gradients, in one
        tensor.
        """
        shape = [2 + _UPDATES, *(min(size, limit) for size in parameter.shape)]
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        rows = torch.randn(shape, dtype=dtype, generator=generator)
        rows[2:] = rows[1] + noise * rows[2:]
        return rows.to(parameter.device)

    groups = []
    parts = []
    for group in recipe.groups[:4]:
        settings = {**group, **default}
        filled = [each for each in group["params"] if each.numel()]
        samples = [*map(draw, filled[:4])]
        groups.append({**settings, "params": samples})
        for rows in samples:
            cut = rows.view(len(rows), -1).chunk(3, 1) if shard == "elements" else [rows]
            parts += [[{**settings, "params": [part]}] for part in cut]
    whole = _update_samples(recipe, [groups])
    sharded = _update_samples(recipe, parts)
    return whole is not None and sharded is not None and torch.equal(whole, sharded)


def _update_samples(recipe: Recipe, parts: Sequence[Groups]) -> Tensor | None:
    """Returns the values of all samples after the updates of one optimizer for each of ``parts``.

    Returns None if an optimizer has state besides that of each parameter, such as a number of
    steps.
    """
    values = []
    for groups in parts:
        leaves = {
            rows: rows[0].clone().requires_grad_() for group in groups for rows in group["params"]
        }
        optimizer = recipe.make(_replaced(groups, leaves))
        getattr(optimizer, "train", bool)()  # schedule-free optimizers have it
        for number in range(_UPDATES):
            for rows, leaf in leaves.items():
                set_gradient(leaf, rows[2 + number].clone())
            optimizer.step()
        if not all(isinstance(key, Tensor) for key in optimizer.state):
            return None
        values += [leaf.detach().flatten().cpu() for leaf in leaves.values()]
    return torch.cat(values)
