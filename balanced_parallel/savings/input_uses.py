"""Uses of the inputs of activations after their calls."""

import functools
import gc
from collections import defaultdict
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # torch has no public module of dispatch modes

from ..runtime import trees
from ..runtime.tensors import StorageReference, storage_id

__all__: list[str] = []


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
    return [leaf for leaf in trees.leaves(tree) if isinstance(leaf, Tensor)]
