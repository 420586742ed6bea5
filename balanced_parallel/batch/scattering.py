"""Splits a batch by rows over replicas.

torch's ``scatter`` leaves devices idle (9 rows on 4 devices: 3, 3, 3), and silently drops samples if a second input has fewer
rows. Here sizes differ by at most one row, and inputs with different numbers of rows are an error.
"""

from collections.abc import Sequence
from typing import Any

from ..runtime.devices import DeviceLike, resolve_devices
from .dims import check_dim
from .rows import count_rows, cut, move_leaves
from .splits import assign_rows, check_split

__all__: list[str] = []


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
        TypeError: ``device_ids`` is not a list of devices, or ``dim`` not an integer.
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
    check_dim(dim)
    used, sizes = assign_rows(count_rows(inputs, dim), devices, check_split(split, len(devices)))
    pieces = [inputs] if sizes is None else cut(inputs, sizes, dim)
    return [move_leaves(piece, device) for piece, device in zip(pieces, used, strict=True)]
