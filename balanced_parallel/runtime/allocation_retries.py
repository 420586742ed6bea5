"""Operators that are run again after an allocation of theirs has failed."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # torch documents this class, but has no public module for it

from .devices import accelerators

__all__: list[str] = []


class RetriedAllocations(TorchDispatchMode):
    """Runs an operator once more if it raises ``torch.OutOfMemoryError``, after the cached memory was given back.

    An optimizer's step that ends in the middle has changed some parameters and not others. So the operator that has failed is
    repeated, and the step goes on. An operator allocates its results before it writes to its arguments.
    """

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs one operator."""
        try:
            return function(*args, **(kwargs or {}))
        except torch.OutOfMemoryError:
            pass  # the traceback is released before memory is
        release_memory()
        return function(*args, **(kwargs or {}))


def release_memory() -> None:
    """Collects garbage and gives cached memory back to the devices.

    After an error, autograd's threads of the other devices still run their present operator, and then free what they hold.
    Nothing tells when, so the memory in use is read until it stays the same.
    """
    gc.collect()
    if not torch.accelerator.is_available():
        return
    devices, before = accelerators(), None
    for _ in range(200):
        now = [torch.accelerator.memory_allocated(device) for device in devices]
        if now == before:
            break
        before = now
        time.sleep(0.01)
    for device in devices:
        torch.accelerator.synchronize(device)  # blocks that another stream still uses are freed then
    torch.accelerator.empty_cache()
