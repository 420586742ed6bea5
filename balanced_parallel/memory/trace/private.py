"""Private names of torch that traces alone need, each behind a function or an alias."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# pytorch#65761, #175082
from torch.utils._pytree import tree_leaves, tree_map_only

# Returns the node of autograd that this thread runs, or None outside of a backward.
current_node: Callable[[], Any] = torch._C._current_autograd_node

# Returns the number of the next node of this thread. An operator makes its node before it runs.
next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

# Returns all values of nested lists, tuples and dictionaries that are not containers.
leaves_of_tree = tree_leaves


def tensors_of(values: object) -> list[Tensor]:
    """Returns the tensors among the arguments or the results of an operator."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [tensor for value in values for tensor in tensors_of(value)]


# Returns a tree with each tensor replaced by the result of a function.
map_tensors = partial(tree_map_only, Tensor)


def number_of(node: Any) -> int:
    """Returns the number of a node in the order of the forward.

    It tells nodes apart without keeping them.
    """
    return int(node._sequence_nr())


def storage_id(storage: torch.UntypedStorage) -> int:
    """Returns a number that all Python objects of a living storage share.

    ``data_ptr()`` is 0 for fake ones.
    """
    return int(storage._cdata)


def shared_id(module: nn.Module) -> int:
    """Returns a number that a module shares with its shallow copies, such as its replicas: they
    have the same table of hooks.
    """
    return id(module._state_dict_hooks)


def active_fake_mode() -> FakeTensorMode | None:
    """Returns the fake mode that runs operators here."""
    mode: FakeTensorMode | None = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode


class Metadata(NamedTuple):
    """The facts of a fake tensor. Its memory is that of the argument at ``source``, or new."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    attributes: dict[str, Any]
    source: int = -1
    is_source: bool = False

    def make(self, mode: FakeTensorMode | None, args: Sequence[Any]) -> Any:
        """Returns such a tensor for other arguments."""
        if self.is_source:
            return args[self.source]
        with torch._C._DisableTorchDispatch():
            if self.source < 0:
                element = torch.empty_strided(
                    self.shape, self.stride, dtype=self.dtype, device="meta"
                )
            else:
                element = torch.empty(0, dtype=self.dtype, device="meta")
                storage = args[self.source].untyped_storage()
                element.set_(storage, self.offset, self.shape, self.stride)
        # The second name is that of torch 2.11.
        device = self.attributes.get("_fake_device") or self.attributes["fake_device"]
        tensor = Tensor._make_subclass(
            FakeTensor, element, False, dispatch_device=True, device_for_backend_keys=device
        )
        vars(tensor).update(self.attributes, fake_mode=mode)
        return tensor
