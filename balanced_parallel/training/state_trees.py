"""State as a tree of plain values for JSON, and tensors for ``torch.distributed.checkpoint``. Nothing of it is a pickle."""

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

__all__: list[str] = []


Path = tuple[Any, ...]
_PLAIN = (str, bool, int, float, type(None))
_MAPPINGS = {"dict": dict, "ordered": collections.OrderedDict, "counter": collections.Counter}  # MultiStepLR has a Counter
# of safetensors, as DCP reads them; other types of one byte are stored as uint8
_STORED = {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64}
_STORED |= {torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64}


def split_tensors(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Splits nested state into a tree for JSON and its tensors.

    Returns:
        The tree, in which each tensor is its path, shape and dtype, and the tensors by key: ``"step/model/0.weight"``.

    Raises:
        TypeError: a value that would not come back as it is. The message names its place.
    """
    tensors: dict[str, Tensor] = {}

    def encode(value: Any, path: Path) -> Any:
        kind = type(value)
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or value.is_quantized or value.is_nested:
                raise TypeError(f"{tensor_key(path)} is a {value.layout} tensor of {value.dtype}, expected a dense, plain one")
            stored = value
            if value.dtype not in _STORED:
                stored = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value.view(torch.uint8)
            tensors[tensor_key(path)] = stored
            return {"tensor": [list(path), list(stored.shape), str(stored.dtype)[6:], str(value.dtype)[6:]]}
        if kind in _PLAIN:
            return value
        if kind is list:
            return [encode(entry, (*path, str(index))) for index, entry in enumerate(value)]
        if kind in (tuple, torch.Size):
            return {kind.__name__.lower(): [encode(entry, (*path, str(index))) for index, entry in enumerate(value)]}
        if isinstance(value, np.generic) and value.dtype.kind in "biuf" and type(value.item()) in _PLAIN:
            return {"numpy": [value.dtype.name, value.item()]}
        for name, mapping in _MAPPINGS.items():
            if kind is mapping and all(type(key) in _PLAIN for key in value):
                return {name: [[key, encode(entry, (*path, key))] for key, entry in value.items()]}
        raise TypeError(
            f"{tensor_key(path)} is a {kind.__name__}, expected tensors, numbers, strings, and lists, tuples and "
            "dictionaries of them, with keys that are numbers or strings: a checkpoint has no pickled objects"
        )

    return encode(tree, ()), tensors


def join_tensors(tree: Any, find: Callable[[Path, torch.Size, torch.dtype], Tensor]) -> Any:
    """Returns the nested state of a tree from :func:`split_tensors`.

    Args:
        tree: as JSON has it.
        find: returns the stored tensor of a path, or memory for it, which may be filled afterwards.
    """
    if isinstance(tree, list):
        return [join_tensors(entry, find) for entry in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        path, shape, *dtypes = value
        of_file, dtype = (getattr(torch, name) for name in dtypes)
        stored = find(tuple(path), torch.Size(shape), of_file)
        return stored if stored.dtype == dtype else torch.view_as_complex(stored) if dtype.is_complex else stored.view(dtype)
    if kind == "numpy":
        return np.dtype(value[0]).type(value[1])
    if kind in ("tuple", "size"):
        return (tuple if kind == "tuple" else torch.Size)(join_tensors(entry, find) for entry in value)
    return _MAPPINGS[kind]({key: join_tensors(entry, find) for key, entry in value})


def tensor_key(path: Iterable[Any]) -> str:
    """Returns the name of a tensor. Other paths have other names: keys may contain a slash, and 1 is not ``"1"``."""
    parts = [part.replace("%", "%25").replace("/", "%2F") if isinstance(part, str) else f"%({part})" for part in path]
    return "/".join(parts)


def check_same_tensors(name: str, tensors: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises ``RuntimeError`` if a saved state has other names or shapes, before any of it is loaded."""
    other = sorted(tensors.keys() ^ saved.keys())
    if other:
        raise RuntimeError(
            f"the state of {name} has {len(saved)} entries, expected {len(tensors)}: only one has {', '.join(other[:3])}"
        )
    for key, tensor in tensors.items():
        if isinstance(tensor, Tensor) and not is_lazy(tensor) and tensor.shape != getattr(saved[key], "shape", None):
            raise RuntimeError(
                f"{key} of {name} was saved with shape {list(getattr(saved[key], 'shape', ()))}, expected {list(tensor.shape)}"
            )
