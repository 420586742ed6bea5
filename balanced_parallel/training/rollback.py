"""State that a failed attempt changes, and that is put back: random numbers, buffers, and a first update."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import nested
from ..batch.row_marks import Rows, Whole, without_mark
from ..runtime import multi_tensor
from ..runtime.modules import buffers_of
from ..runtime.random_numbers import RandomState
from ..runtime.tensors import versions
from .micro_batches import Batch

__all__: list[str] = []


class Snapshot:
    """Copies of what the forwards of an update change: buffers, and the random numbers of the CPU and of the devices.

    Batch norm's statistics are buffers. The copies are made again in the same memory for each update.

    Args:
        modules: whose buffers are copied.
        devices: of the replicas.
    """

    def __init__(self, modules: Iterable[nn.Module], devices: Sequence[torch.device]) -> None:
        self._modules = list(modules)
        self._devices = list(devices)
        self._buffers: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []  # of each module, and a copy
        self._copies: list[Tensor] = []
        self._kinds: list[tuple[Any, ...]] = []
        self._random: RandomState | None = None

    def __reduce__(self) -> Any:  # a copy has nothing to put back
        return Snapshot, (self._modules, self._devices)

    def take(self) -> None:
        """Copies the present state."""
        self._random = RandomState(self._devices)
        parts = [buffers_of(part) for module in self._modules for part in module.modules()]
        self._buffers = [(part, part.copy()) for part in parts]
        buffers = self._tensors()
        kinds = [(buffer.shape, buffer.dtype, buffer.device) for buffer in buffers]
        with torch.no_grad():
            if kinds == self._kinds:
                multi_tensor.copy_(self._copies, buffers)
            else:
                self._kinds, self._copies = [], [buffer.clone() for buffer in buffers]  # a clone may run out of memory
                self._kinds = kinds

    def restore(self) -> None:
        """Puts the state back. Buffers that a forward has replaced are the former tensors again, those it has added are gone."""
        if self._random is not None:
            self._random.restore()
        for part, before in self._buffers:
            part.clear()
            part.update(before)
        with torch.no_grad():
            multi_tensor.copy_(self._tensors(), self._copies)

    def _tensors(self) -> list[Tensor]:
        return [buffer for _, before in self._buffers for buffer in before.values() if buffer is not None]


class Originals:
    """Version counters of the tensors of batches. A batch that was changed in place cannot run again."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []

    def add(self, batch: Batch) -> None:
        """Records a batch, before its first forward."""
        tensors = _tensors_in([batch.inputs, batch.targets])
        self._tensors += tensors
        self._versions += versions(tensors)

    def explain_writes(self) -> str:
        """Describes a tensor that was changed in place, and a way to avoid it. Returns an empty text if there is none."""
        for tensor, now, before in zip(self._tensors, versions(self._tensors), self._versions, strict=True):
            if now != before:
                return (
                    f"a tensor of the batch ({tensor.dtype}, shape {tuple(tensor.shape)}) was changed in place since it was "
                    "passed, but has to run again, expected the same values: change a copy (tensor.clone()) in the forward"
                )
        return ""


def _tensors_in(node: Any) -> list[Tensor]:
    """Returns all tensors in nested containers. Fast, since a batch may be a list of many samples."""
    pending, tensors = [node], []
    while pending:
        node = pending.pop()
        if isinstance(node, Tensor):
            tensors.append(node)
        elif isinstance(node, (list, tuple)):
            pending.extend(node)
        elif isinstance(node, (Whole, Rows)):
            pending.append(without_mark(node))
        elif not nested.is_plain(node) and (container := nested.open_container(node)) is not None:
            pending.extend(container.children)
    return tensors
