"""Thread-local state of torch, captured in the calling thread and entered in the workers of the replicas.

A new thread starts with torch's defaults, whatever ``with`` blocks are around the call. torch's ``parallel_apply`` passes only
the autocast flag of CUDA to its threads, and no dtype. The dtype is thread-local too and starts as float16, so
``autocast("cuda", dtype=torch.bfloat16)`` around ``nn.DataParallel`` computes in float16 (pytorch#105682, #125186).
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__: list[str] = []


@dataclass(frozen=True)
class ThreadState:
    """State of a thread: gradient and inference mode, autocast flag and dtype per device type, and the default device."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    default_device: torch.device

    @classmethod
    def capture(cls, devices: Sequence[torch.device]) -> "ThreadState":
        """Returns the state of the calling thread, with autocast for the types of ``devices`` and for the CPU."""
        types = sorted({"cpu", *(device.type for device in devices)})
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_device=torch.get_default_device(),
        )

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Sets this state in the calling thread for the duration of the block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                if enabled != torch.is_autocast_enabled(kind) or (enabled and dtype != torch.get_autocast_dtype(kind)):
                    stack.enter_context(torch.autocast(kind, dtype, enabled, self.autocast_cache))
            if self.default_device != torch.get_default_device():  # a default device slows down every factory function
                stack.enter_context(self.default_device)
            yield
