"""State as a tree of plain values for JSON, and tensors for ``torch.distributed.checkpoint``. Nothing of it is a pickle."""

import collections
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

__all__: list[str] = []

Path = tuple[str, ...]

_PLAIN = (str, bool, int, float, type(None))


def split_tensors(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Splits nested state into a tree for JSON and its tensors.

    Returns:
        The tree, in which each tensor is its key, and the tensors by key: ``"step/model/0.weight"``.

    Raises:
        TypeError: a value that JSON does not have. The message names its place.
    """
    tensors: dict[str, Tensor] = {}

    def encode(value: Any, path: Path) -> Any:
        if isinstance(value, Tensor):
            tensors["/".join(path)] = value
            return {"tensor": list(path)}
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, list):
            return [encode(one, (*path, str(index))) for index, one in enumerate(value)]
        if isinstance(value, tuple):
            return {"tuple": [encode(one, (*path, str(index))) for index, one in enumerate(value)]}
        if isinstance(value, Mapping) and all(isinstance(key, _PLAIN) for key in value):
            kind = "counter" if isinstance(value, collections.Counter) else "dict"  # MultiStepLR has a Counter
            return {kind: [[key, encode(one, (*path, str(key)))] for key, one in value.items()]}
        raise TypeError(
            f"{'/'.join(path)} is a {type(value).__name__}, expected tensors, numbers, strings, and lists, tuples and "
            "dictionaries of them: a checkpoint has no pickled objects"
        )

    return encode(tree, ()), tensors


def join_tensors(tree: Any, find: Callable[[str], Tensor]) -> Any:
    """Returns the nested state of a tree from :func:`split_tensors`.

    Args:
        tree: as JSON has it.
        find: returns the tensor of a key.
    """
    if isinstance(tree, list):
        return [join_tensors(one, find) for one in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return find("/".join(value))
    if kind == "tuple":
        return tuple(join_tensors(one, find) for one in value)
    pairs = {key: join_tensors(one, find) for key, one in value}
    return collections.Counter(pairs) if kind == "counter" else pairs


def tensor_paths(tree: Any) -> list[Path]:
    """Returns the places of all tensors in a tree from :func:`split_tensors`."""
    if isinstance(tree, list):
        return [path for one in tree for path in tensor_paths(one)]
    if not isinstance(tree, dict):
        return []
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return [tuple(value)]
    return tensor_paths(value if kind == "tuple" else [one for _, one in value])
