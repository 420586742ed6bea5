"""Dimensions of the rows, for a whole structure or entry by entry, like ``in_dims`` and ``out_dims`` of ``torch.vmap``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..runtime.argument_checks import check_number
from . import nested

__all__: list[str] = []

Dims = int | None | Sequence[Any] | Mapping[Any, Any]


def check_dim(dim: Any) -> None:
    """Raises ``TypeError`` if ``dim`` is neither an integer nor None."""
    if dim is not None:
        check_number("dim", dim, "an integer, the dimension of the rows", whole=True)


def check_dims(dims: Any, name: str) -> None:
    """Raises ``TypeError`` if ``dims`` contains anything but integers, ``None``, sequences and mappings."""
    if isinstance(dims, Mapping):
        entries = list(dims.values())
    elif isinstance(dims, Sequence) and not isinstance(dims, (str, bytes)):
        entries = list(dims)
    elif dims is None or (isinstance(dims, int) and not isinstance(dims, bool)):
        return
    else:
        raise TypeError(
            f"{name} contains {dims!r}, expected the dimension of the rows, None for a value without rows, or a sequence or a "
            "mapping of these"
        )
    for entry in entries:
        check_dims(entry, name)


def leaf_dims(node: Any, dims: Dims, default: int | None, place: str = "") -> Iterator[int | None]:
    """Yields the dimension of the rows of each leaf of ``node``, in the order of :func:`nested.leaves`.

    Args:
        node: any structure.
        dims: one dimension for all leaves, or a sequence or mapping with one entry per entry of ``node``. ``None`` stands for a
            leaf without rows.
        default: dimension of the entries that a mapping does not contain.
        place: name of ``node`` in error messages.

    Raises:
        ValueError: if the entries of ``dims`` and ``node`` differ.

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
            f"{place or 'the value'} is {nested.describe(node)}, but the dimensions {dims!r} are given for a container"
        )
    names = _names(container)
    if isinstance(dims, Mapping):
        unknown = [key for key in dims if str(key) not in names]
        if unknown:
            raise ValueError(
                f"{place or 'the value'} has entries {', '.join(names)}, but dimensions are given for {unknown[0]!r}"
            )
        given = {str(key): entry for key, entry in dims.items()}
        entries = [given.get(name, default) for name in names]
    else:
        entries = list(dims)
        if len(entries) != len(names):
            raise ValueError(
                f"{place or 'the value'} has {len(names)} entries, but the dimensions {dims!r} are given for {len(entries)}"
            )
    for key, child, entry in zip(container.places, container.children, entries, strict=True):
        yield from leaf_dims(child, entry, default, place + key)


def dims_at(node: Any, dims: Dims, key: Any) -> Dims:
    """Returns the part of ``dims`` for the entry ``key`` of ``node``, or 0 if ``dims`` has none."""
    if dims is None or isinstance(dims, int):
        return dims
    if isinstance(dims, Mapping):
        found: Dims = dims.get(key, 0)
        return found
    container = nested.open_container(node)
    names = [] if container is None else _names(container)
    return dims[names.index(str(key))] if str(key) in names else 0


def _names(container: nested.Container) -> list[str]:
    """Returns the names of the entries as a user writes them in ``dims``: ``logits`` for ``.logits``, ``0`` for ``[0]``."""
    return [place.strip(".[]'\"") for place in container.places]


def is_first(dims: Dims) -> bool:
    """Returns True if all rows are in dimension 0."""
    if dims is None or isinstance(dims, int):
        return not dims
    return all(map(is_first, dims.values() if isinstance(dims, Mapping) else dims))
