"""State that the forward of a training module advances whatever its rows: counters, temperatures,
the power iteration of spectral norm, and parameters that it writes itself, as of a momentum encoder.

The plain program has one forward in an update. With several micro-batches, each of them begins with
the state before the update, and that behind the first one stays::

    state 7 | forward 0 | state 8     state 7 | forward 1 | state 8     ...     state 8

Statistics of batch norm, and of modules with a ``SumOverRows``, are left out: those of each
micro-batch count.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..replicas.all_rows import sums_rows
from ..runtime.devices import NO_BLOCK, move
from ..runtime.module_state import (
    NUMBERS,
    StateEntries,
    advancing_buffers,
    are_close,
    is_of_torch,
)
from ..runtime.torch_private import (
    OnOperator,
    is_compiled,
    is_sharded,
    memory_of,
    versions,
    written_by,
)


class _Copy(NamedTuple):
    """A tensor with its values and its version before an update."""

    tensor: Tensor
    values: Tensor
    version: int


class ForwardState:
    """Buffers and numbers of modules, which advance once in an update of several forwards, and
    parameters that forwards write.

    It copies the tensors that a forward has written, and all buffers during the first forward.
    """

    def __init__(self, module: nn.Module, criterion: object) -> None:
        names = {}
        if isinstance(criterion, nn.Module):
            names = {part: name for name, part in criterion.named_modules(prefix="criterion")}
        names |= {part: name for name, part in module.named_modules()}
        # Classes of others may make state in a forward. Statistics over all rows are left out.
        self._parts = {
            part: name
            for part, name in names.items()
            if advancing_buffers(part) or not is_of_torch(part)
            if not sums_rows(part)
        }
        self.is_empty = not self._parts
        # Buffers by name, whose writes no version counter shows, as those by .data.
        self._unseen: set[str] | None = None
        self._module = module
        self._is_compiled = any(map(is_compiled, names))
        self._written: dict[str, Tensor] = {}  # The parameters that forwards write, by name.
        self._updates = 0
        self.reset()

    def reset(self) -> None:
        """Begins an update, which may have a single forward."""
        self.is_open = False
        self._entries: list[StateEntries] = []
        self._before: dict[str, _Copy] = {}  # The keys are names of tensors.
        self._after: dict[str, Tensor] | None = None
        self._differs: dict[str, Tensor] = {}  # Flags of the tensors, read at the end.

    def open(self) -> None:
        """Copies the state before the first forward of an update of several."""
        if self.is_open:
            return
        self.is_open = True
        # Tensors in attributes may be sums over the rows of all forwards, as those of a metric.
        self._entries = [StateEntries(part, NUMBERS) for part in self._parts]
        self._updates += 1
        self._before = {
            name: _Copy(tensor, tensor.detach().clone(), versions([tensor])[0])
            for name, tensor in self._tensors().items()
        }

    def _tensors(self) -> dict[str, Tensor]:
        buffers = {
            f"{module}.{name}".lstrip("."): buffer
            for part, module in self._parts.items()
            for name, buffer in advancing_buffers(part).items()
        }
        return buffers | self._written

    def begin_forward(self) -> AbstractContextManager[None]:
        """Puts the state back, but for the first forward. Returns a block for the forward."""
        if self._after is not None:
            self._put_back()
        elif self._updates.bit_count() == 1 and not self._is_compiled:
            return self._watching()
        return NO_BLOCK

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Surrounds the first forward of the 1st, 2nd, 4th, 8th, ... update, which shows the
        parameters that it writes.
        """
        before = {
            memory_of(parameter): (name, parameter, parameter.detach())
            for name, parameter in self._module.named_parameters()
            if not (is_sharded(parameter) or name in self._written)
        }

        def see(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
            if function is torch.ops.aten.embedding_renorm_.default:
                return  # Rows that are rescaled twice stay the same.
            for memory in before.keys() & map(memory_of, written_by(function, args, kwargs)):
                name, parameter, values = before.pop(memory)
                self._take_written(name, parameter, values.clone())

        with OnOperator(see):
            yield
        for memory, (name, parameter, values) in before.items():
            if memory_of(parameter) != memory:  # parameter.data = other
                self._take_written(name, parameter, values)

    def _take_written(self, name: str, parameter: Tensor, values: Tensor) -> None:
        self._written[name] = parameter
        self._before[name] = _Copy(parameter, values, 0)

    def _put_back(self) -> None:
        for entries in self._entries:
            entries.put()
        for each in self._before.values():
            each.tensor.detach().copy_(each.values)

    def end_forward(self) -> None:
        """Keeps the state behind the first forward with rows, and compares that of others with it."""
        if self._after is None:
            self._end_first()
            return
        present = self._tensors() if self._after else {}
        for name, after in self._after.items():
            tensor = present.get(name, after)
            if tensor.shape == after.shape:  # A cache may have another one.
                is_close = torch.isclose(move(tensor.detach(), after.device), after, equal_nan=True)
                is_other = ~is_close.all()
                self._differs[name] = is_other | self._differs.get(name, is_other)

    def _end_first(self) -> None:
        before = self._before
        if self._unseen is None:
            self._unseen = {
                name for name, each in before.items() if not are_close(each.tensor, each.values)
            }
        self._before = {
            name: each
            for name, each in before.items()
            if name in self._unseen
            or name in self._written
            or versions([each.tensor]) != [each.version]
        }
        self._entries = [each for each in self._entries if each.are_other()]
        self._last_entries = [StateEntries(each.part, NUMBERS) for each in self._entries]
        self._after = {
            name: tensor.detach().clone()
            for name, tensor in self._tensors().items()
            if name in self._before or name not in before or tensor is not before[name].tensor
        }

    def undo(self) -> None:
        """Puts back the state before an update of several forwards, which has failed."""
        self._put_back()
        self.reset()

    def finish(self) -> None:
        """Leaves the state behind the first forward. :meth:`undo` can still put it back.

        Raises ``RuntimeError`` if other micro-batches have left other values in a tensor.
        """
        if self._after is None:
            return
        for entries in self._last_entries:
            entries.put()
        for name, each in self._before.items():
            each.tensor.detach().copy_(self._after.get(name, each.tensor))
        for name, differs in self._differs.items():
            if differs:
                kind = "parameter" if name in self._written else "buffer"
                raise RuntimeError(
                    f"the {kind} {name} has other values after the forward of another micro-batch, expected values that do not "
                    "depend on the rows: write it once per update, after the step, or give micro_batch_size=None"
                )
