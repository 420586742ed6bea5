"""Streams beside those that compute: gradients are summed there while backward goes on.

Memory that is freed goes at once to whoever asks next on the stream that it was allocated on, which may be long before a
kernel of another stream has read it. ``Tensor.record_stream`` would keep it until that kernel has run, whenever that is, and
memory would be what the timing makes it. Here a tensor is kept until its own stream has waited for the other one, which happens
before the next piece of work is put beside, as in torch's FSDP2: at most one piece is held at a time.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from . import autograd
from .devices import current_stream

__all__: list[str] = []

Streams = Mapping[torch.device, torch.Stream | None]  # None where a device has none


def current_streams(devices: list[torch.device]) -> Streams:
    """The stream of the calling thread on each device."""
    return {device: current_stream(device) for device in devices}


@contextlib.contextmanager
def on_streams(streams: Streams) -> Iterator[None]:
    """Makes all of ``streams`` current in this thread, each on its device."""
    with contextlib.ExitStack() as stack:
        for stream in streams.values():
            if stream is not None:
                stack.enter_context(stream)
        yield


class SideStreams:
    """One stream for each device, beside the one that computes. Only for calls from inside of a backward."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        self._due: deque[tuple[list[tuple[torch.device, torch.Stream, torch.Event]], list[Any]]] = deque()

    @contextlib.contextmanager
    def entered(self, computing: Streams, uses: list[Any]) -> Iterator[None]:
        """What is called in this block runs beside, after what ``computing`` streams have been given so far.

        Args:
            uses: tensors of the computing streams, kept until these have waited.
        """
        sides = {device: self._beside(device, stream) for device, stream in computing.items()}
        try:
            with on_streams(sides):
                yield
        finally:
            self.expect(computing, sides, uses)

    def expect(self, computing: Streams, working: Streams, uses: list[Any]) -> None:
        """Has ``computing`` streams, and those of who called backward, wait for ``working`` ones, at its end at the latest."""
        pairs = [(device, stream, working[device]) for device, stream in computing.items()]
        self._due.append(([(device, stream, work.record_event()) for device, stream, work in pairs if stream and work], uses))
        autograd.run_after_backward(self.join)

    def join(self) -> None:
        """Makes the waits that are due, and lets go what was kept for them. Nested backwards may call it from several threads."""
        with contextlib.suppress(IndexError):
            while True:
                waits, uses = self._due.popleft()
                for device, stream, event in waits:
                    stream.wait_event(event)
                    torch.accelerator.current_stream(device).wait_event(event)
                del uses

    def _beside(self, device: torch.device, stream: torch.Stream | None) -> torch.Stream | None:
        if stream is None:
            return None
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        self._streams[device].wait_stream(stream)
        return self._streams[device]
