"""Copies of a module's parameters on other devices, refreshed where the parameters have changed."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..runtime import coalesced
from ..runtime.tensors import versions
from .checksums import Watch
from .untracked_writes import Writes

__all__: list[str] = []


State = tuple[int, int, bool]  # address, version counter and requires_grad of a parameter when it was copied


class Changes(NamedTuple):
    """Places of the parameters that changed since the last look."""

    written: list[int]  # with torch's version counter, or moved
    untracked: list[int]  # through ``.data`` or by a fused optimizer
    moved: list[int]
    learns: bool  # True if requires_grad of any changed


class ParameterCopies:
    """Copies of parameters, one list per device, in the order of the parameters.

    Writes are found by address and version counter (torch's own record), by a record of ``.data`` (:class:`Writes`), and by
    checksums for writes that Python does not see (:class:`Watch`).

    Args:
        checksums: compares checksums of parameters and copies now and then. Tensors without values have none.
    """

    def __init__(self, checksums: bool = True) -> None:
        self.by_device: dict[torch.device, list[Tensor]] = {}
        self._checksums = checksums
        self.forget()

    def forget(self) -> None:
        """Drops all copies."""
        self.by_device.clear()
        self._writes: Writes | None = None
        self._watch = Watch() if self._checksums else None
        self._fresh: list[int] = []  # copied by the last refresh
        self.forget_values()

    def forget_values(self) -> None:
        """Marks every copy as outdated."""
        self._states: list[State] = []

    def mark_fresh(self, parameters: Sequence[nn.Parameter]) -> None:
        """Marks every copy as equal to its parameter."""
        self._states = _states_of(parameters)
        if self._writes is not None:
            self._writes.take()

    def find_changes(self, parameters: Sequence[nn.Parameter]) -> Changes | None:
        """Returns what changed since the last call; None if nothing did."""
        states, before = _states_of(parameters), self._states
        untracked = [] if self._writes is None else self._writes.take()
        self._fresh = []
        if states and states == before and not untracked:
            return None
        self._states = states
        pairs = list(enumerate(zip(states, before or [(0, 0, False)] * len(states), strict=True)))
        written = [i for i, (now, then) in pairs if now[:2] != then[:2]]
        moved = [i for i, (now, then) in pairs if now[0] != then[0]]
        self._fresh = [*written, *sorted({*untracked}.difference(written))]
        return Changes(written, self._fresh[len(written) :], moved, any(now[2] != then[2] for _, (now, then) in pairs))

    def update(self, parameters: Sequence[nn.Parameter], changes: Changes) -> None:
        """Copies the parameters that changed."""
        for parameter in parameters[:1]:
            self.by_device.pop(parameter.device, None)
        with self._all_or_outdated():
            _refresh(self.by_device, parameters, changes.written)
            _refresh(self.by_device, parameters, changes.untracked, tracked=False)

    def extend_to(self, devices: Iterable[torch.device], parameters: Sequence[nn.Parameter]) -> None:
        """Makes copies on those of ``devices`` that have none."""
        missing = [device for device in dict.fromkeys(devices) if device not in self.by_device]
        if missing:
            with torch.inference_mode(False), torch.no_grad():
                copies = {device: [_empty_copy(parameter, device) for parameter in parameters] for device in missing}
                # each by itself: buffers would need more memory than the copies
                coalesced.copy_(list(copies.values()), [parameter.detach() for parameter in parameters], buffer_bytes=0)
            self.by_device |= copies
            self._writes = self._writes or Writes(parameters)

    def compare_checksums(self, parameters: Sequence[nn.Parameter], *, goes_on: bool) -> None:
        """Copies the parameters that were written to without any record.

        Args:
            goes_on: the next forward is in the same window of micro-batches. Parameters do not change within a window.
        """
        if self._watch is not None and self.by_device:
            copies = next(iter(self.by_device.values()))
            with self._all_or_outdated():
                found = self._watch.look(parameters, copies, self._fresh, goes_on=goes_on)
                _refresh(self.by_device, parameters, found, tracked=False)

    @contextlib.contextmanager
    def _all_or_outdated(self) -> Iterator[None]:
        """Marks every copy as outdated if the block fails, for example because memory runs out."""
        try:
            yield
        except BaseException:
            self.forget_values()
            raise

    def everywhere(self, parameters: Sequence[nn.Parameter], place: int) -> dict[torch.device, Tensor]:
        """Returns one parameter and its copies, by device."""
        parameter = parameters[place]
        return {parameter.device: parameter, **{device: copies[place] for device, copies in self.by_device.items()}}


def copy_buffers(buffers: Sequence[Tensor], devices: Sequence[torch.device]) -> list[dict[int, Tensor]]:
    """Returns copies of all buffers for each of ``devices``, by the id of the buffer."""
    together: list[Tensor] = []
    alone: list[Tensor] = []
    for buffer in buffers:
        # A trained buffer is copied with a graph, which brings it the gradients of all replicas.
        is_plain = buffer.layout == torch.strided and not (buffer.requires_grad or buffer.is_quantized)
        (together if is_plain else alone).append(buffer)
    copied = coalesced.copies([buffer.detach() for buffer in together], devices)
    copies = [dict(zip(map(id, together), found, strict=True)) for found in copied]
    for device, found in zip(devices, copies, strict=True):
        found.update((id(buffer), buffer.to(device, copy=True)) for buffer in alone)
    return copies


def _states_of(parameters: Sequence[Tensor]) -> list[State]:
    learns = [parameter.requires_grad for parameter in parameters]
    return list(zip([parameter.data_ptr() for parameter in parameters], versions(parameters), learns, strict=True))


def _empty_copy(parameter: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(parameter.detach(), device=device)


@torch.no_grad()
def _refresh(
    by_device: Mapping[torch.device, list[Tensor]], parameters: Sequence[Tensor], places: Sequence[int], *, tracked: bool = True
) -> None:
    """Copies the values of some parameters to all devices.

    Args:
        by_device: copies of all parameters, for each device.
        places: of these parameters.
        tracked: moves the version counters of the copies, as those of the parameters moved. If they did not, a graph of an
            earlier forward may still run backward, with the new values.
    """
    if not (by_device and places):
        return
    targets = []
    for device, copies in by_device.items():
        for i in places:
            if copies[i].shape != parameters[i].shape or copies[i].dtype != parameters[i].dtype:
                copies[i] = _empty_copy(parameters[i], device)
        targets.append([copies[i] if tracked else copies[i].data for i in places])
    coalesced.copy_(targets, [parameters[i].detach() for i in places])
