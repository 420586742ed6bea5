"""``inplace_activations``: activations that overwrite their input, where nothing needs the input any more.

Uses of the inputs of activations after their calls.
"""

import contextlib
import copy
import functools
import gc
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..runtime import torch_private
from ..runtime.devices import keep_random_state, move
from ..runtime.torch_private import StorageReference, TorchDispatchMode, is_differentiable, storage_id
from .checkpointing import Checkpointed, restore_module

__all__: list[str] = []


Call = tuple[tuple[Any, ...], dict[str, Any]]


def inplace_activations(module: nn.Module, inputs: Any) -> tuple[str, ...]:
    """Sets ``inplace=True`` on the activations of a module that may overwrite their input, and save memory if they do.

    Every submodule with an attribute ``inplace`` is considered: ``nn.ReLU``, ``nn.LeakyReLU``, ``nn.Dropout`` and so on. Two
    proofs are needed, since a wrong value in a forward raises no error.

    - A forward is watched in training and in evaluation. After the call nothing may read the memory of the input, and nothing may
      keep it: no later layer, output, attribute or list, and not the caller.
    - A step is run in place and compared with the plain one. The backward must not raise an error. Outputs and gradients must be
      equal, and the call must allocate less. ``nn.SiLU``, for example, stays as it is: in place it copies its input.

    The proofs run on copies of the module, on its device, with equal random numbers. Apply this function after
    ``checkpoint_activations``.

    Args:
        module: any module.
        inputs: a small batch: a tensor, a tuple of positional arguments or a mapping of keyword arguments. It should take the way
            through the module that training takes.

    Returns:
        The names of the submodules that were changed. To undo it, set their ``inplace`` to False.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 4), nn.SiLU(), nn.Linear(4, 2), nn.Tanh())
        >>> savings.inplace_activations(net, torch.randn(2, 4))
        ('1',)
    """
    with keep_random_state():
        chosen = find_inplace_activations(module, inputs)
    for name in chosen:
        _set_inplace(module, name)
    return chosen


def find_inplace_activations(module: nn.Module, inputs: Any, *, have_values: bool = True) -> tuple[str, ...]:
    """Returns the names of the activations that :func:`inplace_activations` would change.

    Args:
        have_values: compares a step in place with the plain one. Fake tensors have no values.
    """
    device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    batch = torch_private.map_tensors(lambda tensor: move(tensor.detach(), device).requires_grad_(tensor.requires_grad), inputs)
    call: Call = ((), dict(batch)) if isinstance(batch, Mapping) else (batch if isinstance(batch, tuple) else (batch,), {})
    proof = _Proof(module, call, have_values)
    return tuple(proof.accepted([name for name in proof.allocated if name not in proof.unsafe], []))


def _set_inplace(module: nn.Module, name: str) -> None:
    module.get_submodule(name).inplace = True  # type: ignore[assignment]


class _BackwardInForward(Exception):
    """A forward runs a backward of its own."""


def _refuse_to_return(nothing: None) -> NoReturn:
    raise _BackwardInForward


class _Proof:
    """A plain step, and steps with activations in place that are compared with it.

    Attributes:
        allocated: bytes that each activation allocates in the plain step.
        unsafe: names of activations whose input is used after them.
    """

    def __init__(self, module: nn.Module, call: Call, have_values: bool) -> None:
        self._module, self._call, self._have_values = module, call, have_values
        self.unsafe: set[str] = set()
        for training in (True, False):
            try:  # autograd keeps nothing, so that what is alive afterwards is kept by others
                self._watch(training, torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _refuse_to_return))
            except _BackwardInForward:  # what autograd keeps counts, and its activations stay
                self._watch(training, contextlib.nullcontext())
        # Without checkpoints, autograd finds every write to a tensor that it has saved. Inside of them it does not.
        self._variants = [False, True] if any(isinstance(child, Checkpointed) for child in module.modules()) else [False]
        self._returned: dict[str, int] = {}
        self._expected, self.allocated = self._step([], checkpointed=False)

    def _watch(self, training: bool, keeping: contextlib.AbstractContextManager[Any]) -> None:
        """Looks for later uses of inputs in a forward.

        Args:
            keeping: surrounds it, and decides what autograd keeps.
        """
        uses = InputUses(watched := self._copy().train(training))
        torch.manual_seed(0)
        args, kwargs = self._arguments()
        with uses, keeping:
            outputs = watched(*args, **kwargs)
        self.unsafe |= uses.used_later() | uses.still_kept()
        del outputs

    def accepted(self, names: list[str], others: list[str]) -> list[str]:
        """Returns those of ``names`` that can be in place together with ``others``, and save memory."""
        if not names:
            return []
        saving = self._saving(names, others)
        if saving is not None:
            return names if saving == names else self.accepted(saving, others)
        if len(names) == 1:
            return []
        half = len(names) // 2
        first = self.accepted(names[:half], others)
        return first + self.accepted(names[half:], others + first)

    def _saving(self, names: list[str], others: list[str]) -> list[str] | None:
        """Returns those of ``names`` that save memory in a step with all of them in place; None if that step is not equal."""
        saving = set(names)
        try:
            for checkpointed in self._variants:
                found, allocated = self._step(names + others, checkpointed=checkpointed)
                if self._have_values:
                    torch.testing.assert_close(found, self._expected, equal_nan=True)
                # What a call allocates besides its output may stay for the backward: the mask of dropout is wider on a GPU.
                saving &= {name for name in names if allocated[name] <= self.allocated[name] - self._returned[name]}
        except (RuntimeError, AssertionError):  # of the backward, and of the comparison
            return None
        return [name for name in names if name in saving and self._returned[name]]

    def _step(self, names: list[str], *, checkpointed: bool) -> tuple[list[Tensor | None], dict[str, int]]:
        """Returns outputs and gradients of a step, then outputs of an evaluation, and the bytes that activations allocate."""
        net = self._copy()
        for child in [] if checkpointed else net.modules():
            restore_module(child)
        for name in names:
            _set_inplace(net, name)
        torch.manual_seed(0)
        args, kwargs = self._arguments()
        with InputUses(net.train()) as uses:
            outputs = _all_tensors(net(*args, **kwargs))
        self._returned = self._returned or uses.returned
        if sums := [_weighted_sum(output) for output in outputs if output.requires_grad]:
            torch.autograd.backward(sums)
        leaves = [*net.parameters(), *(leaf for leaf in torch_private.leaves_of_tree((args, kwargs)) if isinstance(leaf, Tensor))]
        with torch.no_grad():
            args, kwargs = self._arguments()
            evaluated = _all_tensors(net.eval()(*args, **kwargs))
        gradients = [leaf.grad for leaf in leaves if leaf.is_leaf]
        return [*(output.detach() for output in outputs), *gradients, *evaluated], uses.allocated

    def _arguments(self) -> Any:
        return torch_private.map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), self._call)

    def _copy(self) -> nn.Module:
        """Returns a copy in which every parameter is trained, also those that are frozen for now."""
        net = copy.deepcopy(self._module)
        for parameter in net.parameters():
            parameter.requires_grad_(is_differentiable(parameter))
        return net


def _weighted_sum(tensor: Tensor) -> Tensor:
    """Returns a sum in which every element has another weight."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    weights = torch.linspace(0.5, 1.5, parts.numel(), device=parts.device, dtype=parts.dtype)
    return (parts * weights.view(parts.shape)).sum()


def _all_tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in the output of a model: a tensor, containers of them, or objects with attributes."""
    found = []
    for leaf in torch_private.leaves_of_tree(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type):
            found += _all_tensors(list(vars(leaf).values()))
    return found


class InputUses(TorchDispatchMode):
    """Watches a forward: which operators read the input of an activation after its call, and what each activation allocates.

    Memory counts as one, whichever view of it is read. An output that is the input itself (dropout in evaluation) is not a use.

    Args:
        module: submodules with ``inplace=False`` or True are its activations.

    Attributes:
        allocated: bytes by name of an activation.
        returned: those of its output among them.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.allocated: dict[str, int] = defaultdict(int)
        self.returned: dict[str, int] = defaultdict(int)
        self._inputs: dict[int, tuple[StorageReference, set[str]]] = {}
        self._running: list[str] = []
        self._read: set[str] = set()
        children = module.named_modules()
        self._activations = {name: child for name, child in children if isinstance(getattr(child, "inplace", None), bool)}
        self._hooks: list[Any] = []

    def __enter__(self) -> "InputUses":
        for name, child in self._activations.items():
            self._hooks.append(child.register_forward_pre_hook(functools.partial(self._begin, name)))
            self._hooks.append(child.register_forward_hook(functools.partial(self._end, name), with_kwargs=True))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        while self._hooks:
            self._hooks.pop().remove()

    def used_later(self) -> set[str]:
        """Returns the names of activations whose input an operator has read after their call."""
        return self._read

    def still_kept(self) -> set[str]:
        """Returns the names of activations whose input something keeps now."""
        gc.collect()
        return set().union(*(names for reference, names in self._inputs.values() if reference.is_alive()))

    def _begin(self, name: str, *_: Any) -> None:
        self._running.append(name)

    def _end(self, name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._running.remove(name)
        outputs = {storage_id(tensor.untyped_storage()): tensor.untyped_storage().nbytes() for tensor in _tensors(output)}
        inputs = {storage_id(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        self.returned[name] += sum(size for identity, size in outputs.items() if identity not in inputs)
        for tensor in _tensors((args, kwargs)):
            reference = StorageReference(tensor.untyped_storage())
            if (identity := storage_id(tensor.untyped_storage())) not in outputs:
                self._inputs.setdefault(identity, (reference, set()))[1].add(name)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {storage_id(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        for identity in before & self._inputs.keys():
            self._read |= self._inputs[identity][1]
        result = operator(*args, **kwargs or {})
        if self._running:
            made = {storage_id(tensor.untyped_storage()): tensor.untyped_storage().nbytes() for tensor in _tensors(result)}
            for name in self._running:
                self.allocated[name] += sum(size for identity, size in made.items() if identity not in before)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch_private.leaves_of_tree(tree) if isinstance(leaf, Tensor)]
