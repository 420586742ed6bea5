"""Replicas that copy a parameter after recorded writes alone, and are compared with the module.

Writes in place, another address, ``requires_grad`` and the step of an optimizer are recorded. Other
writes, such as ``parameter.data.mul_()``, are found by comparisons: each device adds up the bits of
each copy, and sends the sums to the host, which reads them in the next forward. ::

    forward of training      1   2  ...  8   9  ...  30   31   32  ...  61   62   63
    compared                 x   x       x                 x                  x        and where an evaluation begins or ends
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..runtime.devices import start_copy
from .module_tree import ModuleTree

Refresh = Literal["always", "recorded"]
Copies = Mapping[torch.device, Sequence[Tensor]]  # Each list has the order of the parameters.

FIRST = 8  # All of these forwards are compared: wrong programs end soon.
INTERVAL = 31  # A prime, so that loops of several forwards come to each of them.
_CHUNK = 2**20  # Elements that are multiplied at once. Their products take 8 MiB.
_BITS = {1: torch.int8, 2: torch.int16}  # Larger ones are some of int32.


def check_refresh(refresh: str) -> None:
    """Raises ``ValueError`` for another rule than those of :class:`DataParallelModel`."""
    if refresh not in ("always", "recorded"):
        raise ValueError(f"refresh={refresh!r}, expected 'always' or 'recorded'")


class RecordedWrites:
    """Writes to parameters that no version counter tells of."""

    def __init__(self) -> None:
        updated = set[int]()
        self._updated = updated  # ids of parameters
        self._forwards = 0
        self._is_training = True
        self._is_due = False  # The copies are compared before this forward runs.
        self._unread: list[Callable[[], None]] = []

        # fused kernels move no counter
        def note_step(optimizer: Optimizer, *arguments: Any) -> None:
            for group in optimizer.param_groups:
                for each in group["params"]:
                    if each.requires_grad:
                        updated.add(id(each))

        weakref.finalize(self, register_optimizer_step_post_hook(note_step).remove)

    def begin_forward(
        self,
        tree: ModuleTree,
        in_step: bool,
    ) -> None:
        """Counts a forward, and reads the comparisons of those before.

        The first one of an evaluation, or after it, notes all trained parameters: programs swap
        averages in, and optimizers have modes.
        """
        self.read()
        is_training = in_step or (tree.modules[0].training and torch.is_grad_enabled())
        is_switched = is_training != self._is_training
        self._is_training = is_training
        if is_switched:
            self._updated.update(id(each) for each in tree.parameters if each.requires_grad)
        self._forwards += 1
        is_time = self._forwards <= FIRST or self._forwards % INTERVAL == 0
        self._is_due = is_time or is_switched

    def take(self, tree: ModuleTree) -> list[int]:
        """Returns the places of the noted parameters, and forgets them."""
        places = [tree.place[key] for key in self._updated if key in tree.place]
        self._updated.clear()
        return places

    def compare_if_due(self, tree: ModuleTree, copies: Copies) -> None:
        """Compares all copies if this forward is one of those. An evaluation waits for the result."""
        if self._is_due:
            self.compare(tree, copies, tree.parameters)
            if not self._is_training:
                self.read()

    def compare(
        self,
        tree: ModuleTree,
        copies: Copies,
        parameters: Iterable[Tensor],
    ) -> None:
        """Starts to compare ``parameters`` with their copies."""
        places = [tree.place[id(parameter)] for parameter in parameters]
        everywhere = {tree.parameters[0].device: tree.parameters, **copies}
        started = [
            start_copy(checksums([tensors[i] for i in places])) for tensors in everywhere.values()
        ]

        def read() -> None:
            sums = torch.stack([wait() for wait in started])
            differs = (sums != sums[0]).nonzero()
            if not len(differs):
                return
            row, column = differs[0]
            names = [*dict(tree.modules[0].named_parameters())]
            raise RuntimeError(
                f"{names[places[column]]} differs from its copy on {[*everywhere][row]}, expected model.refresh_replicas() after "
                "a write that torch does not record, as through .data, or DataParallelModel(..., refresh='always')"
            )

        self._unread.append(read)

    def read(self) -> None:
        """Raises ``RuntimeError`` if copies had other values in a comparison."""
        unread = self._unread
        self._unread = []
        for read in unread:
            read()


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a number of the bits of each tensor, on their device.

    Integers are exact, so all kinds of devices have the same numbers. Each place has a weight of
    its own, since programs permute weights, or change their signs.
    """
    bits = [
        each.detach().reshape(-1).view(_BITS.get(each.itemsize, torch.int32)) for each in tensors
    ]
    size = min(max(1, *map(len, bits)), _CHUNK)
    places = torch.arange(1, size + 1, device=bits[0].device)
    weights = places**3 * -7046029254386353131 >> 33
    sums = []
    for row in bits:
        total = torch.zeros_like(weights[0])
        for part in row.split(size):
            total = total * 31 + (part * weights[: len(part)]).sum()
        sums.append(total)
    return torch.stack(sums)
