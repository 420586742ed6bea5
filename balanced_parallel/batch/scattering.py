"""Cuts a batch into rows for each replica.

torch's ``scatter`` leaves devices idle (9 rows on 4 devices: 3, 3, 3) and zips what it cut without looking, so that a second
input with fewer rows silently drops samples. Here sizes differ by at most one row, and inputs that disagree are an error.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch

from ..runtime.devices import DeviceLike, resolve_devices
from .rows import count_rows, cut, move_leaves

__all__: list[str] = []


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
