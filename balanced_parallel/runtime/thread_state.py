"""Thread-local state of torch, captured in the calling thread and entered in the workers of the replicas.

A new thread starts with torch's defaults, whatever ``with`` blocks are around the call. torch's ``parallel_apply`` passes only
the autocast flag of CUDA to its threads, and no dtype. The dtype is thread-local too and starts as float16, so
``autocast("cuda", dtype=torch.bfloat16)`` around ``nn.DataParallel`` computes in float16 (pytorch#105682, #125186).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch  # the stack of TorchDispatchModes has no public functions
from torch.utils._device import DeviceContext  # the type of `with torch.device(...)`, without a public name

__all__: list[str] = []


Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


@dataclass(frozen=True)
class ThreadState:
    """State of a thread, as ``with`` blocks of torch set it.

    Attributes:
        grad, inference: gradient and inference mode.
        autocast: flag and dtype per device type.
        autocast_cache: autocast keeps the parameters that it has cast.
        threads: number of threads of an operator on the CPU. OpenMP has a number per thread.
        saved_tensor_hooks: the pair of hooks of ``torch.autograd.graph.saved_tensors_hooks``.
        function_modes: ``TorchFunctionMode`` objects, the last one called first. The default device is one.
        dispatch_modes: ``TorchDispatchMode`` objects, the last one called first.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    threads: int
    saved_tensor_hooks: Hooks | None
    function_modes: tuple[overrides.TorchFunctionMode, ...]
    dispatch_modes: tuple[_python_dispatch.TorchDispatchMode, ...]

    @classmethod
    def capture(cls, devices: Sequence[torch.device]) -> "ThreadState":
        """Returns the state of the calling thread, with autocast for the types of ``devices`` and for the CPU."""
        types = sorted({"cpu", *(device.type for device in devices)})
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types),
            autocast_cache=torch.is_autocast_cache_enabled(),
            threads=torch.get_num_threads(),
            saved_tensor_hooks=_saved_tensor_hooks(),
            function_modes=tuple(overrides._get_current_function_mode_stack()),  # without a public name
            dispatch_modes=tuple(_python_dispatch._get_current_dispatch_mode_stack()),  # as above
        )

    @property
    def needs_turns(self) -> bool:
        """True if a mode sees the operators of all replicas, and may expect one module to run at a time."""
        return not all(isinstance(mode, DeviceContext) for mode in (*self.function_modes, *self.dispatch_modes))

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Sets this state in the calling thread for the duration of the block."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                if enabled != torch.is_autocast_enabled(kind) or (enabled and dtype != torch.get_autocast_dtype(kind)):
                    stack.enter_context(torch.autocast(kind, dtype, enabled, self.autocast_cache))
            if self.saved_tensor_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_tensor_hooks))
            # Modes are pushed, not entered: __enter__ may begin a new measurement, as that of FlopCounterMode does.
            for function_mode in self.function_modes:
                overrides._push_mode(function_mode)  # as above
                stack.callback(overrides._pop_mode)  # as above
            for dispatch_mode in self.dispatch_modes:
                _python_dispatch._push_mode(dispatch_mode)  # as above
                stack.callback(_python_dispatch._pop_mode)  # as above
            yield


def _saved_tensor_hooks() -> Hooks | None:
    """Returns the hooks that torch applies: the last pair. Those of activation checkpointing around the call are left out.

    They recompute when a saved tensor is needed. The backwards of several devices would do so at the same time, and fail.
    """
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)  # the public block cannot be read
    return None if hooks is None or hooks[0].__module__ == "torch.utils.checkpoint" else hooks
