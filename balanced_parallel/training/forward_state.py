"""State that the forward of a training module advances whatever its rows: counters, temperatures,
the power iteration of spectral norm, and parameters that it writes itself, as of a momentum encoder.

The plain program has one forward in an update. With several micro-batches, each of them begins with
the state before the update, and that behind the first one stays::

    state 7 | forward 0 | state 8     state 7 | forward 1 | state 8     ...     state 8

Statistics of batch norm, and of modules with a ``SumOverRows``, are left out: those of each
micro-batch count.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..replicas.all_rows import sums_rows
from ..runtime.devices import move
from ..runtime.module_state import advancing_buffers, are_close, is_of_torch, numbers_of
from ..runtime.torch_private import (
    buffers_of,
    is_compiled,
    is_sharded,
    memory_of,
    parameters_of,
    versions,
    written_by,
)


class _OnWrite(TorchDispatchMode):
    """Calls a function with the tensors that an operator will write to."""

    supports_higher_order_operators = True

    def __init__(self, write: Callable[[list[Tensor]], None]) -> None:
        super().__init__()
        self._write = write

    def __torch_dispatch__(
        self, function: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        """Runs an operator. Rows of an embedding that are rescaled twice stay the same."""
        kwargs = kwargs or {}
        if function is not torch.ops.aten.embedding_renorm_.default:
            self._write(written_by(function, args, kwargs))
        return function(*args, **kwargs)


class _Slot(NamedTuple):
    """A buffer, a parameter or a number of a module, as it was before the update."""

    module: str
    entries: dict[str, Any]
    name: str
    value: object
    copy: Any
    version: int

    def is_advanced(self) -> bool:
        """Returns True if a forward has written it. A cache that grows is another one."""
        present = self.entries.get(self.name)
        if not isinstance(self.value, Tensor):
            return present is not self.value
        if present is self.value:
            return versions([present]) != [self.version]
        return isinstance(present, Tensor) and present.shape == self.value.shape

    def put(self, copy: Any) -> None:
        """Writes a copy to the tensor of before the update, or sets another value."""
        if isinstance(self.value, Tensor):
            copy = self.value.copy_(copy)
        self.entries[self.name] = copy
        if copy is _ABSENT:
            del self.entries[self.name]


_ABSENT = object()  # A forward has made the entry.


class ForwardState:
    """Buffers and numbers of modules, which advance once in an update of several forwards.

    It copies the buffers that a forward has written, and all of them during the first forward.
    """

    def __init__(self, *modules: object) -> None:
        roots = [module for module in modules if isinstance(module, nn.Module)]
        names = {part: name for root in roots for name, part in root.named_modules()}
        # Classes of others may make state in a forward.
        self._names = {
            part: name
            for part, name in names.items()
            if advancing_buffers(part) or not is_of_torch(type(part))  # type: ignore[arg-type]
        }
        self.is_empty = not self._names
        # Buffers of a module by names, whose writes no version counter shows, as those by .data.
        self._unseen: set[tuple[str, str]] | None = None
        self._parts = {} if any(map(is_compiled, names)) else names
        self._written: dict[nn.Module, list[str]] = {}  # The parameters that a forward writes.
        self._updates = 0
        self.reset()

    @functools.cached_property
    def _summing(self) -> set[str]:
        """Modules with statistics over all rows, by name."""
        return {name for part, name in self._names.items() if sums_rows(part)}

    def reset(self) -> None:
        """Begins an update, which may have a single forward."""
        self.is_open = False
        self._slots: list[_Slot] = []
        # All entries before the update, by the id of their dictionary.
        self._before: dict[int, dict[str, Any]] = {}
        self._after: list[object] | None = None
        self._differs: dict[str, Tensor] = {}  # Flags of the buffers, read at the end.

    def open(self) -> None:
        """Copies the state before the first forward of an update of several."""
        if self.is_open:
            return
        self.is_open = True
        self._updates += 1
        self._slots = [slot._replace(copy=_copy(slot.value)) for slot in self._present()]
        for part in self._names:
            for entries in (buffers_of(part), vars(part)):
                self._before[id(entries)] = entries.copy()

    def _present(self) -> Iterator[_Slot]:
        """Yields the state as it is now."""
        for part, module in self._names.items():
            for name, tensor in advancing_buffers(part).items():
                version = versions([tensor])[0]
                yield _Slot(module, buffers_of(part), name, tensor, tensor, version)
            for name, number in numbers_of(part).items():
                yield _Slot(module, vars(part), name, number, number, 0)
        for part, written in self._written.items():
            for name in written:
                yield self._slot_of(part, name, parameters_of(part)[name])

    def _slot_of(self, part: nn.Module, name: str, parameter: Any) -> _Slot:
        """Returns the slot of a parameter."""
        version = versions([parameter])[0]
        return _Slot(self._parts[part], parameters_of(part), name, parameter, parameter, version)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Surrounds a forward.

        The first one of the 1st, 2nd, 4th, 8th, ... update shows the parameters that it writes.
        """
        if self._after is not None or self._updates.bit_count() > 1 or not self._parts:
            yield
            return
        before = {
            memory_of(parameter): (part, name, parameter, parameter.detach())
            for part in self._parts
            for name, parameter in parameters_of(part).items()
            if not (parameter is None or is_sharded(parameter))
            and name not in self._written.get(part, ())
        }

        def take(memory: int, copy: Tensor) -> None:
            part, name, parameter, _ = before.pop(memory)
            self._slots.append(self._slot_of(part, name, parameter)._replace(copy=copy))
            self._written.setdefault(part, []).append(name)

        def write(tensors: list[Tensor]) -> None:
            for memory in {*map(memory_of, tensors)} & before.keys():
                take(memory, before[memory][-1].clone())

        with _OnWrite(write):
            yield
        for memory, (_, _, parameter, values) in [*before.items()]:
            if memory_of(parameter) != memory:  # parameter.data = other
                take(memory, values)

    @torch.no_grad()
    def begin_forward(self) -> None:
        """Puts the state back, but for the first forward."""
        if self._after is not None:
            for slot in self._slots:
                slot.put(slot.copy)

    @torch.no_grad()
    def end_forward(self) -> None:
        """Keeps the state behind the first forward with rows, and compares that of others with it."""
        if self._after is None:
            if self._unseen is None:
                self._unseen = {
                    (slot.module, slot.name)
                    for slot in self._slots
                    if isinstance(slot.value, Tensor) and not are_close(slot.value, slot.copy)
                }
            places = {(id(slot.entries), slot.name) for slot in self._slots}
            for slot in self._present():
                if (id(slot.entries), slot.name) not in places:
                    before = self._before[id(slot.entries)].get(slot.name, _ABSENT)
                    self._slots.append(slot._replace(value=_ABSENT, copy=before))
            advanced = [
                slot
                for slot in self._slots
                if slot.is_advanced()
                or isinstance(slot.value, nn.Parameter)
                or (slot.module, slot.name) in self._unseen
            ]
            self._slots = [slot for slot in advanced if slot.module not in self._summing]
            self._after = [_copy(slot.entries[slot.name]) for slot in self._slots]
            return
        for slot, after in zip(self._slots, self._after, strict=True):
            present: Any = slot.entries.get(slot.name)
            # A cache may have another size.
            if isinstance(after, Tensor) and getattr(present, "shape", None) == after.shape:
                is_close = torch.isclose(move(present, after.device), after, equal_nan=True)
                kind = "parameter" if isinstance(slot.value, nn.Parameter) else "buffer"
                place = f"{kind} {slot.module}.{slot.name}".replace(" .", " ")
                is_other = ~is_close.all()
                self._differs[place] = is_other | self._differs.get(place, is_other)

    @torch.no_grad()
    def undo(self) -> None:
        """Puts back the state before an update of several forwards, which has failed."""
        for slot in self._slots:
            slot.put(slot.copy)
        self.reset()

    @torch.no_grad()
    def finish(self) -> None:
        """Leaves the state behind the first forward. :meth:`undo` can still put it back.

        Raises ``RuntimeError`` if other micro-batches have left other values in a tensor.
        """
        if self._after is None:
            return
        for slot, after in zip(self._slots, self._after, strict=True):
            slot.put(after)
        for name, differs in self._differs.items():
            if differs:
                raise RuntimeError(
                    f"the {name} has other values after the forward of another micro-batch, expected values that do not depend "
                    "on the rows: write it once per update, after the step, or give micro_batch_size=None"
                )


def _copy(value: object) -> object:
    return value.detach().clone() if isinstance(value, Tensor) else value
