"""Results of operators on fake tensors, made again for arguments of the same sizes.

A fake kernel takes long: it decomposes an operator, and dispatches each part. The facts of its
results depend on those of its arguments alone, and a model repeats its operators::

    first call      facts of the arguments  --->  fake kernel  --->  results  --->  their facts
    later calls     facts of the arguments  --->  facts of the results  --->  new fake tensors
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

# torch has no public module of fake tensors
from torch._subclasses.fake_tensor import FakeTensor

from .private import Metadata, active_fake_mode, storage_id, tensors_of

# Sizes depend on values, or an argument gets other sizes.
_VARYING = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}


# The results of an operator, and the type of their sequence. All traces of a process share them.
_results: dict[tuple[object, ...], tuple[Callable[[list[Any]], object], list[Metadata | None]]] = {}


def run_once(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> object:
    """Runs an operator, or makes the results that it has for such arguments."""
    mode = active_fake_mode()
    facts: list[object] = [
        func,
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        *kwargs,
    ]
    if not (mode and _is_constant(func) and _describe((*args, *kwargs.values()), facts)):
        return func(*args, **kwargs)
    key = tuple(facts)
    if (entry := _results.get(key)) is not None:
        pack, results = entry
        return pack([result and result.make(mode, args) for result in results])
    # An operator that only writes has no results, and takes long for many tensors.
    has_results = func._schema.returns or not func._schema.is_mutable
    outcome = func(*args, **kwargs) if has_results else None
    leaves: Any = outcome if isinstance(outcome, (list, tuple)) else [outcome]
    shared = [storage_id(each.untyped_storage()) for each in tensors_of((args, kwargs))]
    described = [leaf if leaf is None else _result(leaf, args, shared) for leaf in leaves]
    if NotImplemented not in described:
        pack = type(outcome) if leaves is outcome else operator.itemgetter(0)
        _results[key] = pack, described
    return outcome


@functools.cache
def _is_constant(func: Any) -> bool:
    """Returns True for an operator whose results depend on sizes alone."""
    if func.namespace not in ("aten", "balanced_parallel"):
        return False
    is_in_place = func._schema.name.endswith("_")
    return _VARYING.isdisjoint(func.tags) and (is_in_place or not func._schema.is_mutable)


def _describe(values: Iterable[Any], facts: list[object]) -> bool:
    """Adds the facts of arguments. Returns False if others matter too."""
    for value in values:
        if isinstance(value, (list, tuple)):
            facts.append(len(value))
            if not _describe(value, facts):
                return False
        elif not isinstance(value, Tensor):
            facts += type(value), value  # 1 and 1.0 are not the same.
        elif _is_usual(value):
            facts += value.shape, value.stride(), value.storage_offset(), value.dtype
            facts += value.fake_device, value.requires_grad
        else:
            return False
    return True


def _is_usual(tensor: object) -> TypeGuard[FakeTensor]:
    return (
        type(tensor) is FakeTensor
        and tensor.layout is torch.strided
        and (tensor.constant is None or not tensor.numel())
        and not tensor.dtype.is_complex
        and not tensor.is_neg()
    )


def _result(leaf: Any, args: Sequence[object], shared: Sequence[int]) -> Any:
    """Returns the facts of a result; ``NotImplemented`` if it is not known from them.

    ``shared`` has the storages of all arguments.
    """
    if not _is_usual(leaf) or leaf.requires_grad:
        return NotImplemented
    key = storage_id(leaf.untyped_storage())
    offset = int(leaf.storage_offset())
    attributes = vars(leaf) | {"fake_mode": None}
    result = Metadata(leaf.shape, leaf.stride(), offset, leaf.dtype, attributes)
    if key not in shared:
        size = result.make(None, ()).untyped_storage().nbytes()
        is_whole = not offset and size == leaf.untyped_storage().nbytes()
        return result if is_whole else NotImplemented
    sources = [
        place
        for place, value in enumerate(args)
        if isinstance(value, Tensor) and storage_id(value.untyped_storage()) == key
    ]
    if not sources or shared.count(key) > 1:  # Another call may not share the memory.
        return NotImplemented
    return result._replace(source=sources[0], is_source=args[sources[0]] is leaf)
