"""Numbers of Python that a shard may have of its own: values that are read, and lengths of rows."""

import numbers
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from . import columns
from .facts import NAMES, OF_SUMS, Facts, FunctionCall
from .rules import RULES, reduction_in

# Values of a tensor, as Python objects.
_READS = {"item", "int", "float", "index", "tolist", "numpy", "array"}
_ARITHMETIC = {"add", "sub", "rsub", "mul", "div", "pow"}
# Means over elements. That of class indices leaves out padding.
_MEANS = {each.__name__ for each, rule in RULES.items() if rule is not RULES[F.cross_entropy]}
_MEANS |= columns.MEANS


def lengths_of(shapes: Iterable[torch.Size], rows: int) -> list[float | None]:
    """Returns the elements of a row in each tensor of these shapes, None without rows."""
    return [shape.numel() / rows if rows and rows in shape else None for shape in shapes]


class ShardNumbers:
    """Numbers that operations of a shard may have, and those of its lengths."""

    def __init__(self) -> None:
        self.are_sizes = True  # No value of the batch is a Python number.
        self.has_read = False  # Some are, or the loss is.
        self.operands: list[float] = []  # The numbers in operations since then.
        self.has_loop = False  # Rows are computed one by one.
        self._shapes: list[torch.Size] = []
        self._has_asked = False  # Python has asked whether a value is true.
        self._averaged: list[float] = []  # The numbers of elements in means of a row, and divisors.
        self._of_rows: dict[int, list[float]] = {}  # The same in a loop over rows, by row.

    def begin(self, shapes: Iterable[torch.Size], *, has_lists: bool) -> None:
        """Begins a batch, whose lists may have an entry for each row. ``shapes`` are its tensors'."""
        self._shapes += shapes
        self.are_sizes &= not has_lists

    def lengths(self, rows: int) -> list[float | None]:
        """Returns the elements of a row in each tensor of the batch, or none if numbers are values."""
        return lengths_of(self._shapes, rows) if self.are_sizes else []

    @property
    def may_have_read(self) -> bool:
        """True if numbers may be values of the batch."""
        return self.has_read or self._has_asked or not self.are_sizes

    def note_arguments(self, name: str, args: Sequence[object]) -> None:
        """Notes the numbers of an operation that may be values of the rows."""
        if self.may_have_read and NAMES.get(name, name) in _ARITHMETIC:
            self.operands += [float(each) for each in args if isinstance(each, numbers.Real)]

    def note_read(self, call: FunctionCall, result: object, facts: Sequence[Facts]) -> None:
        """Notes a number that may be a value of the batch. ``facts`` are those of the tensors."""
        if type(result) in (int, torch.Size):
            self.are_sizes &= not any(each.is_selected for each in facts)
        if call.name == "bool":
            self._has_asked = self._has_asked or bool(call.level)
            self.are_sizes &= facts[0].row is None  # A loop may count rows by their truth.
        if call.name in _READS and facts:
            first = facts[0]
            self.has_read = self.has_read or bool(first.level)
            is_count = first.is_target or first.form.kind in ("sum", "bounded")
            # A loss may be read to print it.
            self.are_sizes &= not first.level or (first.level == OF_SUMS and not is_count)

    def note_row(self, call: FunctionCall, result: Tensor, row: int | None) -> None:
        """Notes the number that rows are divided by, or the elements in the mean of one of them."""
        averaged = self._averaged if row is None else self._of_rows.setdefault(row, [])
        self.has_loop = self.has_loop or row is not None
        if row is not None and call.name in _MEANS and reduction_in(call.kwargs) == "mean":
            averaged.append(_elements(call, result))
        if call.name == "div" and isinstance(call.values[-1], (int, float)):
            averaged.append(call.values[-1])

    def note_mean(self, call: FunctionCall, result: Tensor) -> None:
        """Notes the elements in the mean of each row."""
        if call.name in columns.MEANS:
            self._averaged.append(_elements(call, result))

    def averaged(self) -> list[float]:
        """Returns the numbers that rows are divided by. Rows of a loop may have their own lengths."""
        equal = [each[0] for each in zip(*self._of_rows.values(), strict=False) if len({*each}) < 2]
        return self._averaged + equal


def _elements(call: FunctionCall, result: Tensor) -> int:
    return call.tensors[0].numel() // max(result.numel(), 1)
