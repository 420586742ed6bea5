"""Splits a batch by rows over replicas.

torch's ``scatter`` leaves devices idle (9 rows on 4 devices: 3, 3, 3), and silently drops samples if a second input has fewer
rows. Here sizes differ by at most one row, and inputs with different numbers of rows are an error.
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
    """Returns the number of rows of each part.

    Args:
        rows: total number of rows.
        shares: number of equal parts, or the weight of each part. With weights, each part gets its proportion rounded down. The
            remaining rows go to the parts with the largest remainders, to the first ones among equals.

    Example:
        >>> split_sizes(9, 4)
        [3, 2, 2, 2]
        >>> split_sizes(9, [2, 1])
        [6, 3]
    """
    if isinstance(shares, int):
        return [rows // shares + (index < rows % shares) for index in range(shares)]
    weights = [Fraction(share) for share in shares]  # exact: with rounded quotients the sizes could exceed the total
    exact = [rows * weight / sum(weights) for weight in weights]
    sizes = [math.floor(part) for part in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda index: sizes[index] - exact[index])
    for index in by_remainder[: rows - sum(sizes)]:
        sizes[index] += 1
    return sizes


def proportional_sizes(rows: int, shares: Sequence[int]) -> list[int]:
    """Splits the rows of the targets in proportion to ``shares``, the rows of the inputs.

    Targets have as many rows as the inputs, or a multiple of them if they were flattened.

    Raises:
        ValueError: if a size would not be an integer.
    """
    total = sum(shares)
    if rows == total:
        return list(shares)
    if total == 0 or any(rows * share % total for share in shares):
        raise ValueError(
            f"the targets have {rows} rows, but the inputs have {total} (split into {', '.join(map(str, shares))}): expected the "
            "same number, or a multiple"
        )
    return [rows * share // total for share in shares]


def assign_rows(
    rows: int | None, devices: Sequence[torch.device], weights: Sequence[float] | None
) -> tuple[list[torch.device], list[int] | None]:
    """Returns the devices that get rows, and the number of rows of each.

    Without rows, the first device alone is used. If no input has rows (``rows`` is None), the sizes are None.
    """
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
    """Splits ``inputs`` by rows over devices.

    Tensors with at least one dimension are split along ``dim``, and their shards are moved to the devices. Gradients flow back
    to ``inputs``. Lists of strings or numbers are split in the same way, one entry per row. 0-dim tensors, plain values and other
    objects go to every replica. Containers keep their type.

    Args:
        inputs: a tensor, or tuples, named tuples, lists, mappings and dataclasses of tensors.
        device_ids: devices, as in :class:`DataParallelModel`.
        dim: dimension of the rows.
        split: one weight per device. ``None`` means sizes that differ by at most one row.

    Returns:
        A list with one structure like ``inputs`` per device that gets rows. Without rows, a list with one structure.

    Raises:
        ValueError: if inputs have different numbers of rows. The message names both inputs and their shapes.

    Example:
        >>> shards = scatter({"x": torch.zeros(9, 5), "scale": 2.0}, ["cpu"] * 4)
        >>> [shard["x"].shape[0] for shard in shards]
        [3, 2, 2, 2]
        >>> shards[3]["x"].shape, shards[3]["scale"]
        (torch.Size([2, 5]), 2.0)
        >>> [shard.shape for shard in scatter(torch.zeros(8, 5), ["cpu", "cpu"], split=[3, 1])]
        [torch.Size([6, 5]), torch.Size([2, 5])]
    """
    devices = resolve_devices(device_ids)
    check_split(split, len(devices))
    used, sizes = assign_rows(count_rows(inputs, dim), devices, split)
    pieces = [inputs] if sizes is None else cut(inputs, sizes, dim)
    return [move_leaves(piece, device) for piece, device in zip(pieces, used, strict=True)]


def check_split(split: Sequence[float] | str | None, devices: int) -> None:
    """Raises ``ValueError`` unless ``split`` is None or has one finite weight per device, none negative, not all zero."""
    if split is None:
        return
    weights = [] if isinstance(split, str) else list(split)
    if len(weights) != devices or not all(0 <= weight < float("inf") for weight in weights) or not sum(weights) > 0:
        raise ValueError(
            f"split={split!r}, expected None or one weight per device ({devices} here), none negative and not all zero"
        )
