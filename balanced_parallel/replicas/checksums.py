"""Finds writes to parameters that Python does not see, such as those of a kernel that was given an address."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..runtime.host_copies import start_copy

__all__: list[str] = []

CHUNK = 2**18  # elements per step of a checksum, which bounds its temporary memory
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Watch:
    """Compares a module's parameters with their copies, in the windows 2, 4, 8, ...

    The checksums of windows 4, 8, ... are computed one window before, so that the host does not wait for them. A parameter with
    an unrecorded write is copied at every forward from then on. Writes that begin in window ``n`` are found in window ``2 n`` at
    the latest. :class:`~.untracked_writes.Writes` records all writes that Python sees.
    """

    def __init__(self) -> None:
        self.windows = 0
        self._compared: tuple[list[int], Callable[[], list[int]]] = [], list  # parameters, and those of them that differ
        self._inside = False  # the last forward announced another one in its window
        self._unrecorded: list[int] = []

    def look(self, parameters: Sequence[Tensor], copies: Sequence[Tensor], changed: Sequence[int], *, goes_on: bool) -> list[int]:
        """Returns the indices of the parameters to copy, in addition to those that are known to have changed.

        Args:
            parameters: the parameters of a module.
            copies: their copies on one other device, up to date with all recorded writes.
            changed: indices of the parameters that have just been copied.
            goes_on: the next forward is in the same window of micro-batches. Parameters do not change within a window.
        """
        begins, self._inside = not self._inside, goes_on
        self.windows += begins
        if begins and self.windows > 1 and (self.windows == 2 or _is_power_of_two(self.windows + 1)):
            still = sorted({*range(len(parameters))}.difference(changed))
            self._compared = still, _start_comparison([parameters[i] for i in still], [copies[i] for i in still])
        if begins and self.windows > 1 and _is_power_of_two(self.windows):
            still, differing = self._compared
            found = [still[i] for i in differing()]
            if set(found).difference(self._unrecorded):
                warnings.warn(
                    f"{len(found)} parameters were written to without torch's version counter, and neither through .data nor by "
                    "an optimizer of torch. They are copied to the other devices at every forward from now on. To avoid these "
                    "copies, call model.refresh_replicas() after such a write",
                    stacklevel=2,
                )
            self._unrecorded = sorted({*found, *self._unrecorded})
        return self._unrecorded


def _differing(parameters: Sequence[Tensor], copies: Sequence[Tensor]) -> list[int]:
    """Returns the indices of parameters that differ from their copies in any bit."""
    return _start_comparison(parameters, copies)()


@torch.no_grad()
def _start_comparison(parameters: Sequence[Tensor], copies: Sequence[Tensor]) -> Callable[[], list[int]]:
    """Starts a comparison. Returns a function for its result. Only checksums are copied to the host."""
    reads = [start_copy(torch.stack([_checksum(tensor) for tensor in tensors])) for tensors in (parameters, copies) if tensors]

    def differing() -> list[int]:
        sums = [read().tolist() for read in reads]
        return [i for i, (parameter, copy) in enumerate(zip(*sums, strict=True)) if parameter != copy]

    return differing


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _checksum(tensor: Tensor) -> Tensor:
    """Returns a position-weighted checksum of the raw bits.

    Integer arithmetic wraps, so the order in which a device sums does not matter.
    """
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    bits = values.reshape(-1).view(_INTEGERS[values.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    factors = torch.arange(min(CHUNK, bits.numel()), device=bits.device) * 2 + 1
    for number, chunk in enumerate(bits.split(CHUNK) if bits.numel() else ()):
        total += (chunk * factors[: chunk.numel()]).sum() * (2 * number + 1)
    return total
