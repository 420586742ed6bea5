"""Replicas that copy a parameter after recorded writes alone, and are compared with the module.

Writes in place, another address, ``requires_grad`` and the step of an optimizer are recorded. Other
writes, such as ``parameter.data.mul_()``, are found by comparisons: each device adds up the bits of
its copies, and sends one number to the host, which reads it in the next forward. ::

    forward of training      1   2  ...  8   9  ...  30   31   32  ...  61   62   63
    compared                 x   x       x                 x                  x        and before an evaluation
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..runtime.devices import start_copy
from .module_tree import ModuleTree

Refresh = Literal["always", "recorded"]
Copies = Mapping[torch.device, Sequence[Tensor]]  # in the order of the parameters

FIRST = 8  # forwards that are compared: wrong programs end soon
INTERVAL = 31  # A prime, so that loops of several forwards come to each of them.
_CHUNK = 2**20  # Elements that are multiplied at once. The products take 8 MiB.


def check_refresh(refresh: str) -> None:
    """Raises ``ValueError`` for another rule than those of :class:`DataParallelModel`."""
    if refresh not in get_args(Refresh):
        raise ValueError(f"refresh={refresh!r}, expected 'always' or 'recorded'")


class RecordedWrites:
    """Writes to parameters that version counters do not tell of."""

    def __init__(self) -> None:
        self._updated = set[int]()  # ids of parameters
        self._forwards = 0
        self._is_evaluating = False
        self._is_due = False  # The copies are compared before the next forward runs.
        self._unread: list[Callable[[], None]] = []
        note = weakref.WeakMethod(self._note_step)

        def after_step(optimizer: Optimizer, *arguments: Any) -> None:
            if (method := note()) is not None:
                method(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(after_step).remove)

    def _note_step(self, optimizer: Optimizer) -> None:
        """Notes the parameters that an optimizer has updated. Fused kernels move no counter."""
        for group in optimizer.param_groups:
            self._updated.update(
                id(each) for each in group["params"] if each.requires_grad or each.grad is not None
            )

    def begin_forward(self, tree: ModuleTree, *, is_evaluating: bool) -> None:
        """Counts a forward.

        The first one of an evaluation, or after it, notes all trained parameters: programs swap
        averages in, and optimizers have modes.
        """
        was_evaluating = self._is_evaluating
        self._is_evaluating = is_evaluating
        if is_evaluating != was_evaluating:
            self._updated.update(id(each) for each in tree.parameters if each.requires_grad)
        self._forwards += 1
        is_time = self._forwards <= FIRST or self._forwards % INTERVAL == 0
        self._is_due = is_time or is_evaluating > was_evaluating

    def take(self, tree: ModuleTree) -> list[int]:
        """Returns the places of the noted parameters, and forgets them.

        Each replica rescales the rows of an embedding that it sees.
        """
        updated = self._updated
        self._updated = set()
        rescaled = {id(embedding.weight) for embedding in tree.rescaled.values()}
        return [tree.place[key] for key in updated | rescaled if key in tree.place]

    def compare_if_due(self, tree: ModuleTree, copies: Copies) -> None:
        """Compares all copies if this forward is one of those. An evaluation waits for the result."""
        if self._is_due:
            self._is_due = False
            self.compare(tree, copies, range(len(tree.parameters)))
            if self._is_evaluating:
                self.read()

    def compare(self, tree: ModuleTree, copies: Copies, places: Sequence[int]) -> None:
        """Starts to compare the parameters at ``places`` with their copies."""
        everywhere = {tree.parameters[0].device: tree.parameters, **copies}
        sums = [checksums([tensors[i] for i in places]) for tensors in everywhere.values()]
        numbers = [start_copy(checksums([each])) for each in sums]

        def read() -> None:
            expected = numbers[0]()
            for device, found, number in zip(everywhere, sums, numbers, strict=True):
                if not torch.equal(number(), expected):
                    differs = sums[0].cpu() != found.cpu()
                    parameter = tree.parameters[places[int(differs.nonzero()[0])]]
                    raise RuntimeError(_explain(tree, parameter, device))

        self._unread.append(read)

    def read(self) -> None:
        """Raises ``RuntimeError`` if copies had other values in a comparison."""
        unread = self._unread
        self._unread = []
        for each in unread:
            each()


def _explain(tree: ModuleTree, parameter: Tensor, device: torch.device) -> str:
    named = tree.modules[0].named_parameters()
    name = next((name for name, each in named if each is parameter), "a parameter")
    return (
        f"{name} differs from its copy on {device}, which forwards have used: it was written where torch records nothing, as "
        "through .data. Expected model.refresh_replicas() after such a write, or DataParallelModel(..., refresh='always')"
    )


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a number of the bits of each tensor, on their device.

    Integers are exact, so all kinds of devices have the same numbers. Each place has a weight of
    its own, since programs permute weights, or change their signs.
    """
    rows = [each.detach().reshape(-1) for each in tensors]
    bits = [row.view({1: torch.int8, 2: torch.int16}.get(row.itemsize, torch.int32)) for row in rows]
    size = min(max(map(len, bits)), _CHUNK)
    places = torch.arange(1, size + 1, device=bits[0].device) * -7046029254386353131
    weights = (places ^ (places >> 29)) * -4658895280553007687 >> 33
    sums = []
    for row in bits:
        total = torch.zeros((), dtype=torch.int64, device=row.device)
        for part in row.split(size or 1):
            total = total * 31 + (part * weights[: len(part)]).sum()
        sums.append(total)
    return torch.stack(sums)
