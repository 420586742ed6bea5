"""The state that forwards change: random numbers, buffers, numbers in attributes, and tensors that
a model writes in place.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..batch.containers import leaves
from ..batch.rows import Batch, move_leaves
from ..replicas.module_tree import numbers_of
from ..runtime import torch_private
from ..runtime.random_numbers import RandomState
from ..runtime.torch_private import buffers_of, parameters_of, versions


class Snapshot:
    """Copies of what the forwards of an update change, in the same memory each time: buffers and
    numbers of modules, and random numbers.

    Copies of all parameters would take too much memory. ``uncopied`` are those without a copy, with
    their version counters: all, but for those that the forwards of an update have written before,
    such as those of a momentum encoder.
    """

    def __init__(self, modules: Iterable[Any], devices: Sequence[torch.device]) -> None:
        self._modules = list(modules)
        self._devices = list(devices)
        self._buffers: list[
            tuple[dict[str, Tensor | None], dict[str, Tensor | None]]
        ] = []  # The dictionary of each module, and a copy of it.
        self._copies: list[Tensor] = []
        self._kinds: list[tuple[Any, ...]] = []
        self._numbers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._random: RandomState | None = None
        self._written: dict[int, Tensor] = {}  # parameters, by id
        self.uncopied: list[tuple[Tensor, int]] = []

    def __reduce__(self) -> Any:  # a copy has nothing to put back
        return Snapshot, (self._modules, self._devices)

    def take(self) -> None:
        """Copies the present state."""
        self._random = RandomState(self._devices)
        parts = [part for module in self._modules for part in module.modules()]
        self._buffers = [(buffers_of(part), buffers_of(part).copy()) for part in parts]
        self._numbers = [(vars(part), numbers_of(part)) for part in parts]
        # rescaling twice changes nothing
        stable = [parameters_of(part) for part in parts if not getattr(part, "max_norm", None)]
        parameters = [
            each
            for part in stable
            for each in part.values()
            if each is not None and id(each) not in self._written
        ]
        self.uncopied = list(zip(parameters, versions(parameters), strict=True))
        buffers = self._tensors()
        kinds = [(buffer.shape, buffer.dtype, buffer.device) for buffer in buffers]
        with torch.no_grad():
            if kinds == self._kinds:
                torch_private.foreach_copy_(self._copies, buffers)
            else:
                # a clone may run out of memory
                self._kinds = []
                self._copies = [buffer.clone() for buffer in buffers]
                self._kinds = kinds

    def restore(self) -> None:
        """Puts the state back.

        Buffers that a forward has replaced are the former tensors again, those it has added are
        gone.

        Raises ``RuntimeError`` if a parameter was written of which there is no copy.
        """
        if self._random is not None:
            self._random.restore()
        for part, before in self._buffers:
            part.clear()
            part.update(before)
        for attributes, numbers in self._numbers:
            attributes.update(numbers)
        with torch.no_grad():
            torch_private.foreach_copy_(self._tensors(), self._copies)
        if writes := explain_writes(self.uncopied):
            raise RuntimeError(writes)

    def learn(self) -> None:
        """Notes the parameters that were written since :meth:`take`, which copies them from now on."""
        now = versions([parameter for parameter, _ in self.uncopied])
        self._written |= {
            id(each): each
            for (each, before), after in zip(self.uncopied, now, strict=True)
            if before != after
        }

    def _tensors(self) -> list[Tensor]:
        buffers = [
            buffer
            for _, before in self._buffers
            for buffer in before.values()
            if buffer is not None
        ]
        return [*buffers, *self._written.values()]


def record_versions(batch: Batch) -> list[tuple[Tensor, int]]:
    """Returns the tensors of a batch with their version counters, before its first forward."""
    unmarked = leaves(move_leaves([batch.inputs, batch.targets], None))
    tensors = [leaf for _, leaf in unmarked if isinstance(leaf, Tensor)]
    return list(zip(tensors, versions(tensors), strict=True))


def explain_writes(recorded: Sequence[tuple[Tensor, int]]) -> str:
    """Describes a tensor that was changed in place, so that forwards cannot run again.

    Returns an empty text if there is none.
    """
    for tensor, before in recorded:
        if versions([tensor]) != [before]:
            kind = f"({tensor.dtype}, shape {tuple(tensor.shape)}) was changed in place"
            if isinstance(tensor, nn.Parameter):
                return f"a parameter {kind} by a forward that has to run again, expected a change outside of forward"
            return (
                f"a tensor of the batch {kind} since it was passed, but has to run again, expected the same values: change a "
                "copy (tensor.clone()) in the forward"
            )
    return ""
