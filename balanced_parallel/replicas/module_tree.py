"""The tree of a module's submodules, and its skeletons: copies that share everything except
parameters and buffers.

torch's ``replicate`` walks and copies the tree at every forward. Here it is compared with what it
was, and the skeletons are filled again.
"""

import functools
import itertools
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ..batch.containers import leaves, map_leaves
from ..runtime.module_state import advancing_buffers, are_close, embeddings_of, set_entries
from ..runtime.torch_private import (
    BUFFERS,
    CHILDREN,
    FLAT_REFERENCES,
    FLAT_WEIGHTS,
    HOOKS,
    PARAMETERS,
    buffers_of,
    children_of,
    is_compiled,
    memory_of,
    parameters_of,
    versions,
)


class TreePart(NamedTuple):
    """A module of a tree, as it was when the tree was made."""

    module: nn.Module
    children: dict[str, nn.Module | None]
    identities: list[object]  # the names and the ids of its parameters
    size: int  # number of its attributes


# The dictionary has the children of the skeleton.
Skeletons = list[tuple[TreePart, nn.Module, dict[str, nn.Module | None]]]


class ModuleTree:
    """The modules and parameters of a tree, each listed once.

    Tied parameters and shared modules stay tied in the skeletons.
    """

    def __init__(self, root: nn.Module) -> None:
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            if nn.parameter.is_lazy(tensor):
                raise ValueError(
                    f"{name} is not initialised yet: run the module once on a few rows before it is wrapped"
                )
        self.modules = list(root.modules())
        self.embeddings = embeddings_of(root)
        self.rescaled = any(each.max_norm is not None for each in self.embeddings.values())
        self.is_compiled = any(map(is_compiled, self.modules))
        # modules of torch itself cache no tensors
        self._custom = [
            at
            for at, module in enumerate(self.modules)
            if not type(module).__module__.startswith("torch.")
        ]
        parameters = {
            id(each): each
            for module in self.modules
            for each in parameters_of(module).values()
            if each is not None
        }
        self.parameters = list(parameters.values())
        self.place = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self._parts = [self._part(module) for module in self.modules]
        marks = dict.fromkeys(map(id, self.modules), self)
        is_special = functools.partial(self._is_special, marks)
        self._special = list(self._find(range(len(self.modules)), is_special))

    def _is_special(self, marks: Mapping[int, object], value: object) -> bool:
        """Returns True for a list of parameters, such as that of an RNN, and for a method or a
        function that a program has put on a module, most often a forward.

        ``marks`` are objects by the ids of the modules.
        """
        if type(value) is list:
            return any(id(entry) in self.place for entry in value)
        return _rebind(value, marks) is not value

    def _find(
        self, numbers: Iterable[int], is_sought: Callable[[object], bool]
    ) -> Iterator[tuple[int, str]]:
        for number in numbers:
            for name, value in self.modules[number].__dict__.items():
                if is_sought(value):
                    yield number, name

    def _part(self, module: nn.Module) -> TreePart:
        _refuse_unshareable(module)
        parameters = parameters_of(module)
        identities = [*parameters, *map(id, parameters.values())]
        children = module.__dict__[CHILDREN].copy()
        return TreePart(module, children, identities, len(module.__dict__))

    def _replaced(
        self, names: Iterable[tuple[int, str]], counterparts: Mapping[int, Any]
    ) -> Iterator[tuple[int, str, Any]]:
        """Yields attributes of the modules by number and name, with other values in them: those of
        ``counterparts``, by the ids of parameters, buffers, cached tensors and modules.
        """

        def replace(value: Any) -> Any:
            if isinstance(value, Tensor):
                return counterparts.get(id(value), value)
            return _rebind(value, counterparts)

        for number, name in names:
            value: Any = map_leaves(replace, self.modules[number].__dict__.get(name))
            yield number, name, value
            if name == FLAT_WEIGHTS:
                # An RNN flattens its weights again in every forward in which they are not its
                # parameters.
                yield (
                    number,
                    FLAT_REFERENCES,
                    [each if each is None else weakref.ref(each) for each in value],
                )

    def still_is(self, root: nn.Module) -> bool:
        """Returns True if the tree under ``root`` still has the same modules and the same
        parameters.
        """
        if self.modules[0] is not root:
            return False
        for module, children, identities, size in self._parts:
            state = module.__dict__
            parameters = state[PARAMETERS]  # A call for each module takes time in every forward.
            if len(state) != size or state[CHILDREN] != children:
                return False
            # == on parameters would compare their values
            if [*parameters, *map(id, parameters.values())] != identities:
                return False
        return True

    def make_skeletons(self) -> Skeletons:
        """Returns an empty copy of each module. :meth:`fill` fills them before each forward."""
        skeletons = {id(module): type(module).__new__(type(module)) for module in self.modules}
        for skeleton in skeletons.values():
            skeleton.__dict__.update((name, OrderedDict()) for name in HOOKS)
        return [
            (
                part,
                skeletons[id(part.module)],
                {name: skeletons.get(id(child)) for name, child in part.children.items()},
            )
            for part in self._parts
        ]

    def buffers(self, home: torch.device) -> list[Tensor]:
        """Returns the buffers of all modules, and the tensors on ``home`` that a forward may have
        cached, each once.

        These are attributes, or in tuples that are attributes. The first replica is the module
        itself, so the others find them. Lists and dictionaries, and what has a graph, stay as they
        are.
        """
        self._caches = list(self._find(self._custom, _is_cache))
        values = [self.modules[number].__dict__[name] for number, name in self._caches]
        cached = [leaf for value in values for _, leaf in leaves(value)]
        by_id = {
            id(each): each
            for each in cached
            if type(each) is Tensor and each.is_leaf and each.device == home
        }
        for module in self.modules:
            if buffers := module.__dict__[BUFFERS]:
                by_id.update(
                    {id(buffer): buffer for buffer in buffers.values() if buffer is not None}
                )
        return list(by_id.values())

    def fill(
        self, skeletons: Skeletons, tensors: list[Tensor] | None, buffers: Mapping[int, Tensor]
    ) -> nn.Module:
        """Gives the skeletons the modules' attributes, with ``tensors`` (``None`` keeps parameters)
        and ``buffers`` by id.
        """
        counterparts: dict[int, Any] = dict(zip(self.place, tensors or (), strict=False))
        counterparts |= buffers
        get = counterparts.get
        for part, skeleton, children in skeletons:
            state = part.module.__dict__.copy()
            if children:
                state[CHILDREN] = children.copy()
            # A forward that makes a buffer would otherwise make it in the module itself.
            entries = state[BUFFERS]
            state[BUFFERS] = (
                {name: get(id(each)) for name, each in entries.items()} if entries else {}
            )
            if entries := state[PARAMETERS]:
                state[PARAMETERS] = {name: get(id(each), each) for name, each in entries.items()}
            # A forward that registers hooks would otherwise register them in all replicas. The
            # handle of a hook needs a dictionary that lives on, as that of the skeleton does.
            attributes = skeleton.__dict__
            for name in HOOKS:
                hooks = attributes[name]
                if hooks or state[name]:
                    hooks.clear()
                    hooks.update(state[name])
                state[name] = hooks
            # Python without its lock frees a dictionary late that is replaced.
            attributes.clear()
            attributes.update(state)
            # Activation checkpointing changes it.
            object.__setattr__(skeleton, "__class__", part.module.__class__)
        if names := self._special + self._caches:
            counterparts |= {id(part.module): skeleton for part, skeleton, _ in skeletons}
            for number, name, value in self._replaced(names, counterparts):
                skeletons[number][1].__dict__[name] = value
        return skeletons[0][1]

    @contextmanager
    def state_of(self, skeletons: Skeletons) -> Iterator[None]:
        """Gives the modules the parameters and buffers of ``skeletons`` in this block.

        Buffers that it writes end up there.

        The code of a compiled module is bound to it, so it runs in place of its skeletons, one
        after the other. Other attributes are those of the skeletons, and what the block writes to
        them is lost.
        """
        # dictionaries as they are, and as they were
        changed: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for part, skeleton, _ in skeletons:
            state = part.module.__dict__
            replica = skeleton.__dict__
            fixed = {key: state[key] for key in (CHILDREN, PARAMETERS, BUFFERS, *HOOKS)}
            for entries, other in (
                (state[PARAMETERS], replica[PARAMETERS]),
                (state[BUFFERS], replica[BUFFERS]),
                (state, replica | fixed),
            ):
                changed.append((entries, entries.copy()))
                set_entries(entries, other)
        try:
            yield
        finally:
            for part, skeleton, _ in skeletons:
                buffers_of(skeleton).update(buffers_of(part.module))
            for entries, before in changed:
                set_entries(entries, before)

    @contextmanager
    def same_state(self, replicas: Sequence[Skeletons], *, is_first: bool) -> Iterator[None]:
        """Surrounds a forward that must leave the same state in all replicas.

        Raises ``RuntimeError`` for a buffer or a parameter of a training module that it has left
        with values of the rows of each replica. Buffers are compared in the first forward even if no
        version counter tells of a write, as of one by ``.data``, and all tensors if one has other
        memory, which the module itself would not have.
        """
        before = {
            (module, name): (tensor, versions([tensor]))
            for module in self.modules
            for name, tensor in self._state(module).items()
        }
        skeletons = [skeleton for _, skeleton, _ in itertools.chain.from_iterable(replicas)]
        tensors = [*itertools.chain(*[self._state(each).values() for each in skeletons])]
        memory = [*map(memory_of, tensors)]
        yield
        is_moved = memory != [*map(memory_of, tensors)]
        for part, skeleton, _ in itertools.chain.from_iterable(replicas):
            for name, present in self._state(part.module).items():
                tensor, version = before.get((part.module, name), (present, None))
                is_buffer = not isinstance(tensor, nn.Parameter)
                counter_tells = present is tensor and not ((is_first and is_buffer) or is_moved)
                if counter_tells and versions([tensor]) == version:
                    continue
                other = self._state(skeleton).get(name, tensor)
                # A cache that grows is another tensor.
                is_same_kind = tensor.shape == present.shape == other.shape
                if is_same_kind and not are_close(present, other):
                    self._refuse(part.module, name)

    def _state(self, module: nn.Module) -> dict[str, Tensor]:
        """Returns the tensors that a forward in training may write, but must not rescale."""
        if not module.training:
            return {}
        parameters = {} if self.rescaled else parameters_of(module)
        present = {name: each for name, each in parameters.items() if each is not None}
        return advancing_buffers(module) | present

    def _refuse(self, module: nn.Module, tensor: str) -> NoReturn:
        names = {each: name for name, each in self.modules[0].named_modules()}
        raise RuntimeError(
            f"the forward has written other values to the tensor {tensor} of {names[module] or 'the model'} in each replica, "
            "expected state that does not depend on the rows: use a SumOverRows for a statistic of all rows, or return the value "
            "and write it after the update"
        )

    @contextmanager
    def parameters_replaced(self, tensors: list[Tensor]) -> Iterator[None]:
        """Replaces the parameters of the modules by ``tensors`` in this block."""
        counterparts = dict(zip(self.place, tensors, strict=True))
        changes: list[tuple[dict[str, Any], str, Any]] = []
        for module in self.modules:
            entries = module.__dict__[PARAMETERS]
            present = [(name, each) for name, each in entries.items() if each is not None]
            changes += [(entries, name, counterparts[id(each)]) for name, each in present]
        for number, name, value in self._replaced(self._special, counterparts):
            changes.append((self.modules[number].__dict__, name, value))
        before = [entries.get(name) for entries, name, _ in changes]
        try:
            for entries, name, value in changes:
                entries[name] = value
            yield
        finally:
            for (entries, name, value), previous in zip(changes, before, strict=True):
                # else the forward has set another value, which stays
                if entries.get(name) is value:
                    entries[name] = previous

    def flatten_weights(self, tensors: Sequence[Tensor]) -> None:
        """Moves the weights of each RNN among ``tensors`` to one buffer, as cuDNN needs them."""
        with torch.inference_mode(False):
            counterparts = dict(zip(self.place, tensors, strict=True))
            for number, name, weights in self._replaced(self._special, counterparts):
                rnn = self.modules[number]
                # A weight that a hook computes is not a parameter.
                if name == FLAT_WEIGHTS and all(
                    id(weight) in self.place for weight in rnn.__dict__[name]
                ):
                    # The method reads sizes and weights of its object, and nothing else.
                    replica: Any = SimpleNamespace(**{**vars(rnn), name: weights})
                    nn.RNNBase.flatten_parameters(replica)


def _is_cache(value: object) -> bool:
    return type(value) is Tensor or (type(value) is tuple and Tensor in map(type, value))


def _rebind(value: Any, replicas: Mapping[int, Any], callers: tuple[int, ...] = ()) -> Any:
    """Returns a method, or a function with its closure, in which replicas take the place of modules.

    ``replicas`` are by the ids of the modules. Other values stay as they are.
    """
    if isinstance(value, nn.Module):
        return replicas.get(id(value), value)
    parts = () if id(value) in callers else _parts(value)
    rebound = [_rebind(part, replicas, (*callers, id(value))) for part in parts]
    if all(map(operator.is_, rebound, parts)):
        return value
    if not isinstance(value, FunctionType):
        # A partial function has its arguments by name too.
        return type(value)(*rebound, **getattr(value, "keywords", {}))
    cells = [
        cell if new is old else CellType(new)
        for cell, new, old in zip(value.__closure__ or (), rebound, parts, strict=True)
    ]
    function = FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells)
    )
    # Defaults of arguments by name are an attribute.
    assigned = (*functools.WRAPPER_ASSIGNMENTS, "__kwdefaults__")
    return functools.update_wrapper(function, value, assigned)


def _parts(value: Any) -> tuple[Any, ...]:
    """Returns the function and the arguments of a method, or the contents of a closure."""
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if type(value) is functools.partial:
        return value.func, *value.args
    cells = (isinstance(value, FunctionType) and value.__closure__) or ()
    return tuple(None if cell == CellType() else cell.cell_contents for cell in cells)


def check_module(module: Any) -> None:
    """Raises ``TypeError`` if ``module`` is a class or not a module, or is wrapped already."""
    check_is_module(module)
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise TypeError(
            f"the module is wrapped in {type(module).__name__} already, expected a plain one: pass its .module"
        )


def check_is_module(module: Any, name: str = "module") -> None:
    """Raises ``TypeError`` if ``module`` is a class or not a module."""
    kind = getattr(module, "__name__", type(module).__name__)
    if isinstance(module, type):
        raise TypeError(f"the {name} is the class {kind}, expected an instance: write {kind}(...)")
    if not isinstance(module, nn.Module):
        raise TypeError(f"the {name} is an object of type {kind}, expected a torch.nn.Module")


def check_device(module: nn.Module, device: torch.device) -> None:
    """Raises ``ValueError`` if a parameter or buffer is on another device."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device}, expected every parameter and buffer on the first device, {device}: "
                f"move the module there with .to({str(device)!r}), or wrap it again with other device_ids="
            )


def _refuse_unshareable(module: nn.Module) -> None:
    """Raises ``TypeError`` for a ``ScriptModule``, whose code belongs to one module on one device,
    and for an adapter of peft that changes the class of a module in its forward.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{type(module).__name__} cannot be replicated: pass the module that it was made from"
        )
    if type(module).__name__ == "ParamWrapper" and hasattr(module, "get_delta_weight"):
        raise TypeError(
            "LoraConfig(target_parameters=...) registers a parametrization in each forward, which replicas cannot share: "
            "expected target_modules=, one device, or a rank for each device (torchrun)"
        )


def refuse_rescaled(embeddings: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` if one of ``embeddings`` has ``max_norm`` and is trained, where devices
    or ranks have weights of their own: its forward rescales rows of its weight.
    """
    for name, embedding in embeddings.items():
        if embedding.max_norm is not None and embedding.weight.requires_grad:
            rescaling = f"embedding.weight.copy_(embedding.weight.renorm({embedding.norm_type:g}, 0, {embedding.max_norm:g}))"
            raise ValueError(
                f"the embedding {name!r} has max_norm={embedding.max_norm:g}: each device would rescale the rows that it sees. "
                f"expected max_norm=None: rescale all rows after each update: with torch.no_grad(): {rescaling}"
            )


def find_blocks(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the repeated blocks of a network.

    Blocks are two or more modules of one class in an ``nn.ModuleList`` or an ``nn.Sequential``,
    with parameters and children. The outermost such modules count. If there are none, any two or
    more children of one class count.
    """
    lists = _blocks_under(module, "", (nn.ModuleList, nn.Sequential))
    return tuple(lists or _blocks_under(module, "", (nn.Module,)))


def _blocks_under(
    parent: nn.Module,
    prefix: str,
    containers: tuple[type[nn.Module], ...],
) -> list[str]:
    children = {
        name: child
        for name, child in parent.named_children()
        if any(True for _ in child.parameters())
    }
    kinds = [class_of(child) for child in children.values()]
    names = []
    for name, child in children.items():
        is_repeated = (
            isinstance(parent, containers)
            and kinds.count(class_of(child)) > 1
            and len(children_of(child)) > 0
        )
        within = []
        if isinstance(child, nn.Sequential) or not is_repeated:
            within = _blocks_under(child, f"{prefix}{name}.", containers)
        if not within and is_repeated and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            within = [prefix + name]
        names += within
    return names


def class_of(module: nn.Module) -> Any:
    """Returns the class of a module, which has another one while it is checkpointed."""
    return getattr(module, "made_from", (type(module),))[0]
