"""Numbers that travel to the host while their device computes on.

``tensor.item()`` waits until the device has finished everything that it was given. A copy that was started early is there, or
comes soon, while the device still has later work::

    stream   | forward | copy of a count | backward ............... |
    host       ... start_copy(count) ... launches the backward, reads the count
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .devices import current_stream

__all__: list[str] = []


def start_copy(tensor: Tensor) -> Callable[[], Tensor]:
    """Starts to copy a tensor to the host. Returns a function that waits for the copy, not for later work, and returns it."""
    stream = current_stream(tensor.device)
    copy = tensor.detach().to("cpu", non_blocking=stream is not None)  # torch pins the memory of such a copy
    event = None if stream is None else stream.record_event()

    def wait() -> Tensor:
        if event is not None and not event.query():
            event.synchronize()
        return copy

    return wait


def pin(tensor: Tensor) -> Tensor:
    """Returns a copy in pinned memory, from which a copy to an accelerator does not make the host wait."""
    return tensor.pin_memory() if tensor.is_cpu and not tensor.requires_grad and torch.accelerator.is_available() else tensor
