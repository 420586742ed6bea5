"""The state that forwards change: random numbers, buffers, numbers in attributes, and tensors that
a model writes in place.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ..batch.containers import leaves
from ..batch.rows import Batch, move_leaves
from ..runtime.module_state import copy_state
from ..runtime.random_numbers import RandomState
from ..runtime.torch_private import parameters_of, versions


class Snapshot:
    """A copy of what the forwards of an update change: buffers and numbers of modules, and random
    numbers.

    Copies of parameters would take too much memory. ``uncopied`` are these with their version
    counters: a forward that has written one cannot run again.
    """

    def __init__(self, modules: Iterable[nn.Module], devices: Sequence[torch.device]) -> None:
        self._random = RandomState(devices)
        parts = [part for module in modules for part in module.modules()]
        self._restores = [copy_state(module) for module in modules]
        # rescaling twice changes nothing
        stable = [parameters_of(part) for part in parts if not getattr(part, "max_norm", None)]
        parameters = [each for part in stable for each in part.values() if each is not None]
        self.uncopied = list(zip(parameters, versions(parameters), strict=True))

    def restore(self) -> None:
        """Puts the state back. Raises ``RuntimeError`` if a parameter was written."""
        self._random.restore()
        for restore in self._restores:
            restore()
        if writes := explain_writes(self.uncopied):
            raise RuntimeError(writes)


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
