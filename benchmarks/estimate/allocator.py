"""The oracle of estimates: bytes that the CPU's allocator hands out, those that operators take for themselves included."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig

# No public name turns it on: the successor of this profiler writes to stderr at each start, and starts in milliseconds.
_autograd: Any = torch.autograd


class AllocatorProfile:
    """A count of the bytes in use on the CPU, over every block of :meth:`recorded`.

    Attributes:
        now: bytes allocated and not released. Negative if memory was released that was allocated before.
        peak: the maximum of ``now``, from 0 or from :meth:`reset_peak` on.

    Example:
        >>> profile = AllocatorProfile()
        >>> with profile.recorded():
        ...     ones = torch.ones(256)
        >>> profile.now, profile.peak
        (1024, 1024)
    """

    def __init__(self) -> None:
        self.now = self.peak = 0

    def reset_peak(self) -> None:
        """Starts another peak from the bytes in use now."""
        self.peak = self.now

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Counts in this block. Backwards of CPU tensors run in the calling thread, so they are counted too.

        Enter and leave it outside of ``record_function``, so not in the hooks of an optimizer's step: torch's profiler keeps
        no state for a range that ends later, and can deadlock there.
        """
        config = _autograd.ProfilerConfig(_autograd.ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        _autograd._enable_profiler_legacy(config)
        try:
            yield
        finally:
            records = [record for records in _autograd._disable_profiler_legacy() for record in records]
            start = records[0]
            # threads of gloo allocate too: each has records of its own
            for record in sorted(records, key=start.cpu_elapsed_us):
                self.now += record.cpu_memory_usage() if record.kind() == "memory_alloc" else 0
                self.peak = max(self.peak, self.now)


class ReduceScatter:
    """Makes the copy of gloo's reduce-scatter be released by this thread, which the profiler sees, and not by one of gloo."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory of the size."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        """Reduces and scatters."""
        work = dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op=True)
        work.wait()
        time.sleep(0.01)  # the thread of gloo releases its reference
