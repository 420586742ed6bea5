"""Memory of a training step: by the events of the CPU's allocator, and by the storages of all live tensors."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from allocator import AllocatorProfile
from models import Problem
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from balanced_parallel import Precision
from balanced_parallel.savings import checkpoint_activations


def run_step(
    module: Callable[..., Any], problem: Problem, optimizer: torch.optim.Optimizer, precision: str, device: str = "cpu"
) -> None:
    """Runs one update of the plain loop. The output and the loss are released as soon as possible."""
    inputs = problem.inputs if isinstance(problem.inputs, tuple) else (problem.inputs,)
    optimizer.zero_grad()
    with Precision(precision).autocast([torch.device(device)]):
        loss = problem.criterion(module(*inputs), problem.targets)
    loss.backward()
    del loss
    optimizer.step()


def copied(problem: Problem, checkpoint: bool = False) -> Problem:
    """Returns a copy of a problem, with its repeated blocks checkpointed if asked."""
    problem = copy.deepcopy(problem)
    if checkpoint:
        checkpoint_activations(problem.module)
    return problem


Prepare = Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]


def plain(module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns the module as it is, with AdamW."""
    return module, torch.optim.AdamW(module.parameters())


def allocator_peak(problem: Problem, precision: str = "fp32", checkpoint: bool = False, prepare: Prepare = plain) -> int:
    """Returns the peak of the second step by the CPU's allocator, scratch memory of operators included.

    Args:
        prepare: makes the module that is trained, and its optimizer.
    """
    gc.collect()  # a sharded module is in reference cycles
    profile = AllocatorProfile()
    with profile.recorded():
        problem = copied(problem, checkpoint)
        module, optimizer = prepare(problem.module)
        run_step(module, problem, optimizer, precision)
        gc.collect()
    profile.reset_peak()
    with profile.recorded():
        run_step(module, problem, optimizer, precision)
    return profile.peak


class LiveBytes(TorchDispatchMode):
    """A count of the bytes of ``tensors``, and of all tensors that operators return while it is active."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        for tensor in tensors:
            self._see(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # DTensor: its local tensor is dispatched again
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def __enter__(self) -> "LiveBytes":
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:  # how FSDP frees and allocates
            result = self._resize(storage, size)
            if storage._cdata in self._live:
                self._release(storage._cdata)
                self._allocate(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exception)

    def _see(self, tensor: Tensor) -> None:
        storage = local(tensor).untyped_storage()
        if storage._cdata not in self._live:
            self._allocate(storage)

    def _allocate(self, storage: Any) -> None:
        key = storage._cdata
        self._live[key] = weakref.ref(storage, lambda _: self._release(key)), storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _release(self, key: int) -> None:
        self.now -= self._live.pop(key)[1]


def local(tensor: Tensor) -> Tensor:
    """Returns the local part of a ``DTensor``, and other tensors as they are."""
    part: Any = tensor
    shard: Tensor = part.to_local() if hasattr(part, "to_local") else tensor
    return shard


def live_peak(problem: Problem, precision: str = "fp32", prepare: Prepare = plain) -> int:
    """Returns the maximum of the bytes of live tensors in the second step."""
    problem = copied(problem)
    module, optimizer = prepare(problem.module)
    inputs = problem.inputs if isinstance(problem.inputs, tuple) else (problem.inputs,)
    tensors = [*module.parameters(), *module.buffers(), *inputs, problem.targets]
    with LiveBytes(tensors) as count:
        run_step(module, problem, optimizer, precision)
        gc.collect()
        count.peak = count.now
        run_step(module, problem, optimizer, precision)
        return count.peak
