"""``inplace_activations``: activations that overwrite their input, where nothing needs the input any more.

    linear -> h -> relu -> r -> linear        h may be overwritten: relu's backward needs r, and nothing else reads h
    linear -> h -> relu -> r -> r + h         h is read again
    exp    -> h -> relu -> r -> linear        autograd keeps h for the backward of exp

A forward is watched: its operators, what autograd saves, and what is alive in the end.
"""

import copy
import functools
import gc
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime import torch_private
from ..runtime.devices import keep_random_state, move
from ..runtime.torch_private import StorageReference, TorchDispatchMode, is_differentiable, storage_id
from .checkpointing import restore_module
from .saving import Saving

# Their backward in place needs the output alone. Others copy their input then, and dropout keeps a wider mask on a GPU.
_ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.RReLU)
_RUNS = ((True, True), (True, False), (False, True))  # in training or not, with checkpoints or not
ModuleCall = tuple[tuple[Any, ...], dict[str, Any]]


def inplace_activations(module: nn.Module, inputs: Any) -> tuple[str, ...]:
    """Sets ``inplace=True`` on the activations of a module that may overwrite their input.

    ``nn.ReLU``, ``nn.LeakyReLU``, ``nn.ELU``, ``nn.CELU``, ``nn.SELU`` and ``nn.RReLU`` save memory in place. Forwards of copies
    are watched: after the call nothing may read or keep the memory of the input. Apply this after ``checkpoint_activations``.

    Args:
        module: any module.
        inputs: a small batch for a typical forward: a tensor, a tuple of positional arguments or a mapping of keyword arguments.

    Returns:
        The names of the submodules that were changed. To undo it, set their ``inplace`` to False.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 4), nn.SiLU(), nn.Linear(4, 2), nn.Tanh())
        >>> savings.inplace_activations(net, torch.randn(2, 4))
        ('1',)
    """
    device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    batch = torch_private.map_tensors(lambda tensor: move(tensor.detach(), device).requires_grad_(tensor.requires_grad), inputs)
    call: ModuleCall = ((), dict(batch)) if isinstance(batch, Mapping) else (batch if isinstance(batch, tuple) else (batch,), {})
    # A checkpoint keeps the input of its block, and its second forward saves what the plain block saves.
    with keep_random_state():
        watched = [_watch(module, call, training, checkpointed) for training, checkpointed in _RUNS]
        unsafe = set().union(*(uses.unsafe for uses in watched))
        names = [name for name in watched[0].names if name not in unsafe]
        if not _runs(module, call, names):  # in place on views that torch refuses
            tried, names = names, []
            for name in tried:
                names += [name] if _runs(module, call, [*names, name]) else []
    _set_inplace(module, names)
    return tuple(names)


def _set_inplace(module: nn.Module, names: Any) -> None:
    for name in names:
        module.get_submodule(name).inplace = True  # type: ignore[assignment]


def _watch(module: nn.Module, call: ModuleCall, training: bool, checkpointed: bool) -> "_InputUses":
    """Watches a forward. Autograd keeps copies, so that what is alive afterwards is kept by others."""
    net, (args, kwargs) = _copies(module, call)
    net.train(training)
    for child in [] if checkpointed else net.modules():
        restore_module(child)
    uses = _InputUses(net)
    with uses, torch.autograd.graph.saved_tensors_hooks(uses.save, lambda copied: copied):
        outputs = net(*args, **kwargs)
    uses.end()
    del outputs  # which had to be alive until now
    return uses


def _runs(module: nn.Module, call: ModuleCall, names: list[str]) -> bool:
    """Returns False if torch refuses a step with these activations in place."""
    net, (args, kwargs) = _copies(module, call)
    _set_inplace(net.train(), names)
    try:
        sums = [tensor.abs().sum() for tensor in _all_tensors(net(*args, **kwargs)) if tensor.requires_grad]
        torch.autograd.backward(sums)
    except RuntimeError:
        return False
    return True


def _copies(module: nn.Module, call: ModuleCall) -> tuple[nn.Module, Any]:
    """Returns copies of both. Every parameter is trained, also those that are frozen for now."""
    net = copy.deepcopy(module)
    for parameter in net.parameters():
        parameter.requires_grad_(is_differentiable(parameter))
    return net, torch_private.map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), call)


def _all_tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in the output of a model: a tensor, containers of them, or objects with attributes."""
    tensors = []
    for leaf in torch_private.leaves_of_tree(value):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type):
            tensors += _all_tensors(list(vars(leaf).values()))
    return tensors


class _InputUses(TorchDispatchMode):
    """Watches a forward: who reads, saves or keeps the input of an activation, besides the activation.

    Memory counts as one, whichever view of it is read. An output that is the input itself is not a use.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.names: dict[str, None] = {}  # of the activations that were called
        self.unsafe: set[str] = set()  # those whose input is needed
        self._references: dict[int, StorageReference] = {}  # so that no identity comes twice
        self._users: dict[int, set[str]] = defaultdict(set)  # activations by their input
        self._savers: dict[int, set[str]] = defaultdict(set)
        self._running = ""
        self._is_copying = False
        for name, child in module.named_modules():
            if type(child) in _ACTIVATIONS and not child.inplace:
                child.register_forward_pre_hook(functools.partial(self._begin, name))
                child.register_forward_hook(functools.partial(self._finish, name), with_kwargs=True)

    def save(self, tensor: Tensor) -> Tensor:
        """Hook of a tensor that autograd saves. Returns a copy."""
        self._savers[self._identity(tensor)].add(self._running)
        self._is_copying = True
        copied = tensor.detach().clone()
        self._is_copying = False
        return copied

    def end(self) -> None:
        """Finds the inputs that something keeps, while the outputs are alive."""
        gc.collect()
        for identity, names in self._users.items():
            is_alive = not self._references[identity].expired()
            self.unsafe |= {name for name in names if is_alive or self._savers[identity] - {name}}

    def _identity(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self._references.setdefault(identity := storage_id(storage), StorageReference(storage))
        return identity

    def _begin(self, name: str, *_: Any) -> None:
        self._running = name

    def _finish(self, name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._running = ""
        self.names[name] = None
        for tensor in _all_tensors((args, kwargs)):
            self._users[self._identity(tensor)].add(name)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in () if self._is_copying else torch_private.leaves_of_tree((args, kwargs)):
            if isinstance(leaf, Tensor):
                self.unsafe |= self._users.get(self._identity(leaf), set())
        return operator(*args, **kwargs or {})


INPLACE = Saving(
    name="inplace_activations",
    option="activations in place",
    saves="an activation for each module that changes",
    cost="nothing",
    needs="a batch of real values, to watch a forward",
    order=320,
    stage="by hand",
)
