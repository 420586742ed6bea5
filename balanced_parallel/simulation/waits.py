"""Waits of the host: calls for which a GPU would have to finish its work first. The native code detects them."""

import ctypes
import inspect
import itertools
import os
import threading
from collections import Counter, deque
from types import FrameType
from typing import NamedTuple

import torch

from ..runtime.torch_private import current_backward_id
from .categories import MemoryLabels

# Arguments: device, kind, and a buffer of some size for the message of an error. An empty message allows the wait.
LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)
MAX_WAITS = 10_000  # that are kept, about 3 MB
_SKIPPED = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, __file__))
_ADVICE = {
    "item": "keep the number in a tensor on the device, or read it after the step",
    "copy to the host": "copy with non_blocking=True, and read the copy later, after an event",
    "pageable copy to the host": "copy into pinned memory, torch.empty(..., pin_memory=True)",
    "copy from the host": "create the tensor on the device (torch.full), or copy it from pinned memory with non_blocking=True",
    "pageable copy from the host": "pin the memory, with DataLoader(pin_memory=True) or tensor.pin_memory(), and copy whole rows",
    "boolean mask": "use torch.where, or multiply by the mask",
    "synchronize": "let one stream wait for another, with stream.wait_stream(other) or stream.wait_event(event)",
}


class Wait(NamedTuple):
    """A call for which a GPU would have made the host wait.

    Attributes:
        device: the device that the host waits for.
        kind: ``"item"`` (also ``bool(tensor)``), ``"copy to the host"``, ``"copy from the host"``, the same with ``"pageable "``
            in front, ``"boolean mask"``, ``"synchronize"``, or the name of an operator such as ``"nonzero"``.
        file, line: those of the caller, the first outside of torch; ``"backward"`` and 0 for a thread without Python code.
        step: number of the step, from 1. A step ends with the first forward after an optimizer's update.
    """

    device: torch.device
    kind: str
    file: str
    line: int
    step: int

    @property
    def advice(self) -> str:
        """A way to avoid the wait."""
        return _ADVICE.get(self.kind, "use an operator whose result has a known size, such as torch.where")

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{self.kind} on {self.device} in {place}"


class Waits:
    """A record of the last waits of one cluster, in their order."""

    def __init__(self, labels: MemoryLabels) -> None:
        self.record: deque[Wait] = deque(maxlen=MAX_WAITS)
        self.counts: Counter[tuple[torch.device, int]] = Counter()  # by device and step
        self._lock = threading.Lock()
        self._labels = labels  # which know the number of finished steps
        self.forbidding_blocks = 0
        self.listener = LISTENER(self._note)

    def per_step(self, device: torch.device) -> list[int]:
        """Returns the number of waits for a device in each step."""
        return [self.counts[device, step] for step in range(1, self._labels.steps + 2)]

    def _note(self, device: int, kind: bytes, buffer: int, size: int) -> None:
        wait = Wait(torch.device("sim", device), kind.decode(), *_caller(inspect.currentframe()), self._labels.steps + 1)
        with self._lock:
            self.record.append(wait)
            self.counts[wait.device, wait.step] += 1
        if self.forbidding_blocks:
            message = (
                f"the host would wait for a GPU, which forbidding_waits() does not allow: {wait}. To avoid it, {wait.advice}"
            )
            ctypes.memmove(buffer, encoded := message.encode()[: size - 1] + b"\0", len(encoded))


def _caller(frame: FrameType | None) -> tuple[str, int]:
    """Returns file and line of the innermost caller outside of torch and of this package."""
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    if frame is None:
        return "a thread without Python code" if current_backward_id() is None else "backward", 0
    return frame.f_code.co_filename, frame.f_lineno


def describe_steps(numbers: list[int]) -> str:
    """Formats the number of waits in each step, the last four runs of equal ones at most: ``step 1: 41, steps 2-20: 5 each``."""
    if not any(numbers):
        return "none"
    texts, first = [], 1
    for number, run in itertools.groupby(numbers):
        last = first + len(list(run)) - 1
        texts.append(f"step {first}: {number}" if first == last else f"steps {first}-{last}: {number} each")
        first = last + 1
    return ", ".join(texts if len(texts) < 5 else ["...", *texts[-4:]])
