"""Cuts a batch into rows for each replica.

torch's ``scatter`` leaves devices idle (9 rows on 4 devices: 3, 3, 3) and zips what it cut without looking, so that a second
input with fewer rows silently drops samples. Here sizes differ by at most one row, and inputs that disagree are an error.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from . import nesting
from .devices import DeviceLike, move, resolve_devices

__all__: list[str] = []


class Pieces(list[Any]):
    """A list with one entry per replica that remembers how many rows each had, for whoever must cut something else alike."""

    def __init__(self, entries: Iterable[Any], sizes: Sequence[int | None]) -> None:
        super().__init__(entries)
        self.sizes = tuple(sizes)


class Arguments(NamedTuple):
    """The arguments of one call, so that messages can name them: ``inputs[0]``, ``kwargs['mask']``."""

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]


def split_sizes(rows: int, shares: int | Sequence[float]) -> list[int]:
    """Rows for each part: ``split_sizes(9, 4)`` is ``[3, 2, 2, 2]``.

    Args:
        rows: how many rows there are.
        shares: how many equal parts, or the weight of each part. With weights each part gets its proportion rounded down,
            and the rows that are left go to the largest remainders, the first part first among equals.
    """
    if isinstance(shares, int):
        return [rows // shares + (index < rows % shares) for index in range(shares)]
    weights = [Fraction(share) for share in shares]  # exact: a rounded quotient could hand out a row too many
    exact = [rows * weight / sum(weights) for weight in weights]
    sizes = [math.floor(part) for part in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda index: sizes[index] - exact[index])
    for index in by_remainder[: rows - sum(sizes)]:
        sizes[index] += 1
    return sizes


def proportional_sizes(rows: int, shares: Sequence[int]) -> list[int]:
    """``rows`` in the proportion of ``shares``: the rows of the targets beside those of the inputs, or a multiple of them
    where the targets were flattened.

    Raises:
        ValueError: they do not divide.
    """
    total = sum(shares)
    if rows == total:
        return list(shares)
    if total == 0 or any(rows * share % total for share in shares):
        raise ValueError(
            f"the targets have {rows} rows where the inputs have {total} (cut into {', '.join(map(str, shares))}), expected as "
            "many, or a multiple"
        )
    return [rows * share // total for share in shares]


def count_rows(node: Any, dim: int = 0) -> int | None:
    """Rows along ``dim`` that every tensor and every list of plain values in ``node`` has; ``None`` where nothing has rows.

    0-dim tensors, plain values, empty lists and other objects have no rows: they go to every replica whole.

    Raises:
        ValueError: two leaves disagree, or a tensor has no dimension ``dim``; names the places and the shapes.
        TypeError: a leaf that would have rows but that is not cut here: a NumPy array, a PackedSequence.
    """
    only = node.inputs[0] if type(node) is Arguments and len(node.inputs) == 1 and not node.kwargs else node
    only = only[0] if type(only) is tuple and len(only) == 1 else only
    if type(only) is torch.Tensor and 0 <= dim < only.dim():  # as most often
        return only.size(dim)
    known: tuple[str, Any, int] | None = None
    for place, leaf in _cuttable_leaves(node, "" if isinstance(node, Arguments) else "inputs"):
        rows = (len(leaf) or None) if isinstance(leaf, list) else _tensor_rows(leaf, dim, place)
        if rows is None:
            continue
        if known is not None and known[2] != rows:
            raise ValueError(
                f"the inputs disagree about the number of rows along dimension {dim}: {known[0]} is {nesting.describe(known[1])} "
                f"({known[2]} rows), {place} is {nesting.describe(leaf)} ({rows} rows); give each the same number of rows, "
                "or make what every replica needs whole a 0-dim tensor, a tuple of plain values, or part of the module"
            )
        known = known or (place, leaf, rows)
    return None if known is None else known[2]


def _cuttable_leaves(node: Any, name: str) -> Iterable[tuple[str, Any]]:
    for place, leaf in nesting.leaves(node, name):
        place = place.removeprefix(".")
        if isinstance(leaf, torch.Tensor) or nesting.is_row_list(leaf):
            yield place, leaf
        elif isinstance(leaf, PackedSequence):
            raise TypeError(f"{place} is a PackedSequence, which cannot be cut by rows: pass the padded tensor and the lengths")
        elif getattr(leaf, "ndim", 0) and hasattr(leaf, "__array__"):
            raise TypeError(f"{place} is an array of shape {tuple(leaf.shape)}, expected a tensor: use torch.as_tensor")


def _tensor_rows(tensor: torch.Tensor, dim: int, place: str) -> int | None:
    if tensor.dim() == 0:
        return None
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{place} is {nesting.describe(tensor)}, expected a dimension {dim} to cut along")
    return tensor.size(dim)


def cut(node: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    """``node`` cut into ``len(sizes)`` pieces of ``sizes[i]`` rows, all rows together. Views: nothing is copied. What has no
    rows is in each piece."""
    if len(sizes) == 1:
        return [node]
    if type(node) is Arguments and not node.kwargs:
        return [Arguments(inputs, {}) for inputs in cut(node.inputs, sizes, dim)]
    starts = [0, *itertools.accumulate(sizes)]

    def cut_leaf(leaf: Any) -> list[Any]:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return [leaf.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False)]
        if nesting.is_row_list(leaf):
            return [leaf[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        return [leaf] * len(sizes)

    return nesting.unzip_leaves(cut_leaf, node, len(sizes))


def move_leaves(node: Any, device: torch.device) -> Any:
    """``node`` with every tensor on ``device``."""
    return nesting.map_leaves(lambda leaf: move(leaf, device) if isinstance(leaf, torch.Tensor) else leaf, node)


def assign_rows(
    rows: int | None, devices: Sequence[torch.device], weights: Sequence[float] | None
) -> tuple[list[torch.device], list[int] | None]:
    """The devices that get rows, and how many each; the first device alone where there are none, or nothing has rows."""
    if rows is None:
        return [devices[0]], None
    sizes = split_sizes(rows, len(devices) if weights is None else weights)
    used = [index for index, size in enumerate(sizes) if size > 0] or [0]
    return [devices[index] for index in used], [sizes[index] for index in used]


def scatter(
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    dim: int = 0,
    *,
    split: Sequence[float] | None = None,
) -> list[Any]:
    """Cuts ``inputs`` by rows over devices.

    Tensors with at least one dimension are cut along ``dim`` into views that are moved to their device (gradients flow
    back through both); a list of strings or numbers is cut the same way, one entry per row. 0-dim tensors, plain values
    and other objects go to every replica. Containers keep their type.

    Args:
        inputs: a tensor, or tuples, named tuples, lists, mappings and dataclasses of tensors.
        device_ids: as in :class:`DataParallelModel`.
        dim: the dimension of the rows.
        split: one weight per device for unequal parts; ``None`` cuts into sizes that differ by at most one row.

    Returns:
        One structure like ``inputs`` per device that got rows. With no rows at all, one with no rows.

    Raises:
        ValueError: inputs disagree about the number of rows; names both places and shapes.
    """
    devices = resolve_devices(device_ids)
    check_split(split, len(devices))
    used, sizes = assign_rows(count_rows(inputs, dim), devices, split)
    pieces = [inputs] if sizes is None else cut(inputs, sizes, dim)
    return [move_leaves(piece, device) for piece, device in zip(pieces, used, strict=True)]


def check_split(split: Sequence[float] | str | None, devices: int) -> None:
    """Raises ``ValueError`` where ``split`` is not one finite weight per device, none negative, not all zero."""
    if split is None:
        return
    weights = [] if isinstance(split, str) else list(split)
    if len(weights) != devices or not all(0 <= weight < float("inf") for weight in weights) or not sum(weights) > 0:
        raise ValueError(
            f"split={split!r}, expected None or one weight per device ({devices} here), none negative and not all zero"
        )
