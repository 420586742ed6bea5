"""Nested containers as torch flattens them, such as the state of an optimizer.

torch has no public module for them yet (pytorch#65761; pytorch#175082 proposes ``torch.utils.pytree``). For batches, use
``batch.nested``, which supports dataclasses and mappings of other types.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__: list[str] = []


def leaves(tree: Any) -> list[Any]:
    """Returns all values of nested lists, tuples and dictionaries that are not containers."""
    return tree_leaves(tree)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Returns ``tree`` with each tensor replaced by ``function(tensor)``. Other values stay as they are."""
    return tree_map_only(Tensor, function, tree)


def flatten(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Returns the values of :func:`leaves`, and a function that makes a tree of the same structure from as many values."""
    values, structure = tree_flatten(tree)
    return values, lambda others: tree_unflatten(others, structure)
