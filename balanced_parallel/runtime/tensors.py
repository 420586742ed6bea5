"""Properties of tensors, most of which torch keeps private: version counters, bases of views, gradient slots, hooks, storages."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__: list[str] = []

_gradient_slot: Any = torch.Tensor.grad


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Returns the version counter of each tensor, which every write in place increments; 0 for inference tensors.

    ``torch.autograd.graph.increment_version`` is the public way to change a counter. There is none to read it.
    """
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # inference tensors have no counter
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def is_differentiable(tensor: Tensor) -> bool:
    """Returns True for floating point and complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_sharded(tensor: Any) -> bool:
    """Returns True for a ``DTensor``, whose import takes seconds."""
    return hasattr(tensor, "to_local")


def local_tensors(tensors: Iterable[Any]) -> list[Any]:
    """Returns the shard on this rank in place of each ``DTensor``. Changes in place change the whole."""
    with torch.no_grad():
        return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]


def base_of(tensor: Tensor) -> Tensor:
    """Returns the tensor that ``tensor`` is a view of, or ``tensor`` itself. There is no public attribute for it."""
    base = tensor._base
    return tensor if base is None else base


def mark_as_parameter(tensor: Tensor) -> None:
    """Makes ``isinstance(tensor, nn.Parameter)`` True. Unlike a parameter, the tensor may be the result of an operator.

    ``nn.Parameter`` sets this attribute on tensor subclasses. No public function sets it.
    """
    tensor._is_param = True


def get_gradient(tensor: Tensor) -> Tensor | None:
    """Returns the gradient that autograd has accumulated in a leaf.

    ``nn.Parameter.grad`` and the ``grad`` of a parameter's class may be replaced by a property. Autograd does not call the
    property, and neither does this function.
    """
    gradient: Tensor | None = _gradient_slot.__get__(tensor)
    return gradient


def set_gradient(tensor: Tensor, gradient: Tensor | None) -> None:
    """Sets the gradient of a leaf as autograd does, past any property in the place of ``grad``."""
    _gradient_slot.__set__(tensor, gradient)


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Returns True if a hook was registered on the tensor by ``register_hook`` or ``register_post_accumulate_grad_hook``.

    There is no public way to list hooks.
    """
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def storage_id(storage: torch.UntypedStorage) -> int:
    """Returns a number that all Python objects of one storage share, for as long as the storage lives.

    ``data_ptr()`` does not serve: it is 0 for every empty, fake or meta storage.
    """
    return int(storage._cdata)


class StorageReference:
    """A key for a storage, which does not keep its memory. Its number is given to no other storage as long as the key exists.

    torch's class is not listed in its documentation, but other parts of torch use it (``torch.compile``, FSDP).
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._number = storage_id(storage)
        self._reference = StorageWeakRef(storage)

    def is_alive(self) -> bool:
        """Returns True if a tensor still has the storage."""
        return not self._reference.expired()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorageReference) and other._number == self._number

    def __hash__(self) -> int:
        return hash(self._number)
