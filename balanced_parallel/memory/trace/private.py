"""Private names of torch that traces alone need, each behind a function or an alias."""

from collections.abc import Callable
from functools import partial
from typing import Any

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


class FakeMode(FakeTensorMode):
    """A fake mode with a short key for its cache of results. That of torch looks for symbolic sizes,
    and takes a quarter of the time of a trace.
    """

    def _prep_args_for_hash(self, result: list[object], args: Any, *rest: Any) -> None:
        if isinstance(args, dict):
            args = *args, *args.values()
        result.append((type(args), len(args)))
        for arg in args:
            if type(arg) is FakeTensor and arg.layout is torch.strided and arg.constant is None:
                result += arg.shape, arg.stride(), arg.storage_offset(), arg.fake_device
                result += arg.dtype, arg.requires_grad, arg.is_conj(), arg.is_neg()
            elif isinstance(arg, (int, float, torch.dtype, torch.device)) or arg is None:
                result += type(arg), arg  # 1 and 1.0 are not the same
            else:
                super()._prep_args_for_hash(result, [arg], *rest)
