"""Bytes that a forward keeps for its backward, by the part of the module that keeps them. Fake tensors have shapes, no memory."""

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # torch has no public module of fake tensors
from torch.utils._python_dispatch import TorchDispatchMode  # torch has no public module of dispatch modes

from ..runtime import trees
from ..runtime.tensors import storage_id, versions
from .activation_checkpointing import Segment, runner
from .expensive_operators import is_expensive

__all__: list[str] = []

Part = tuple[nn.Module, Segment]
Function = Callable[..., Any]


class SavedBytes:
    """Storages that the graph of one forward keeps. Each counts once, whoever keeps it. Parameters and inputs do not count.

    Attributes:
        mutated: parts that write in place to an output of an expensive operator, which then cannot be kept.
    """

    def __init__(self) -> None:
        self.mutated: set[Part] = set()
        self._sizes: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []  # keeps their ids unique
        self._keepers: dict[int, set[Part | None]] = {}
        self._inputs: dict[Part, set[int]] = {}
        self._expensive: dict[Part, set[int]] = {}

    def keep(self, part: Part | None, tensor: Tensor) -> None:
        """Records a tensor that the graph keeps."""
        self._keepers.setdefault(self._note(tensor), set()).add(part)

    def enter(self, part: Part, arguments: Any) -> None:
        """Records the arguments of a part, which a checkpoint would keep."""
        self._inputs.setdefault(part, set()).update(
            self._note(leaf) for leaf in trees.leaves(arguments) if isinstance(leaf, Tensor)
        )

    def keep_expensive(self, part: Part, tensor: Tensor) -> None:
        """Records an output of an expensive operator, which a selective checkpoint would keep."""
        self._expensive.setdefault(part, set()).add(self._note(tensor))

    def forget(self, tensors: Collection[Tensor]) -> None:
        """Makes storages count as nothing."""
        for tensor in tensors:
            self._sizes[self._note(tensor)] = 0

    def total(self, recomputed: Mapping[Part, bool]) -> int:
        """Returns the bytes that stay.

        Args:
            recomputed: the parts to recompute, and for each if it is selective.
        """
        kept = {storage for storage, keepers in self._keepers.items() if keepers - recomputed.keys()}
        for part, selective in recomputed.items():
            kept |= self._inputs.get(part, set())
            if selective:
                kept |= self._expensive.get(part, set())
        return sum(self._sizes[storage] for storage in kept)

    def _note(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        identity = storage_id(storage)
        if identity not in self._sizes:
            self._sizes[identity] = storage.nbytes()
            self._storages.append(storage)
        return identity


class _Recorder(TorchDispatchMode):
    """Runs each part of a forward, and notes what it keeps."""

    def __init__(self, saved: SavedBytes) -> None:
        super().__init__()
        self._saved = saved
        self._part: Part | None = None
        self._outputs: list[Tensor] = []

    def run(self, module: nn.Module, segment: Segment, function: Function, args: Any, kwargs: Any) -> Any:
        """Runs one part. A part inside another one belongs to the outer one."""
        if self._part is not None:
            return function(*args, **kwargs)
        self._part = (module, segment)
        self._saved.enter(self._part, (args, kwargs))
        try:
            result = function(*args, **kwargs)
            if any(versions(self._outputs)):
                self._saved.mutated.add(self._part)
            return result
        finally:
            self._part = None
            self._outputs.clear()

    def pack(self, tensor: Tensor) -> Tensor:
        """Hook of saved tensors."""
        self._saved.keep(self._part, tensor)
        return tensor.detach()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **kwargs or {})
        if self._part is not None and is_expensive(operator, args, kwargs or {}):
            for tensor in trees.leaves(result):
                if isinstance(tensor, Tensor):
                    self._saved.keep_expensive(self._part, tensor)
                    self._outputs.append(tensor)
        return result


def measure_saved_bytes(module: nn.Module, inputs: Any) -> SavedBytes:
    """Runs a forward of fake tensors. The parts are those of :func:`checkpoint_module`.

    Raises:
        ValueError: the forward failed, for example because it reads values.
    """
    saved = SavedBytes()
    recorder = _Recorder(saved)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state = {name: _fake(tensor, mode) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    batch = trees.map_tensors(lambda tensor: _fake(tensor, mode), inputs)
    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch if isinstance(batch, tuple) else (batch,), {})
    saved.forget([*state.values(), *(leaf for leaf in trees.leaves(batch) if isinstance(leaf, Tensor))])
    token = runner.set(recorder.run)
    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor)
        with warnings.catch_warnings(action="ignore"), mode, recorder, torch.enable_grad(), hooks:
            torch.func.functional_call(module, state, args, dict(kwargs))
    except Exception as error:
        raise ValueError(
            f"the bytes of a forward of {type(module).__name__} cannot be counted without its values, so budget cannot be used: "
            f"choose blocks by name. The error was {type(error).__name__}: {error}"
        ) from error
    finally:
        runner.reset(token)
    return saved


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Any:
    """Returns a tensor of the same shape without memory."""
    with mode, torch.no_grad():
        if tensor.layout == torch.strided:
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        else:
            made = torch.empty(tensor.size(), dtype=tensor.dtype, device=tensor.device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
