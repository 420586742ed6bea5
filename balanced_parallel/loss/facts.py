"""Facts about the tensors that a criterion or a model computes: what each depends on.

::

    nothing    targets and buffers that are the same for all shards
    sums       (o - t).square().sum()
    rows       o, (o - t).square()
    both       o - o.mean(): it is no function of sums, and its sum is none over the rows

A function of torch has the highest level of its arguments. One of sums and rows has both.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from ..batch import containers
from ..runtime.torch_private import base_of, is_same, memory_of_plain
from . import columns
from .formula import (
    CONSTANT,
    CONVERSIONS,
    OTHER,
    ZERO,
    Constant,
    Form,
    Value,
    flatten,
    shorten,
)

OF_NOTHING, OF_SUMS, OF_ROWS, OF_BOTH = range(4)
# Names of one operation, without underscores.
NAMES = {
    "radd": "add",
    "iadd": "add",
    "rmul": "mul",
    "imul": "mul",
    "multiply": "mul",
    "isub": "sub",
    "subtract": "sub",
    "truediv": "div",
    "itruediv": "div",
    "true_divide": "div",
    "divide": "div",
    "negative": "neg",
}
# The size of the result depends on values.
SELECTIONS = {"nonzero", "argwhere", "masked_select", "unique", "bincount", "pack_padded_sequence"}
_JOINS = {"stack", "cat", "concat", "concatenate", "hstack", "vstack"}
_PRODUCTS = columns.PRODUCTS | {"dot", "vdot", "inner", "tensordot"}
SUMS = _PRODUCTS | columns.SCATTERS | {"sum", "nansum", "count_nonzero", "trace"}
NORMS = {"norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "dist"}
TOTALS = SUMS | NORMS | columns.MEANS
NEW = {"new_zeros", "new_tensor", "new_full", "new_ones"}
_LIKE = {"zeros_like", "ones_like", "full_like"}
_NUMBERS = {"tensor", "new_tensor", "as_tensor", "scalar_tensor"}
_SIZED = {"zeros", "ones", "full", "arange", "linspace"}
_CREATIONS = _SIZED | {"tensor", "as_tensor", "scalar_tensor"}
_WRITES = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"}


class Facts(NamedTuple):
    """Facts about a tensor."""

    level: int
    number: int | None = None  # the place in the formula
    form: Form = OTHER
    divided: tuple[int, float] | None = None  # The place of a sum, and the number that divided it.
    is_target: bool = False  # It does not depend on the outputs.
    is_selected: bool = False  # The size depends on values.
    dim: int | None = None  # The rows are along it, or along none if it is -1. None is unknown.
    is_row: bool = False  # It is computed of the only row, without its dimension.
    row: int | None = None  # It is computed of this row alone, as in a loop over rows.
    # It is a function of sums of columns, and rows if it is computed with other rows.
    is_column: bool = False
    # It was computed without a graph. An autograd function may have given it a derivative.
    is_inside: bool = False
    is_sized: bool = False  # A constant, which may have an element for each row.
    original: "Facts | None" = None  # The facts about the tensor that it copies.
    text: str = "a tensor"  # "a tensor", or how a constant was made


UNKNOWN = Facts(OF_ROWS)
FIXED = Facts(OF_NOTHING, form=CONSTANT, is_target=True)


class FunctionCall(NamedTuple):
    """A call of a function of torch."""

    name: str
    values: Sequence[Any]  # All arguments.
    kwargs: dict[str, Any]
    tensors: Sequence[Tensor]  # The result depends on these.
    level: int
    writes: bool

    @property
    def args(self) -> Sequence[Any]:
        """The positional arguments."""
        return self.values[: len(self.values) - len(self.kwargs)]


class FactsOfTensors:
    """Facts about the tensors of a shard, while they live.

    Args:
        numbers: the places in the formula that are free.
    """

    def __init__(self, numbers: Iterator[int]) -> None:
        self.rows: int | None = None
        self.outside: dict[int, Tensor] = {}  # Parameters that the criterion does not have itself.
        self._has_columns = True
        self._is_blind = False
        self._has_graph = True
        self._numbers = numbers
        self._by_tensor = WeakIdKeyDictionary()
        self._by_memory: dict[int | None, list[WeakIdRef]] = {}
        self._ids: set[int] = set()  # They tell fast that a tensor is unknown.

    def begin(self, rows: int | None, *, is_blind: bool, has_columns: bool) -> None:
        """Begins a batch.

        With ``is_blind``, tensors without a graph may have one in the next pass. With
        ``has_columns``, values of the batch have the rows in the first dimension.
        """
        self.rows = rows
        self._is_blind = is_blind
        self._has_columns = has_columns

    def begin_block(self) -> None:
        """Begins a block, which may have a graph."""
        self._has_graph = torch.is_grad_enabled()

    @property
    def is_inside(self) -> bool:
        """True in a block without a graph, such as the forward of an autograd function."""
        return torch.is_grad_enabled() != self._has_graph

    def learns(self, value: Any, *, may_learn: bool) -> bool:
        """Returns True for a tensor that has a gradient. With ``may_learn``, it may be unseen."""
        is_unseen = may_learn and (self._is_blind or not self._has_graph)
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return is_float and (value.requires_grad or is_unseen)

    def get(self, tensor: Tensor) -> Facts | None:
        """Returns the facts that are kept about a tensor.

        An unknown one may have the id of one that is gone.
        """
        return self._by_tensor.get(tensor) if id(tensor) in self._ids else None

    def of(self, value: object) -> Facts:
        """Returns what is known of a value."""
        if not isinstance(value, Tensor):
            return FIXED
        facts = self.get(value)
        if facts is None and isinstance(value, nn.Parameter):
            facts = self.capture(value)
        if facts is None:
            return UNKNOWN
        has_graph = facts.is_inside and value.requires_grad
        if has_graph and facts.level == OF_NOTHING:
            return self.capture(value)
        if has_graph and facts.level == OF_SUMS:
            return facts.original if facts.original and is_same(value) else Facts(OF_BOTH)
        return facts

    def form(self, value: object) -> Form:
        """Returns a value as a linear combination of sums."""
        if isinstance(value, (int, float)) and not value:
            return ZERO
        return self.of(value).form

    def capture(self, parameter: Tensor) -> Facts:
        """Gives a place to a parameter that the criterion does not have itself."""
        number = next(self._numbers)
        self.outside[number] = parameter
        return self.tell(parameter, FIXED._replace(number=number))

    def tell(self, tensor: Tensor, facts: Facts) -> Facts:
        """Keeps the facts about a tensor. Returns them."""
        if self.get(tensor) is None:
            # PyObject_ClearWeakRefs of CPython 3.11 crashes without a callback, where many are freed.
            self._by_memory.setdefault(memory_of_plain(tensor), []).append(WeakIdRef(tensor, id))
        self._ids.add(id(tensor))
        self._by_tensor[tensor] = facts
        return facts

    def learn(self, result: Tensor, facts: Facts) -> None:
        """Keeps the facts about a result, if they are not those of an unknown one."""
        if facts == UNKNOWN:
            self._by_tensor.pop(result, None)
        else:
            self.tell(result, facts._replace(is_inside=self.is_inside))

    def place(self, tensor: Tensor) -> Value | Constant:
        """Returns the place of a tensor, or a copy of a constant, which may be written to."""
        facts = self.of(tensor)
        if facts.number is not None:
            return Value(facts.number)
        text = facts.text
        if facts.is_sized and tensor.is_cpu and tensor.numel() < 100:
            text = shorten(f"{text} {tensor.tolist()}")  # Writes by .data or numpy are not seen.
        return Constant(tensor.detach().clone(), text)

    def replace(self, before: Tensor, output: Tensor) -> None:
        """Takes the facts about a tensor for those about another one."""
        facts = self.get(before)
        if facts is not None:
            self.tell(output, facts)

    def sharing(self, written: Tensor, level: int) -> list[Tensor]:
        """Returns the tensors in the memory of one that a function of a level writes to."""
        if level == OF_NOTHING:  # Buffers of a criterion share memory.
            return []
        references = self._by_memory.get(memory_of_plain(written), ())
        others = [tensor for each in references if (tensor := each()) is not None]
        return [each for each in others if _share_memory(each, written)]

    def forget(self, written: Tensor, level: int) -> None:
        """Makes other tensors unknown that are in the memory of one that is written to."""
        unknown = UNKNOWN if level == OF_ROWS else Facts(OF_BOTH)
        for tensor in {base_of(written), *self.sharing(written, level)} - {written}:
            # Sums are scalars, so a write of rows leaves larger tensors as they are.
            if (level != OF_ROWS or tensor.numel() == 1) and _share_memory(tensor, written):
                self.learn(tensor, unknown)

    def describe(self, func: Any, args: Any, kwargs: Any) -> FunctionCall:
        """Returns a call of a function of torch with what it depends on."""
        whole_name = str(getattr(func.__self__ if is_getter(func) else func, "__name__", ""))
        name = NAMES.get(whole_name.strip("_"), whole_name.strip("_"))
        values = (*args, *kwargs.values())
        tensors = [part for part in flatten(values) if isinstance(part, Tensor)]
        if name in CONVERSIONS and args and isinstance(args[0], Tensor):
            tensors = tensors[:1]
        facts = [*map(self.of, tensors)]
        level = _level_of(name, facts)
        if level == OF_ROWS and _lacks_graph(tensors, facts):
            level = OF_BOTH
        if func is torch.autograd.grad and level:  # A formula has no graph of the rows.
            level = OF_ROWS if self._is_of_rows(tensors) else OF_BOTH
        writes = whole_name in _WRITES or (whole_name[-1:] == "_" and whole_name[:1] != "_")
        return FunctionCall(name, values, kwargs, tensors, level, writes)

    def _is_of_rows(self, tensors: Sequence[Tensor]) -> bool:
        """Returns True for arguments of a gradient of sums that are not divided, at rows, as forces
        are: a row has the same one beside others.
        """
        facts = [self.get(each) or UNKNOWN for each in tensors]
        kinds = {each.form.kind for each in facts if each.level == OF_SUMS}
        return kinds == {"sum"} and not any(isinstance(each, nn.Parameter) for each in tensors)

    def of_result(self, call: FunctionCall, result: Tensor, *, may_have_read: bool) -> Facts:
        """Returns the facts about a result that is not in the formula.

        With ``may_have_read``, numbers may be values of the batch.
        """
        name = call.name
        is_new = name in NEW | _LIKE and len(call.tensors) == 1
        values = call.values[int(is_new) :]
        is_created = is_new or (name in _CREATIONS and not containers.tensors_in(values))
        # Others may have values that are read, or the size of a shard.
        is_known = bool(self.rows) and not may_have_read
        if name == "eye" or (is_created and _is_fixed(name, result, is_known=is_known)):
            is_zero = result.numel() == 1 and name in _NUMBERS and not any(values)
            return self._constant(call, values, ZERO if is_zero or "zeros" in name else CONSTANT)
        if not call.tensors:
            return UNKNOWN  # It may be random, or be written to unseen.
        if call.level == OF_NOTHING:
            return self._constant(call, values, CONSTANT)
        return Facts(OF_BOTH) if call.level == OF_SUMS else self._of_rows(call, result)

    def _constant(self, call: FunctionCall, values: Sequence[object], form: Form) -> Facts:
        is_sized = call.name in _SIZED or any(self.of(each).is_sized for each in call.tensors)
        return FIXED._replace(form=form, text=self._text(call.name, values), is_sized=is_sized)

    def _of_rows(self, call: FunctionCall, result: Tensor) -> Facts:
        facts = [*map(self.of, call.tensors)]
        is_target = all(each.is_target for each in facts) and not result.requires_grad
        is_selected = any(each.is_selected for each in facts)
        is_selected = is_selected or _is_selection(call.name, call.tensors, result)
        table = call.tensors[0]
        is_row = (call.name == "squeeze" and table.dim() > 0) or all(
            each.is_row for each in facts if each.level
        )
        return Facts(
            call.level,
            is_target=is_target,
            is_selected=is_selected,
            dim=self._dim_in(call, result),
            is_row=is_row and not result.dim(),
        )

    def _text(self, name: str, values: Sequence[object]) -> str:
        texts = (
            self.of(leaf).text if isinstance(leaf, Tensor) else str(leaf)
            for _, leaf in containers.leaves(tuple(values))
            if not isinstance(leaf, torch.device)  # Replicas differ in it.
        )
        return shorten(f"{name}({', '.join(texts)})")

    def _dim_in(self, call: FunctionCall, result: Tensor) -> int | None:
        """Returns the dimension of the rows in a result, if its memory does not tell."""
        if columns.prepends(call.name, call.args, call.kwargs):
            return 1 if call.name == "unsqueeze" and not self._dim_of(call.tensors[0]) else -1
        of_rows = [each for each in call.tensors if self.of(each).level] or call.tensors
        rows = next((each for each in of_rows if self.of(each).dim is not None), of_rows[0])
        return columns.dim_behind(call.name, rows, self.of(rows).dim, result)

    def _dim_of(self, rows: Tensor) -> int:
        """Returns the dimension of the rows in a tensor."""
        dim = self.of(rows).dim
        return columns.first_dim_of(rows) if dim is None else dim

    def is_along_rows(self, call: FunctionCall) -> bool:
        """Returns True for a reduction along the dimension that has all rows."""
        if not self._has_columns or not columns.is_strided(call.tensors):
            return False
        if call.name in columns.SCATTERS:
            dim = call.kwargs.get("dim", *call.args[1:2])
            return self.rows is not None and (dim == 0 or call.name == "bincount")
        dims = [self._dim_of(each) for each in call.tensors]
        if call.name in columns.PRODUCTS:
            return columns.contracts(call.name, call.args, dims)
        is_known = call.name in columns.REDUCTIONS
        return is_known and columns.is_along(dims[0], call.args, call.kwargs)

    def rows_taken(self, name: str, values: Sequence[Any]) -> list[int]:
        """Returns the places of the rows that a function takes out of all rows, one by one."""
        taken = columns.rows_taken(name, values, self.rows) if self._has_columns else []
        is_first = taken and self.of(values[0]).row is None and not self._dim_of(values[0])
        return taken if is_first else []

    def row_of(self, call: FunctionCall) -> int | None:
        """Returns the only row that the result of a function depends on. None are several."""
        is_list = call.name in _JOINS and len(call.tensors) == 1  # A list of rows has one.
        rows = {facts.row for facts in map(self.of, call.tensors) if facts.level == OF_ROWS}
        return None if is_list or len(rows) != 1 or call.level != OF_ROWS else rows.pop()

    def adds_rows(self, call: FunctionCall) -> bool:
        """Returns True for a sum of the values of several rows: it is one over all rows.

        That of the only row begins with zero, as ``sum(values)`` does.
        """
        if call.name != "add" or call.kwargs:
            return False
        facts = [*map(self.of, call.values)]
        rows = {each.row for each in facts if each.level == OF_ROWS}
        if not rows or None in rows:
            return False
        others = [each for each in call.values if self.of(each).level != OF_ROWS]
        kinds = {self.form(each).kind for each in others}
        return len(rows) > 1 or kinds == {"sum"} or (self.rows == 1 and kinds == {"zero"})


def is_getter(func: Any) -> bool:
    """Returns True for a function that reads a property of a tensor."""
    return getattr(func, "__name__", "") == "__get__"


def _is_fixed(name: str, result: Tensor, *, is_known: bool) -> bool:
    return result.numel() == 1 or (is_known and name not in _LIKE)


def _share_memory(tensor: Tensor, other: Tensor) -> bool:
    """Returns True if two plain tensors have one storage."""
    memory = memory_of_plain(tensor)
    return memory is not None and memory == memory_of_plain(other) and tensor.device == other.device


def _is_selection(name: str, tensors: Sequence[Tensor], result: Any) -> bool:
    """Returns True for an operation whose result has a size that depends on values."""
    if name == "getitem":
        return any(index.dtype == torch.bool for index in tensors[1:])
    return name in SELECTIONS or (name == "where" and len(tensors) == 1)


def _level_of(name: str, facts: Sequence[Facts]) -> int:
    """Returns what a function of tensors depends on."""
    levels = {each.level for each in facts}
    if levels == {OF_NOTHING} and name in TOTALS and any(each.is_sized for each in facts):
        return OF_ROWS  # It may be a count of them.
    if not {OF_SUMS, OF_ROWS} <= levels:
        return max(levels, default=OF_NOTHING)
    are_columns = all(each.is_column for each in facts if each.level == OF_SUMS)
    return OF_ROWS if are_columns and OF_BOTH not in levels else OF_BOTH


def _lacks_graph(tensors: Sequence[Tensor], facts: Sequence[Facts]) -> bool:
    """Returns True for sums of columns without a graph beside rows that have one, as in
    ``x / x.mean(0).detach()``: only gradients tell that the rows depend on each other.
    """
    pairs = [*zip(tensors, facts, strict=True)]
    has_sums = any(
        each.level == OF_SUMS and not each.is_target and not tensor.requires_grad
        for tensor, each in pairs
    )
    return has_sums and any(tensor.requires_grad for tensor in tensors)
