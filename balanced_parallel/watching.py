"""Finds the parameters that are written to in place through ``.data``, which torch's version counter does not record."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

__all__: list[str] = []

CHUNK = 2**18  # elements looked at at once: what is allocated for it stays small
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Watch:
    """Compares a module's parameters with the copies that should equal them, in the windows 2, 4, 8, ...

    A teacher that follows by ``.data.mul_()``, or an optimizer that writes so, is found before the second window, and its
    parameters are copied at every forward from then on. One that begins late is found before twice as many windows.
    """

    def __init__(self) -> None:
        self.windows = 0
        self._next = 2
        self._inside = False  # the last forward said that its window goes on
        self._unrecorded: list[int] = []

    def look(self, parameters: Sequence[Tensor], copies: Sequence[Tensor], changed: Sequence[int], *, goes_on: bool) -> list[int]:
        """The places of the parameters to copy, beyond what the version counters say.

        Args:
            parameters: the module's.
            copies: on one other device, as fresh as the version counters have them.
            changed: the places of those whose version counters have moved, which have just been copied.
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
                    f"{len(found)} parameters were written to in place through .data, which torch does not record: they are "
                    "copied to the other devices at every forward from now on; write to the parameter itself under "
                    "torch.no_grad() instead, or call model.refresh_replicas() after it",
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
