"""State of modules that a forward changes: buffers, and numbers in attributes, such as counters."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .devices import Devices, move
from .random_numbers import RandomState
from .torch_private import BatchNorm, buffers_of, foreach_copy_


def advancing_buffers(part: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that a forward may advance or set, but for those that are trained, class
    weights, and the statistics of batch norm.
    """
    if type(part).__module__ == "torch.nn.modules.loss" or isinstance(part, BatchNorm):
        return {}
    return {
        name: buffer
        for name, buffer in buffers_of(part).items()
        if buffer is not None and not buffer.requires_grad
    }


@torch.no_grad()
def are_close(tensor: Tensor, other: Tensor) -> bool:
    """Returns True if two tensors of any devices have the same values, or none, as in a trace.

    The host waits.
    """
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return True
    return bool(torch.isclose(move(other, tensor.device), tensor, equal_nan=True).all())


def numbers_of(part: nn.Module) -> dict[str, object]:
    """Returns the attributes that are numbers, flags, or tuples of them, such as counters.

    Those of torch's modules change in no forward.
    """
    return _attributes_of(part, NUMBERS)


def _attributes_of(part: nn.Module, kinds: frozenset[type]) -> dict[str, object]:
    if is_of_torch(part):
        return {}
    return {
        name: value
        for name, value in vars(part).items()
        if (type(value) in kinds and name != "training")
        or (type(value) is tuple and kinds.issuperset(map(type, value)))
    }


NUMBERS: frozenset[type] = frozenset({int, float, bool})
# An attribute may be None before a forward sets it.
_VALUES: frozenset[type] = NUMBERS | {type(None), Tensor}


def is_of_torch(part: object) -> bool:
    """Returns True for an object whose class and all its bases are of Python or torch."""
    # The stub of a cached function takes the hash of a class for that of instances.
    return _is_class_of_torch(type(part))  # type: ignore[arg-type]


@functools.cache
def _is_class_of_torch(kind: type) -> bool:
    """Returns True for a class without bases elsewhere. FSDP2 makes subclasses in torch."""
    names = ("torch.", "balanced_parallel.", "builtins")
    return all(base.__module__.startswith(names) for base in kind.__mro__)


def refuse_setting(wrapper: nn.Module, name: str) -> None:
    """Raises ``AttributeError`` for an attribute of the wrapped module that is assigned to its
    wrapper, where no forward would read it.
    """
    if hasattr(getattr(wrapper, "module", None), name) and not hasattr(wrapper, name):
        kind = type(wrapper).__name__
        raise AttributeError(f"{name} was assigned to a {kind}, expected .module.{name} = ...")


def embeddings_of(module: nn.Module) -> dict[str, Any]:
    """Returns the embeddings by name, whose forward may rescale their weight."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {name: part for name, part in module.named_modules() if isinstance(part, kinds)}


def copy_state(module: nn.Module) -> Callable[[], None]:
    """Copies the buffers and the numbers of a module. Returns a function that puts them back.

    Buffers that a forward has replaced are the former tensors again, those it has added are gone.
    """
    parts = [*map(StateEntries, module.modules())]
    tensors = [*module.buffers()]
    copies = [each.detach().clone() for each in tensors]

    @torch.no_grad()
    def put() -> None:
        for each in parts:
            each.put()
        foreach_copy_(tensors, copies)

    return put


class StateEntries:
    """The attributes of some kinds and the buffers of a module as they are now, without the values
    of tensors.
    """

    def __init__(self, part: nn.Module, kinds: frozenset[type] = _VALUES) -> None:
        self.part = part
        self._kinds = kinds
        self._attributes = vars(part).copy()
        self._values = _attributes_of(part, kinds)
        self._buffers = buffers_of(part).copy()

    def are_other(self) -> bool:
        """Returns True if a forward has changed, made or removed some."""
        return self._identities() != StateEntries(self.part, self._kinds)._identities()

    def _identities(self) -> dict[str, int]:
        return {name: id(value) for name, value in (self._values | self._buffers).items()}

    def put(self) -> None:
        """Puts them back."""
        attributes = vars(self.part)
        for name in self._values.keys() | _attributes_of(self.part, self._kinds).keys():
            attributes[name] = self._attributes.get(name)
            if name not in self._attributes:
                del attributes[name]
        set_entries(buffers_of(self.part), self._buffers)


def set_entries(entries: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Gives a dictionary the entries of another, one by one: guards of compiled code watch the
    dictionary.
    """
    for name in entries.keys() - other.keys():
        del entries[name]
    entries.update(
        (name, value) for name, value in other.items() if entries.get(name, entries) is not value
    )


@contextmanager
def without_trace(modules: Iterable[nn.Module], devices: Devices) -> Iterator[None]:
    """Surrounds a forward that leaves no trace: random numbers and numbers of these modules are put
    back, and their buffers are replaced by copies in the block.
    """
    random_numbers = RandomState(devices)
    parts = [*map(StateEntries, modules)]
    for each in parts:
        buffers = each.part.named_buffers(recurse=False)
        buffers_of(each.part).update([(name, buffer.clone()) for name, buffer in buffers])
    try:
        yield
    finally:
        random_numbers.restore()
        for each in parts:
            each.put()
