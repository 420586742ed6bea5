"""Side streams, on which gradients are summed while the backward continues on the compute streams.

The stream that allocated a freed tensor reuses its memory at once, although a side stream may still
have to read it. As in FSDP2 of torch, the tensor is kept alive until its own stream has waited for
the side stream, so peaks do not depend on timing. Results are allocated before a side stream is
entered: activations could not reuse memory that it has allocated. ::

    compute stream   | backward of bucket 2 | backward of bucket 1 | wait | ...
    side stream                             | sum of bucket 2      |
    kept alive                              gradients of bucket 2  ^ freed
"""

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch

from . import torch_private
from .devices import HOSTS, current_stream

Streams = Mapping[torch.device, torch.Stream | None]  # None for a device without streams


def current_streams(devices: list[torch.device]) -> Streams:
    """Returns the current stream of the calling thread on each device."""
    return {
        device: None if device.type in HOSTS else torch.accelerator.current_stream(device)
        for device in devices
    }


@contextlib.contextmanager
def on_streams(streams: Streams) -> Iterator[None]:
    """Makes each stream of ``streams`` current on its device, in this thread."""
    with contextlib.ExitStack() as stack:
        for stream in streams.values():
            # a copy: torch notes in the object what to restore, and other threads may enter it too
            if stream is not None:
                stack.enter_context(
                    torch.Stream(stream.stream_id, stream.device_index, stream.device_type)
                )
        yield


def wait_for(tensor: torch.Tensor, stream: torch.Stream | None) -> None:
    """Makes the current stream of the tensor's device wait for ``stream``, which computes
    ``tensor`` for another thread.
    """
    current = current_stream(tensor.device)
    if current is not None and stream is not None and current != stream:
        current.wait_stream(stream)
        tensor.record_stream(current)


# The side streams of all modules of the process. Two modules may share a parameter, whose sums wait
# for each other.
_instances: "weakref.WeakValueDictionary[int, SideStreams]" = weakref.WeakValueDictionary()


def wait_for_sums(*, is_read: bool = False) -> None:
    """Makes the current streams wait for the sums of all modules that no stream waits for yet.

    Before gradients are read or added to, they also wait for those that another stream waits for.
    """
    others = [side for reference in _instances.valuerefs() if (side := reference()) is not None]
    for waits, _ in [entry for side in others for entry in side._pending.copy()]:
        for device, _, event in waits:
            torch.accelerator.current_stream(device).wait_event(event)
    for device, stream in [pair for side in others for pair in side._streams.items()]:
        if is_read:
            torch.accelerator.current_stream(device).wait_stream(stream)


class SideStreams:
    """One side stream per device.

    Methods may be called only inside a backward, with the compute streams of its forward.
    """

    def __init__(self) -> None:
        _instances[id(self)] = self
        self._streams: dict[torch.device, torch.Stream] = {}
        self._pending: deque[
            tuple[list[tuple[torch.device, torch.Stream, torch.Event]], Sequence[object]]
        ] = deque()

    @contextlib.contextmanager
    def entered(self, computing: Streams, uses: Sequence[object]) -> Iterator[None]:
        """Runs the block on the side streams, behind ``computing``, which wait for them later.

        ``uses`` live until then.
        """
        sides = {device: self._side_stream(device, stream) for device, stream in computing.items()}
        try:
            with on_streams(sides):
                yield
        finally:
            self.expect(computing, sides, uses)

    def expect(self, computing: Streams, working: Streams, uses: Sequence[object]) -> None:
        """Makes the compute streams and the current streams wait for what ``working`` do now, by
        the end of the backward.
        """
        waits = []
        for device, stream in computing.items():
            work = working[device]
            if stream and work:
                waits.append((device, stream, work.record_event()))
        self._pending.append((waits, uses))
        torch_private.run_after_backward(self.join)

    def begin(self) -> None:
        """Joins before a sum, and makes the current streams wait for the sums of other modules,
        which may share a parameter.
        """
        self.join()
        wait_for_sums()

    def join(self) -> None:
        """Makes the pending waits, and releases the tensors that were kept for them."""
        with contextlib.suppress(IndexError):  # nested backwards may do so in several threads
            while True:
                waits, uses = self._pending.popleft()
                for device, stream, event in waits:
                    stream.wait_event(event)
                    torch.accelerator.current_stream(device).wait_event(event)
                del uses

    def join_before(self, node: torch_private.Node) -> None:
        """Joins before the node of a leaf adds a gradient of its own, such as that of a penalty on
        the parameters.
        """

        def join(gradients: tuple[torch.Tensor | None, ...]) -> None:
            handle.remove()
            if gradients[0] is not None:
                self.join()
                wait_for_sums(is_read=True)

        handle = node.register_prehook(join)

    def _side_stream(
        self, device: torch.device, stream: torch.Stream | None
    ) -> torch.Stream | None:
        if stream is None:
            return None
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        self._streams[device].wait_stream(stream)
        return self._streams[device]
