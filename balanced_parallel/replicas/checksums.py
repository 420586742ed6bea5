"""Finds the parameters that are written to by what Python does not see, such as a kernel that is given their address."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

__all__: list[str] = []

CHUNK = 2**18  # elements looked at at once: what is allocated for it stays small
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Watch:
    """Compares a module's parameters with the copies that should equal them, in the windows 2, 4, 8, ...

    Writes that begin early are found before the second window, and their parameters are copied at every forward from then on.
    Writes that begin late are found before twice as many windows. :class:`~.writes.Writes` knows of all that Python sees.
    """

    def __init__(self) -> None:
        self.windows = 0
        self._next = 2
        self._inside = False  # the last forward said that its window goes on
        self._unrecorded: list[int] = []

    def look(self, parameters: Sequence[Tensor], copies: Sequence[Tensor], changed: Sequence[int], *, goes_on: bool) -> list[int]:
        """Returns the places of the parameters to copy, beyond those that are known to have changed.

        Args:
            parameters: the module's.
            copies: on one other device, as fresh as recorded writes have them.
            changed: the places of those that have just been copied.
            goes_on: the next forward will be of the same window of micro-batches, between which nobody writes.
        """
        begins, self._inside = not self._inside, goes_on
        self.windows += begins
        if begins and self.windows >= self._next:
            self._next = 2 * self.windows
            still = sorted({*range(len(parameters))}.difference(changed))
            found = [still[i] for i in _differing([parameters[i] for i in still], [copies[i] for i in still])]
            if set(found).difference(self._unrecorded):
                warnings.warn(
                    f"{len(found)} parameters were written to without torch's version counter, and neither through .data nor in "
                    "the step of an optimizer of torch: they are copied to the other devices at every forward from now on; call "
                    "model.refresh_replicas() after such a write instead",
                    stacklevel=2,
                )
            self._unrecorded = sorted({*found, *self._unrecorded})
        return self._unrecorded


@torch.no_grad()
def _differing(parameters: Sequence[Tensor], copies: Sequence[Tensor]) -> list[int]:
    """The places where a parameter is not, bit for bit, its copy. Only checksums move; one wait for each device."""
    sums = [torch.stack([_checksum(tensor) for tensor in tensors]).tolist() for tensors in (parameters, copies) if tensors]
    return [i for i, (mine, theirs) in enumerate(zip(*sums, strict=True)) if mine != theirs]


def _checksum(tensor: Tensor) -> Tensor:
    """Of bits and their places. Of integers, which wrap, so that it does not depend on the order in which a device adds."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    bits = values.reshape(-1).view(_INTEGERS[values.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    factors = torch.arange(min(CHUNK, bits.numel()), device=bits.device) * 2 + 1
    for number, chunk in enumerate(bits.split(CHUNK) if bits.numel() else ()):
        total += (chunk * factors[: chunk.numel()]).sum() * (2 * number + 1)
    return total
