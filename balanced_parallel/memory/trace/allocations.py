"""A record of every allocation and every release during a step on fake tensors, in order."""

import functools
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor  # torch has no public module of fake tensors
from torch.utils._python_dispatch import TorchDispatchMode  # documented, but in a private module
from torch.utils.flop_counter import flop_registry

from ...runtime.torch_private import is_sharded
from ...strategies.tracing import SideStreams
from ..devices import DeviceKind
from ..operators import (
    FLOPS,
    IN_PLACE,
    MATRIX_PRODUCTS,
    SELECTIONS,
    SPECIAL,
    UNLIMITED,
    Workspace,
    answer,
    is_in_place,
    keep_elements,
    workspaces,
)
from .private import current_node, next_number, number_of, shared_id, storage_id, tensors_of
from .results import run_once
from .values import Values

_TORCH = f"{torch.__path__[0]}/"
_MEMORY = f"{Path(__file__).parents[1]}/"
PACKAGE = f"{Path(__file__).parents[2]}/"
_TRACER = str(Path(__file__).with_name("tracer.py"))
_OPTIMIZERS = (f"{_TORCH}optim", f"{_TORCH}amp")
_STANDARD_LIBRARY = f"{Path(traceback.__file__).parent}/"


_beside: ContextVar[bool] = ContextVar("beside", default=False)


class TracedSides(SideStreams):
    """The side streams of fake devices, which have none. Memory that is allocated there is theirs."""

    @contextmanager
    def entered(self, computing: Any, uses: Sequence[object]) -> Iterator[None]:
        """Runs the block as on the side streams."""
        token = _beside.set(True)
        try:
            with super().entered(computing, uses):
                yield
        finally:
            _beside.reset(token)


class Block(NamedTuple):
    """The memory of one storage: device, bytes, purpose, and the operator, module and line that
    allocated it.
    """

    device: str
    size: int
    kind: str
    operator: str
    module: str
    line: str
    stream: int = 0  # 1 for a side stream: only that stream reuses the memory
    least: int = 0  # there is no block of so few bytes
    most: int = UNLIMITED  # bytes for any number of rows
    is_output: bool = False  # a loop may keep it until the next forward


class Trace(NamedTuple):
    """The events of two updates as in :class:`Count`.

    The second begins at ``marks["second"]``, and has ``flops`` operations.
    """

    rows: int
    blocks: list[Block]
    events: list[int]
    marks: dict[str, int]
    flops: int


def ordered(events: list[int]) -> list[int]:
    """Sorts the releases between two allocations. Their order varies with memory addresses."""
    numbers = np.array(events, dtype=np.int64)
    runs = np.cumsum(np.diff(numbers > 0, prepend=False))
    return list(numbers[np.lexsort((np.abs(numbers), runs))].tolist())


_DEVICE = torch.ops.prim.device.default
_COMMUNICATES = ("fsdp", "c10d", "_c10d_functional")


@functools.cache
def _facts_of(func: Any) -> tuple[str, str, Any, bool]:
    """Returns the name of an operator, the kind of its results, the function that counts its
    operations, and whether ``operators.py`` has a rule for it.
    """
    kind = "communication buckets" if func.namespace in _COMMUNICATES else "temporaries"
    formula = FLOPS.get(func) or flop_registry.get(func._overloadpacket)
    return str(func), kind, formula, func in SPECIAL


class Count(TorchDispatchMode):
    """Records allocations and releases of storages, real or fake, while it is active.

    It is entered after the fake mode.

    Events are numbers of blocks, counted from 1: positive for an allocation, negative for a
    release.
    """

    def __init__(self, names: dict[int, str], kind: DeviceKind, scalar: float | None) -> None:
        super().__init__()
        self.kind = kind
        # The threads of forward and backward have a handle on each device.
        self._handles = set[tuple[str, bool]]()
        # Every read of a tensor's value in the model returns it. None makes it an error.
        self.scalar = scalar
        self.names = names  # Keys are the shared_id of modules.
        self.blocks: list[Block] = []
        self.events: list[int] = []
        self.marks: dict[str, int] = {}
        self.flops = 0
        self.values = Values()
        self.assumed = ""  # The assumption about the last operator that selects by values.
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._node: int | None = None  # The node that runs in a backward.
        # The module and the line that made each node, by its number: those of the first operator
        # that finds it, since others may have no node.
        self._places: dict[int, tuple[str, str]] = {}
        self._here: tuple[str, str] | None = None  # the place of the operator that runs
        self._older = 0  # The number of blocks before it.
        # A block, and the place of its release among the events.
        self._reused: tuple[int, int] | None = None
        self._is_paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leaves out a wrapper of torch around each operator: nothing is compiled in a trace."""
        return False

    def paused(self) -> AbstractContextManager[object]:
        """Records nothing in the block. Tensors that outlive it must be seen afterwards."""
        return patch.object(self, "_is_paused", True)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is _DEVICE:  # Every access to .device is one, two thirds of all calls.
            fake = args[0]
            if type(fake) is FakeTensor and not fake.fake_mode.in_kernel_invocation:
                return fake.fake_device  # The result of the fake mode, without its dispatch.
        if any(map(is_sharded, types)):
            return NotImplemented  # The local tensor is dispatched again.
        if self._is_paused or func is _DEVICE:
            return run_once(func, args, kwargs)
        node = current_node()
        number = None if node is None else number_of(node)
        if number != self._node:
            self._node, self._older = number, len(self.blocks)
        self._reused = None
        self._keep_place()
        name, kind, formula, is_special = _facts_of(func)
        run = self._run if is_special else run_once
        result = self.values.follow(func, args, kwargs, run)
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=result))
        self.see_all(tensors_of(result), kind, name)
        if is_special:
            if func in IN_PLACE and isinstance(result, Tensor):
                self._reuse(func, args[0], result)
            self._take_for_operator(func, args, result)
        self._here = None
        return result

    def _keep_place(self) -> None:
        """Keeps the module and the line of the node that an operator has made before it runs."""
        number = next_number() - 1
        if torch.is_grad_enabled() and number not in self._places:
            self._here = self._places[number] = _where(self.names)

    def _place(self) -> tuple[str, str]:
        """Returns the module and the line that run, or those whose backward does."""
        module, line = self._here or _where(self.names)
        node = current_node()
        if node is None or module:
            return module, line
        module, forward = self._places.get(number_of(node), ("", ""))
        return module, line or (f"backward of {forward}" if forward else f"backward: {node.name()}")

    def _take_for_operator(self, func: object, args: tuple[Any, ...], result: object) -> None:
        """Records memory that an operator takes for itself, and releases before it returns.

        A handle's stays.
        """
        handle = func in MATRIX_PRODUCTS and (str(args[0].device), current_node() is not None)
        if handle and handle not in self._handles:
            self._handles.add(handle)
            self._take(func, args, Workspace(self.kind.workspace, "workspace"))
        first = len(self.blocks)
        for workspace in workspaces(func, args, result, self.kind.is_gpu):
            self._take(func, args, workspace)
        self.events += range(-first - 1, -len(self.blocks) - 1, -1)

    def _take(self, func: object, args: tuple[Any, ...], workspace: Workspace) -> None:
        """Records a block of an operator."""
        if workspace.size:
            facts = str(args[0].device), workspace.size, workspace.kind, str(func), *self._place()
            self.blocks.append(Block(*facts, least=workspace.least, most=workspace.most))
            self.events.append(len(self.blocks))

    def _run(
        self,
        func: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        result = answer(func, args, kwargs, self.scalar, _user_line)
        if result is NotImplemented:
            result = run_once(func, args, kwargs)
            keep_elements(func, args, result)
        elif func in SELECTIONS:
            shape = tuple(tensors_of(result)[0].shape)
            self.assumed = (
                f"{_user_line()} was assumed to select all ({func}), in the shape {shape}"
            )
        return result

    def see(self, tensor: Tensor, kind: str, operator: str = "") -> None:
        """Records the storage of a tensor once.

        A known storage only changes its kind, unless ``kind`` is ``"temporaries"``.
        """
        for storage in _storages(tensor):
            entry = self._live.get(storage_id(storage))
            if entry is None:
                facts = str(tensor.device), storage.nbytes(), kind, operator, *self._place()
                self._allocate(storage, Block(*facts, int(_beside.get())))
            elif kind != "temporaries":
                self._change(entry[1], kind=kind)

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Records another size of a storage."""
        if (key := storage_id(storage)) in self._live:
            block = self.blocks[self._live[key][1] - 1]
            self._release(key)
            self._allocate(
                storage,
                block._replace(
                    size=storage.nbytes(),
                    kind="communication buckets",
                    stream=int(_beside.get()),
                ),
            )

    def see_all(self, tensors: Iterable[object], kind: str, operator: str = "") -> None:
        """Records each tensor among ``tensors``."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self.see(tensor, kind, operator)

    def move(self, tensor: Tensor, device: torch.device) -> None:
        """Moves a recorded tensor to a device that fake tensors cannot be on."""
        for storage in _storages(tensor):
            self._change(self._live[storage_id(storage)][1], device=str(device))

    def turn(self, before: str, after: str) -> None:
        """Relabels every live allocation of kind ``before`` as ``after``."""
        for _, number in self._live.values():
            if self.blocks[number - 1].kind == before:
                self._change(number, kind=after)

    def mark_outputs(self, tensors: Iterable[object]) -> None:
        """Marks the memory of the tensors among ``tensors`` as that of outputs."""
        for tensor in tensors:
            for storage in _storages(tensor) if isinstance(tensor, Tensor) else []:
                if (entry := self._live.get(storage_id(storage))) is not None:
                    self._change(entry[1], is_output=True)

    def mark(self, name: str) -> None:
        """Names the next event. Operations are counted from the beginning of an update on."""
        self.marks.pop(name, None)  # Marks are in the order of their events.
        self.marks[name] = len(self.events)
        if name in ("first", "second"):
            self.flops = 0

    def _reuse(self, func: object, argument: Tensor, result: Tensor) -> None:
        """Takes the memory of ``argument`` for ``result`` if it is released before the next
        operator: not that of a view.
        """
        if (
            argument._is_view()
            or argument.layout != torch.strided
            or result.layout != torch.strided
        ):
            return
        old = self._live.get(storage_id(argument.untyped_storage()), (None, 0))[1]
        place = len(self.events) - 1
        has_result = (
            self.events[place] == len(self.blocks)
            and self.blocks[old - 1].size == self.blocks[-1].size
        )
        if has_result and is_in_place(func, is_of_node=old > self._older):
            self._reused = old, place

    def _change(self, number: int, **changes: Any) -> None:
        """Changes the device or the kind of a block."""
        self.blocks[number - 1] = self.blocks[number - 1]._replace(**changes)

    def _allocate(self, storage: torch.UntypedStorage, block: Block) -> None:
        key = storage_id(storage)
        self.blocks.append(block)
        self.events.append(len(self.blocks))
        self._live[key] = (weakref.ref(storage, lambda _: self._release(key)), len(self.blocks))

    def _release(self, key: int) -> None:
        _, number = self._live.pop(key)
        reused, place = self._reused or (None, 0)
        self.events.insert(place if reused == number else len(self.events), -number)


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    if type(tensor) is FakeTensor and tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    if is_sharded(tensor):
        parts = [tensor._local_tensor]
    elif tensor.layout == torch.sparse_coo:
        # indices() and values() refuse tensors that are not coalesced
        parts = [tensor._indices(), tensor._values()]
    elif hasattr(tensor, "__tensor_flatten__"):  # a wrapper, such as torchao's 8-bit states
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    else:
        return [tensor.untyped_storage()]
    return [storage for part in parts for storage in _storages(part)]


def _where(names: dict[int, str]) -> tuple[str, str]:
    """Returns the innermost running module and the innermost line of the user.

    The line is one of another library if no line of the user runs. Both are empty outside of the
    module, the criterion and the optimizer.
    """
    module = ""
    frames = dict[str, FrameType]()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _TRACER or (module and "user" in frames):
            break
        frames.setdefault(_owner(code.co_filename), frame)
        if not module:  # The key is that of the module whose forward this is, or of the function.
            part = frame.f_locals.get("self") if code.co_name == "forward" else None
            module = names.get(shared_id(part) if isinstance(part, nn.Module) else id(code), "")
        frame = frame.f_back
    innermost = frames.get("user") or frames.get("library")
    # The number of a line takes long to find.
    line = f"{innermost.f_code.co_filename}:{innermost.f_lineno}" if innermost else ""
    return module, line


@functools.cache
def _owner(name: str) -> str:
    """Returns whose file this is: a user's, a library's or a runner's, in which code of others runs."""
    if name.startswith((PACKAGE, _TORCH, "<")):
        return "runner"
    if "-packages/" in name:
        return "library"
    return "runner" if name.startswith(_STANDARD_LIBRARY) else "user"


def _user_line() -> str:
    """Returns the line of the model or the criterion that reads a value; empty if an optimizer or
    this package does.
    """
    line = ""
    for frame, number in traceback.walk_stack(sys._getframe(2)):
        name = frame.f_code.co_filename
        if name.startswith(_OPTIMIZERS):
            return ""  # Optimizers of other packages are among them: torch wraps their step().
        if not line and not name.startswith(_MEMORY):
            if name.startswith(PACKAGE):
                return ""
            if _owner(name) != "runner":
                line = f"{name}:{number}"
    return line
