"""Dimensions of the rows, said for a whole structure or entry by entry, as ``in_dims`` and ``out_dims`` of ``torch.vmap``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import nested

__all__: list[str] = []

Dims = int | None | Sequence[Any] | Mapping[Any, Any]


def check_dims(dims: Any, name: str) -> None:
    """Raises ``TypeError`` where ``dims`` is not made of integers, ``None``, sequences and mappings."""
    if isinstance(dims, Mapping):
        entries = list(dims.values())
    elif isinstance(dims, Sequence) and not isinstance(dims, (str, bytes)):
        entries = list(dims)
    elif dims is None or (isinstance(dims, int) and not isinstance(dims, bool)):
        return
    else:
        raise TypeError(
            f"{name} has {dims!r}, expected the dimension of the rows, None for what has no rows, or a sequence or a mapping of "
            "these"
        )
    for entry in entries:
        check_dims(entry, name)


def leaf_dims(node: Any, dims: Dims, default: int | None, place: str = "") -> Iterator[int | None]:
    """The dimension of the rows of each leaf of ``node``, in the order of :func:`nested.leaves`.

    Args:
        node: any structure.
        dims: one dimension for all leaves, or a sequence or mapping of them, entry by entry. ``None`` is a leaf without rows.
            Entries that a mapping leaves out have ``default``.
        default: an ``int``.
        place: what errors call ``node``.

    Raises:
        ValueError: ``dims`` and ``node`` differ in their entries.

    Example:
        >>> list(leaf_dims({"x": 1, "state": (2, 3)}, {"state": (1, None)}, 0))
        [0, 1, None]
    """
    container = nested.open_container(node)
    if dims is None or isinstance(dims, int):
        yield from [dims] * sum(1 for _ in nested.leaves(node))
        return
    if container is None:
        raise ValueError(
            f"{place or 'the value'} is {nested.describe(node)}, but the dimensions {dims!r} are those of a container"
        )
    names = _names(container)
    if isinstance(dims, Mapping):
        unknown = [key for key in dims if str(key) not in names]
        if unknown:
            raise ValueError(f"{place or 'the value'} has entries {', '.join(names)}, but the dimensions name {unknown[0]!r}")
        given = {str(key): entry for key, entry in dims.items()}
        entries = [given.get(name, default) for name in names]
    else:
        entries = list(dims)
        if len(entries) != len(names):
            raise ValueError(
                f"{place or 'the value'} has {len(names)} entries, but the dimensions {dims!r} are those of {len(entries)}"
            )
    for where, child, entry in zip(container.places, container.children, entries, strict=True):
        yield from leaf_dims(child, entry, default, place + where)


def dims_at(node: Any, dims: Dims, key: Any) -> Dims:
    """The part of ``dims`` for the entry of ``node`` that is called ``key``; 0 where they do not say."""
    if dims is None or isinstance(dims, int):
        return dims
    if isinstance(dims, Mapping):
        found: Dims = dims.get(key, 0)
        return found
    container = nested.open_container(node)
    names = [] if container is None else _names(container)
    return dims[names.index(str(key))] if str(key) in names else 0


def _names(container: nested.Container) -> list[str]:
    return [place.strip(".[]'\"") for place in container.places]


def is_first(dims: Dims) -> bool:
    """Returns True if all rows are in dimension 0."""
    if dims is None or isinstance(dims, int):
        return not dims
    return all(map(is_first, dims.values() if isinstance(dims, Mapping) else dims))
