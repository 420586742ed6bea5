"""Notes of the sums over the rows that a criterion or a model computes, and of the operations on them.

A mode of torch sees each call. It tells what the result depends on: nothing, sums, rows, or both. A
sum of rows is a statistic, and what is computed of statistics is the formula. Python numbers that
are read from values of the rows are noted too, since a shard may have others.
"""

import contextlib
import functools
import itertools
import numbers
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from ..batch import containers
from ..replicas.all_rows import sum_over_rows
from ..replicas.batchnorm import gather_statistics
from ..runtime.torch_private import (
    PACK_NAME,
    base_of,
    count_at_root,
    has_shards,
    in_checkpoint,
    is_same,
    memory_of_plain,
    storage_id,
    versions,
)
from . import columns
from .entries import values_to_log
from .formula import (
    CONSTANT,
    CONVERSIONS,
    OTHER,
    OVER_NUMBER,
    ROOT,
    SUM,
    UNCHANGED,
    ZERO,
    Constant,
    Form,
    Formula,
    Operation,
    Statistic,
    Unknown,
    Value,
    add_forms,
    call_method,
    flatten,
    lengths_of,
    multiply_forms,
    places_behind,
    results_in,
    root,
    shape_of,
    shorten,
)
from .rules import RULES, arguments_of, divisor, reduction_in
from .sums import weighted_sum, widen, zero_of

_OF_NOTHING, _OF_SUMS, _OF_ROWS, _OF_BOTH = range(4)
# Names of one operation, without underscores.
_NAMES = {
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
# Values of a tensor, as Python objects.
_READS = {"item", "int", "float", "index", "tolist", "numpy", "array"}
# The size of the result depends on values.
_SELECTIONS = {"nonzero", "argwhere", "masked_select", "unique", "bincount", "pack_padded_sequence"}
_NEW = {"new_zeros", "new_tensor", "new_full", "new_ones"}
_OF_VALUES = _SELECTIONS | _NEW | {"where", "__setitem__", PACK_NAME}
_CHECKS = {"isnan", "isinf", "isfinite"}  # A branch on them is that of errors.
_BOUNDS = {"clamp", "clamp_min", "clip", "max", "maximum"}
_JOINS = {"stack", "cat", "concat", "concatenate", "hstack", "vstack"}
_PRODUCTS = columns.PRODUCTS | {"dot", "vdot", "inner", "tensordot"}
_SUMS = _PRODUCTS | columns.PLACED | {"sum", "nansum", "count_nonzero", "trace"}
_NORMS = {"norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "dist"}
_REDUCTIONS = _SUMS | _NORMS | {"mean", "nanmean"}
_LIKE = {"zeros_like", "ones_like", "full_like"}
_NUMBERS = {"tensor", "new_tensor", "as_tensor", "scalar_tensor"}
_SIZED = {"zeros", "ones", "full", "arange", "linspace"}
_CREATIONS = _SIZED | {"tensor", "as_tensor", "scalar_tensor"}
_ARITHMETIC = {"add", "sub", "rsub", "mul", "div", "pow"}
_PROPERTIES = {"__get__", "size", "dim"}  # They may be read, as in a model.
# Means over elements. That of class indices leaves out padding.
_MEANS = {each.__name__ for each, rule in RULES.items() if rule is not RULES[F.cross_entropy]}
_MEANS |= columns.MEANS
_INDICES = slice, int, type(None), type(...)  # They select elements that no value tells.
_WRITES = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"}
# Names of the methods of a tensor. Some cannot be imported by the name that they have themselves.
_METHODS = {id(each): name for kind in Tensor.__mro__ for name, each in vars(kind).items()}


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


_UNKNOWN = Facts(_OF_ROWS)
_FIXED = Facts(_OF_NOTHING, form=CONSTANT, is_target=True)
_SUM = Facts(_OF_SUMS)


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


class _FactsByTensor(WeakIdKeyDictionary):
    """Facts about tensors while they live. ``_ids`` tell fast that a tensor is unknown."""

    def __init__(self) -> None:
        super().__init__()
        self._ids: set[int] = set()
        self._by_memory: dict[int | None, list[WeakIdRef]] = {}

    def __setitem__(self, tensor: Tensor, facts: Facts) -> None:
        if self.of(tensor) is None:
            self._by_memory.setdefault(memory_of_plain(tensor), []).append(WeakIdRef(tensor))
        self._ids.add(id(tensor))
        super().__setitem__(tensor, facts)

    def sharing(self, written: Tensor) -> list[Tensor]:
        """Returns the tensors that may be in the memory of another one."""
        references = self._by_memory.get(memory_of_plain(written), ())
        return [tensor for each in references if (tensor := each()) is not None]

    def of(self, tensor: Tensor) -> Facts | None:
        """Returns the facts about a tensor. An unknown one may have the id of one that is gone."""
        return self.get(tensor) if id(tensor) in self._ids else None


class SumNotes(TorchFunctionMode):
    """Notes the sums over the rows that are computed in its blocks, and the operations on them.

    There may be two blocks: the forward of a model that computes its loss, and a criterion.
    """

    def __init__(self) -> None:
        super().__init__()
        self.statistics: dict[int, Statistic] = {}  # The keys are places in the formula.
        self._counts: dict[Hashable, int] = {}  # Losses of the same targets have one.
        self.has_unknown_count = False
        self._is_blind = False
        self._branches: dict[Value, bool] = {}  # The truth of values that Python has asked for.
        self._end_of_model = 0  # Places of the criterion are behind it.
        self._operations: list[Operation] = []
        self._outside: dict[int, Tensor] = {}
        self._of_model: set[int] = set()
        self._has_shards = False
        self._averaged: list[float] = []  # The numbers of elements in means of a row, and divisors.
        self._has_loop = False  # Rows are computed one by one.
        self._of_rows: dict[int, list[float]] = {}  # The same in a loop over rows, by row.
        self._columns: list[torch.Size] = []  # The shapes of reductions along the rows.
        self._has_columns = True  # Values of the batch have the rows in the first dimension.
        self._numbers = itertools.count()
        self._has_graph = True
        self._knows_numbers = True  # No value of the batch is a Python number.
        self._has_read = False  # Some are, or the loss is.
        self._has_asked = False  # Python has asked whether a value is true.
        self._read: list[float] = []  # The numbers in operations since then.
        self._held: list[Tensor] = []  # The storages identify counts.
        self._rows: int | None = None
        self._shapes: list[torch.Size] = []  # The shapes of the values of the batch.
        self._facts = _FactsByTensor()

    def __enter__(self) -> Self:
        self._has_graph = torch.is_grad_enabled()
        super().__enter__()
        return self

    def of_batch(
        self,
        values: object,
        rows: int | None,
        *,
        is_blind: bool = False,
        has_columns: bool = True,
    ) -> Self:
        """Tells the values of a batch, whose lists may have an entry for each of the rows.

        With ``is_blind``, tensors without a graph may have one in the next pass. Without
        ``has_columns``, reductions along the first dimension are none of all rows.
        """
        self._is_blind = is_blind
        self._has_columns = has_columns
        self._rows = rows
        self._knows_numbers &= not any(_lists_of_entries(values, rows))
        self._shapes += [tensor.shape for tensor in containers.tensors_in(values)]
        return self

    def of_targets(self, targets: object) -> Self:
        """Tells the values that do not depend on the outputs."""
        for tensor in containers.tensors_in(targets):
            self._facts[tensor] = Facts(_OF_ROWS, is_target=True)
        return self

    def of_entries(self, values: object) -> Self:
        """Tells the values of each row in lists with an entry for each row."""
        for entries in _lists_of_entries(values, self._rows):
            places = range(len(entries)) if len(entries) == self._rows else ()
            for row, entry in zip(places, entries, strict=False):
                for tensor in containers.tensors_in(entry):
                    self._facts[tensor] = self._of(tensor)._replace(row=row)
        return self

    def of_constants(self, constants: object) -> Self:
        """Tells the values that do not depend on the rows."""
        for tensor in containers.tensors_in(constants):
            self._facts[tensor] = _FIXED
        return self

    def of_criterion(self, parameters: Iterable[Tensor]) -> Self:
        """Tells the parameters of the criterion."""
        for place, parameter in enumerate(parameters):
            self._facts[parameter] = _FIXED._replace(number=-1 - place)
        self._end_of_model = next(self._numbers)
        return self

    def of_model(self, module: nn.Module) -> Self:
        """Tells the model, whose parameters the criterion does not have itself.

        Those of shards that are whole in the forward are freed behind it.
        """
        self._has_shards = has_shards(module)
        for parameter in module.parameters():
            if type(parameter) is not nn.Parameter:  # Others are captured where they are used.
                self._capture(parameter)
        self._of_model = {*self._outside}
        return self

    def name_of_mean(self, tensors: Sequence[Tensor]) -> str:
        """Returns the loss of torch whose mean is the only tensor of an output, or an empty text."""
        places = {self._of(tensor).number for tensor in tensors if len(tensors) == 1}
        name = "".join(each.text for each in self._operations if places & {*each.results})
        return name if name in ("cross_entropy", "nll_loss") and not self._has_shards else ""

    def of_mean(self, name: str, tensors: Sequence[Tensor]) -> bool:
        """Notes such a mean, whose count its graph tells. Returns False for another output."""
        count = count_at_root(tensors[0]) if len(tensors) == 1 else None
        if count is not None:
            (mean,) = tensors
            # A mean over no targets is nan.
            place = self._add(name, torch.where(count != 0, mean * count, 0.0))
            self._quotient(name, place, count, mean, may_learn=False)
        return count is not None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch, and notes a sum, or an operation on sums."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # Compiled code is not seen, and runs for others too.
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        self._note_numbers(name.strip("_"), args)
        if name == "__get__" and func.__self__.__name__ in columns.TRANSPOSES:
            name = func.__self__.__name__
        is_property = name in _PROPERTIES and type(args[0]) is Tensor
        # The rows of a shard are computed of a sum of all of them.
        if func in (sum_over_rows, gather_statistics) or (
            is_property and self._facts.of(args[0]) is None
        ):
            return func(*args, **kwargs)
        if func in RULES or not self._is_unknown(name, args, kwargs):
            return self._call(func, args, kwargs)
        result = func(*args, **kwargs)
        if self._tells_nothing(name, args, kwargs, result):
            return result
        return self._call(func, args, kwargs, result)

    def _tells_nothing(self, name: str, args: Any, kwargs: Any, result: object) -> bool:
        """Returns True for a result that depends on the rows, and that needs no note."""
        if not isinstance(result, Tensor):
            return name in _PROPERTIES
        is_mean = name in columns.MEANS or "div" in name  # The number of elements is noted.
        if is_mean or not result.dim() or self._facts.of(result) is not None:
            return False
        if self._rows_taken(name, [*args, *kwargs.values()]):
            return False
        if self._rows and columns.broadcasts(name, args, result):
            return False
        return not columns.moves_rows(name, args, kwargs, result)

    def _is_unknown(self, name: str, args: Any, kwargs: Any) -> bool:
        """Returns True for most operations of a model: an argument may depend on the rows, and none
        is a sum.
        """
        if name in _OF_VALUES or (name == "__getitem__" and not _is_plain(args[1])):
            return False
        notes: list[Facts | None] = []
        parts = [*args, *kwargs.values()]
        for part in parts:
            if type(part) is nn.Parameter:
                continue
            if isinstance(part, Tensor):
                # To ask for the class of a parameter takes long.
                if type(part) is Tensor or not isinstance(part, nn.Parameter):
                    notes.append(self._facts.of(part))
            elif isinstance(part, (list, tuple)):
                parts += part
            elif isinstance(part, dict):
                return False
        is_of_batch = any(facts and (facts.level or facts.is_selected) for facts in notes)
        return None in notes and not is_of_batch

    def _call(self, func: Any, args: Any, kwargs: Any, *results: Any) -> Any:
        """Calls a function, which may have returned one of ``results``, and notes it."""
        call = self._describe(func, args, kwargs)
        if func in RULES and call.level == _OF_ROWS and self._row_of(call) is None:
            return self._loss(func, arguments_of(func, *args, **kwargs))
        operation = self._operation(call, func, args, kwargs)
        if call.writes:
            self._keep_values(args[0], call.level)
        result = results[0] if results else func(*args, **kwargs)
        self._note_read(call, result)
        is_same = bool(call.values) and result is call.values[0]
        if is_same and not call.writes:  # A conversion to the own type returns its argument.
            return result
        tensors = results_in(call.name, result, call.values)
        if operation is not None and tensors:
            self._note(call, operation, tensors)
        elif self._adds_rows(call):
            self._sum("sum", widen(tensors[0]), tensors[0])
        else:
            self._learn_rows(call, tensors)
        return result

    def _learn_rows(self, call: FunctionCall, results: Sequence[Tensor]) -> None:
        """Keeps the facts about results that are not in the formula, and notes sums of rows."""
        row = self._row_of(call)
        rows: Sequence[int | None] = self._rows_taken(call.name, call.values)
        for tensor, each in zip(results, rows or [row] * len(results), strict=True):
            self._learn(tensor, self._facts_of(call, tensor)._replace(row=each))
        self._has_loop = self._has_loop or row is not None
        if call.level == _OF_ROWS:
            self._note_rows(call, results, row)

    def _rows_taken(self, name: str, values: Sequence[Any]) -> list[int]:
        """Returns the places of the rows that a function takes out of all rows, one by one."""
        taken = columns.rows_taken(name, values, self._rows) if self._has_columns else []
        is_first = taken and self._of(values[0]).row is None and not self._dim_of(values[0])
        return taken if is_first else []

    def _row_of(self, call: FunctionCall) -> int | None:
        """Returns the only row that the result of a function depends on. None are several."""
        is_list = call.name in _JOINS and len(call.tensors) == 1  # A list of rows has one.
        rows = {facts.row for facts in map(self._of, call.tensors) if facts.level == _OF_ROWS}
        return None if is_list or len(rows) != 1 or call.level != _OF_ROWS else rows.pop()

    def _adds_rows(self, call: FunctionCall) -> bool:
        """Returns True for a sum of the values of several rows: it is one over all rows.

        That of the only row begins with zero, as ``sum(values)`` does.
        """
        if call.name != "add" or call.kwargs:
            return False
        facts = [*map(self._of, call.values)]
        rows = {each.row for each in facts if each.level == _OF_ROWS}
        if not rows or None in rows:
            return False
        others = [each for each in call.values if self._of(each).level != _OF_ROWS]
        kinds = {self._form(each).kind for each in others}
        return len(rows) > 1 or kinds == {"sum"} or (self._rows == 1 and kinds == {"zero"})

    def _operation(self, call: FunctionCall, func: Any, args: Any, kwargs: Any) -> Operation | None:
        """Returns an operation on sums or parameters, or None for another one."""
        if call.level > _OF_SUMS:
            return None
        places = [self._of(tensor).number for tensor in call.tensors]
        inputs = [place for place in places if place is not None]
        if not inputs:
            return None
        arguments = containers.map_tensors(self._place, (tuple(args), kwargs))
        # Ranks exchange functions. Properties and some operators have none that can be imported.
        if _is_getter(func):
            func = operator.attrgetter(call.name)
        elif id(func) in _METHODS:
            func = functools.partial(call_method, _METHODS[id(func)])
        has_graph = not self._is_inside
        return Operation(func, call.name, arguments, inputs, (), call.writes, has_graph)

    def _describe(self, func: Any, args: Any, kwargs: Any) -> FunctionCall:
        whole_name = str(getattr(func.__self__ if _is_getter(func) else func, "__name__", ""))
        name = _NAMES.get(whole_name.strip("_"), whole_name.strip("_"))
        values = (*args, *kwargs.values())
        tensors = [part for part in flatten(values) if isinstance(part, Tensor)]
        if name in CONVERSIONS and args and isinstance(args[0], Tensor):
            tensors = tensors[:1]
        facts = [*map(self._of, tensors)]
        level = _level_of(name, facts)
        if level == _OF_ROWS and _lacks_graph(tensors, facts):
            level = _OF_BOTH
        if func is torch.autograd.grad and level:  # A formula has no graph of the rows.
            level = _OF_ROWS if self._is_of_rows(tensors) else _OF_BOTH
        writes = whole_name in _WRITES or (whole_name[-1:] == "_" and whole_name[:1] != "_")
        return FunctionCall(name, values, kwargs, tensors, level, writes)

    def _is_of_rows(self, tensors: Sequence[Tensor]) -> bool:
        """Returns True for arguments of a gradient of sums that are not divided, at rows, as forces
        are: a row has the same one beside others.
        """
        facts: list[Facts] = [self._facts.of(each) or _UNKNOWN for each in tensors]
        kinds = {each.form.kind for each in facts if each.level == _OF_SUMS}
        return kinds == {"sum"} and not any(isinstance(each, nn.Parameter) for each in tensors)

    @property
    def _is_inside(self) -> bool:
        """True in a block without a graph, such as the forward of an autograd function."""
        return torch.is_grad_enabled() != self._has_graph

    def _of(self, value: object) -> Facts:
        """Returns what is known of a value."""
        if not isinstance(value, Tensor):
            return _FIXED
        facts = self._facts.of(value)
        if facts is None and isinstance(value, nn.Parameter):
            facts = self._capture(value)
        if facts is None:
            return _UNKNOWN
        has_graph = facts.is_inside and value.requires_grad
        if has_graph and facts.level == _OF_NOTHING:
            return self._capture(value)
        if has_graph and facts.level == _OF_SUMS:
            return facts.original if facts.original and is_same(value) else Facts(_OF_BOTH)
        return facts

    def _capture(self, parameter: Tensor) -> Facts:
        """Gives a place to a parameter that the criterion does not have itself."""
        number = next(self._numbers)
        self._outside[number] = parameter
        facts = self._facts[parameter] = _FIXED._replace(number=number)
        return facts

    def _learn(self, tensor: Tensor, facts: Facts) -> None:
        """Keeps the facts about a tensor, if they are not those of an unknown one."""
        if facts == _UNKNOWN:
            self._facts.pop(tensor, None)
        else:
            self._facts[tensor] = facts._replace(is_inside=self._is_inside)

    def _place(self, tensor: Tensor) -> Value | Constant:
        """Returns the place of a tensor, or a copy of a constant, which may be written to."""
        facts = self._of(tensor)
        if facts.number is not None:
            return Value(facts.number)
        text = facts.text
        if facts.is_sized and tensor.is_cpu and tensor.numel() < 100:
            text = shorten(f"{text} {tensor.tolist()}")  # Writes by .data or numpy are not seen.
        return Constant(tensor.detach().clone(), text)

    def _keep_values(self, written: Tensor, level: int) -> None:
        """Copies the statistics in the memory of a tensor that is written to.

        Other tensors in it become unknown.
        """
        # Buffers of a criterion share memory.
        others = self._facts.sharing(written) if level else ()
        sharing = [each for each in others if _share_memory(each, written)]
        for number in [self._of(tensor).number for tensor in sharing]:
            each = self.statistics.get(number) if number is not None else None
            if each is not None and isinstance(each.value, Tensor):
                self.statistics[each.number] = each._replace(value=each.value.clone())
        unknown = _UNKNOWN if level == _OF_ROWS else Facts(_OF_BOTH)
        for tensor in {base_of(written), *sharing} - {written}:
            # Sums are scalars, so a write of rows leaves larger tensors as they are.
            if (level != _OF_ROWS or tensor.numel() == 1) and _share_memory(tensor, written):
                self._learn(tensor, unknown)

    def _facts_of(self, call: FunctionCall, result: Tensor) -> Facts:
        """Returns the facts about a result that is not in the formula."""
        name, tensors, level = call.name, call.tensors, call.level
        is_new = name in _NEW | _LIKE and len(tensors) == 1
        values = call.values[int(is_new) :]
        is_created = is_new or (name in _CREATIONS and not containers.tensors_in(values))
        is_created = self._is_fixed(name, result) if is_created else name == "eye"
        if is_created or (tensors and level == _OF_NOTHING):
            is_zero = name in _NUMBERS and result.numel() == 1 and not any(values)
            is_zero = is_created and (is_zero or "zeros" in name)
            form = ZERO if is_zero else CONSTANT
            is_sized = name in _SIZED or any(self._of(each).is_sized for each in tensors)
            return _FIXED._replace(form=form, text=self._text(name, values), is_sized=is_sized)
        return self._facts_of_rows(call, result)

    def _is_fixed(self, name: str, result: Tensor) -> bool:
        """Returns True for a number, or a creation in a criterion that knows no value of the batch."""
        is_known = self._rows and not self._may_have_read and name not in _LIKE
        return result.numel() == 1 or bool(is_known)

    def _facts_of_rows(self, call: FunctionCall, result: Tensor) -> Facts:
        if not call.tensors:
            return _UNKNOWN  # It may be random, or be written to unseen.
        if call.level == _OF_SUMS:
            return Facts(_OF_BOTH)
        facts = [*map(self._of, call.tensors)]
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

    def _dim_in(self, call: FunctionCall, result: Tensor) -> int | None:
        """Returns the dimension of the rows in a result, if its memory does not tell."""
        if columns.prepends(call.name, call.args, call.kwargs):
            return 1 if call.name == "unsqueeze" and not self._dim_of(call.tensors[0]) else -1
        of_rows = [each for each in call.tensors if self._of(each).level] or call.tensors
        rows = next((each for each in of_rows if self._of(each).dim is not None), of_rows[0])
        return columns.dim_behind(call.name, rows, self._of(rows).dim, result)

    def _text(self, name: str, values: Sequence[object]) -> str:
        texts = (
            self._of(leaf).text if isinstance(leaf, Tensor) else str(leaf)
            for _, leaf in containers.leaves(tuple(values))
            if not isinstance(leaf, torch.device)  # Replicas differ in it.
        )
        return shorten(f"{name}({', '.join(texts)})")

    @property
    def _may_have_read(self) -> bool:
        """True if numbers may be values of the batch."""
        return self._has_read or self._has_asked or not self._knows_numbers

    def _note_numbers(self, name: str, args: Sequence[object]) -> None:
        """Notes the numbers of an operation that may be values of the rows."""
        if self._may_have_read and _NAMES.get(name, name) in _ARITHMETIC:
            self._read += [float(each) for each in args if isinstance(each, numbers.Real)]

    def _note_read(self, call: FunctionCall, result: object) -> None:
        """Notes numbers of Python that may be values of the batch."""
        if isinstance(result, Tensor):
            return
        if type(result) in (int, torch.Size):
            self._knows_numbers &= not any(self._of(tensor).is_selected for tensor in call.tensors)
        if call.name == "bool":
            self._has_asked = self._has_asked or bool(call.level)
            place = self._of(call.tensors[0]).number
            if call.level == _OF_SUMS and place is not None:
                self._note_branch(place, bool(result))
            # A loop may count rows by their truth.
            self._knows_numbers &= self._of(call.tensors[0]).row is None
        if call.name in _READS and call.tensors:
            facts = self._of(call.tensors[0])
            self._has_read = self._has_read or bool(facts.level)
            is_count = facts.is_target or facts.form.kind in ("sum", "bounded")
            # A loss may be read to print it.
            self._knows_numbers &= not facts.level or (facts.level == _OF_SUMS and not is_count)

    def _note_rows(self, call: FunctionCall, results: Sequence[Tensor], row: int | None) -> None:
        """Notes a reduction of rows, or the elements of a mean in one of them, or a number that they
        are divided by.
        """
        averaged = self._averaged if row is None else self._of_rows.setdefault(row, [])
        if call.name in _REDUCTIONS and row is None:
            self._reduce(call, results[0])
        elif row is not None and call.name in _MEANS and reduction_in(call.kwargs) == "mean":
            averaged.append(call.tensors[0].numel() // max(results[0].numel(), 1))
        if call.name == "div" and isinstance(call.values[-1], (int, float)):
            averaged.append(call.values[-1])

    def _averaged_everywhere(self) -> list[float]:
        """Returns the numbers that rows are divided by. Rows of a loop may have their own lengths."""
        equal = [each[0] for each in zip(*self._of_rows.values(), strict=False) if len({*each}) < 2]
        return self._averaged + equal

    def _note_branch(self, place: int, truth: bool) -> None:
        """Notes that Python has asked for the truth of a function of sums."""
        names = {each.name for each in self._operations if place in each.results}
        if names.isdisjoint(_CHECKS):
            self._branches[Value(place)] = truth

    def _note(self, call: FunctionCall, operation: Operation, results: Sequence[Tensor]) -> None:
        """Notes an operation on sums or parameters."""
        first, second = (*call.values, None)[:2]
        facts, other = self._of(first), self._of(second)
        is_target = all(self._of(each).is_target for each in call.tensors)
        form = self._form_of(call) if call.level else CONSTANT
        if call.name == "div" and call.level and not call.kwargs:
            if self._divide(facts, second, results[0]):
                return
            form = self._over(facts.form, other.form) or form
        if form.kind == "sum" and results[0].numel() == 1:
            self._sum("sum", widen(results[0]), results[0], is_target=is_target)
            return
        places = [next(self._numbers) for _ in results]
        self._operations.append(operation._replace(results=places))
        for number, tensor in zip(places, results, strict=True):
            original = facts if call.name in ("clone", "detach") else None
            is_column = any(self._of(each).is_column for each in call.tensors)
            learned = Facts(call.level, number, form, None, is_target, original=original)
            self._learn(tensor, learned._replace(is_column=is_column))

    def _form_of(self, call: FunctionCall) -> Form:
        """Returns the form of the result of an operation on sums."""
        name = call.name
        if name in ("stack", "cat", "sum", "mean"):
            return add_forms([*map(self._form, call.tensors)])
        forms = [*map(self._form, call.values)]
        if name in UNCHANGED or name == "neg":
            return forms[0]
        if name in _BOUNDS and forms[0].kind == "sum":
            return self._bound(forms[0], call)
        if forms[0] == ROOT and name in ("square", "pow") and call.values[1:] in ((), (2,)):
            return SUM
        if len(forms) != 2 or call.kwargs:
            return OTHER
        if name in ("add", "sub", "rsub"):
            return add_forms(forms)
        has_factor = name == "mul" or (name == "div" and forms[1].kind == "constant")
        return multiply_forms(*forms) if has_factor else OTHER

    def _form(self, value: object) -> Form:
        if isinstance(value, (int, float)) and not value:
            return ZERO
        return self._of(value).form

    def _bound(self, form: Form, call: FunctionCall) -> Form:
        """Returns the form of a count with a lower bound that is a number."""
        settings = {**dict(zip(("input", "min", "max"), call.values, strict=False)), **call.kwargs}
        least = settings.get("min", settings.get("other"))
        if isinstance(least, Tensor) and least.is_cpu and self._of(least).level == _OF_NOTHING:
            least = least.item()
        if not isinstance(least, (int, float)) or settings.get("max") is not None:
            return OTHER
        return form._replace(kind="bounded", least=float(least))

    def _over(self, form: Form, count: Form) -> Form | None:
        """Returns the form of a quotient whose divisor is a sum, a count from now on, or None."""
        if count.place not in self.statistics or count.kind not in ("sum", "bounded"):
            return None
        statistic = self.statistics[count.place]
        if isinstance(statistic.value, Tensor) and statistic.value.dim():
            return OTHER  # Each column has another count.
        is_bounded = statistic.is_bounded or count.kind == "bounded"
        self.statistics[count.place] = statistic._replace(is_count=True, is_bounded=is_bounded)
        return count._replace(kind="mean") if form.kind == "sum" else OTHER

    def _add(self, kind: str, value: Any, *, is_count: bool = False, may_learn: bool = True) -> int:
        """Notes a statistic. Returns its place."""
        number = next(self._numbers)
        learns = isinstance(value, Tensor) and value.is_floating_point()
        is_unseen = self._is_blind or not self._has_graph
        learns = learns and (value.requires_grad or (may_learn and is_unseen))
        self.statistics[number] = Statistic(kind, value, number, is_count, learns=learns)
        return number

    def _sum(self, kind: str, total: Tensor, result: Tensor, *, is_target: bool = False) -> None:
        """Notes an undivided sum over the rows."""
        kind += shape_of(total)
        number = self._add(kind, total, may_learn=not is_target)
        form = SUM._replace(place=number)
        is_column = result.dim() > 0
        facts = Facts(_OF_SUMS, number, form, is_target=is_target, is_column=is_column)
        self._learn(result, facts)

    def _derive(
        self,
        function: Callable[..., object],
        name: str,
        places: Sequence[int],
        result: Tensor,
        facts: Facts,
        text: str = "",
    ) -> None:
        """Notes the function of sums that a result is, and the other facts about it."""
        number = next(self._numbers)
        arguments = [*map(Value, places)], dict[str, object]()
        operation = Operation(function, name, arguments, places, [number], text=text)
        self._operations.append(operation)
        self._learn(result, facts._replace(number=number))

    def _quotient(
        self,
        kind: str,
        total: int,
        count: Any,
        result: Tensor,
        facts: Facts = _SUM,
        *,
        key: Hashable = None,
        may_learn: bool = True,
    ) -> None:
        """Notes the quotient of a sum and a count. Counts with one key are equal."""
        place = self._counts.get(key) if key else None
        if place is None:
            place = self._add(kind, count, is_count=True, may_learn=may_learn)
            self._counts[key] = place
        facts = facts._replace(form=Form("mean", place))
        text = "" if kind == OVER_NUMBER else kind
        self._derive(torch.div, "div", [total, place], result, facts, text)

    def _divide(self, facts: Facts, number: Any, result: Tensor) -> bool:
        """Divides a sum by a number, which follows from the sizes of the rows.

        Returns False for another division.
        """
        before = facts.divided
        if facts.form.kind == "sum" and facts.number is not None:
            before = facts.number, 1.0
        if before is None or not isinstance(number, (int, float)) or not number:
            return False
        if not self._knows_numbers:
            self.has_unknown_count = True
            self._facts[result] = Facts(_OF_BOTH)
            return True
        divided = before[0], before[1] * float(number)
        facts = Facts(_OF_SUMS, divided=divided, is_target=facts.is_target)
        self._quotient(OVER_NUMBER, *divided, result, facts, key=divided[1])
        return True

    def _reduce(self, call: FunctionCall, result: Tensor) -> None:
        """Notes the sum of all elements of a tensor or of a product, their mean, or their norm, and
        sums and means along the rows.
        """
        rows, name = call.tensors[0], call.name
        if result.dim() and not self._is_along_rows(call):
            if name in columns.MEANS:
                self._averaged.append(rows.numel() // max(result.numel(), 1))
            return
        if not rows.dim() and not self._of(rows).is_row:
            return
        if result.dim():
            self._columns.append(result.shape)
        is_target = all(self._of(each).is_target for each in call.tensors)
        facts = Facts(_OF_SUMS, is_target=is_target, is_column=result.dim() > 0)
        if name in _SUMS:
            self._sum("sum", _wide_sum(call, result), result, is_target=is_target)
        elif name in _NORMS:
            orders = {each for each in call.values if type(each) in (int, float, str)}
            if orders <= {2, "fro"}:
                squares = widen(result).square()
                place = self._add("sum of squares", squares, may_learn=not is_target)
                self._derive(root, "norm", [place], result, facts._replace(form=ROOT))
        else:
            count: Any = rows.numel() // max(result.numel(), 1)
            if self._of(rows).is_selected:
                count = torch.tensor(count)  # It does not follow from sizes.
            if name == "nanmean":
                total = rows.nansum()
                count = rows.isnan().logical_not().sum()
            else:
                total = _wide_sum(call, result)
            name += shape_of(total)
            self._quotient(name, self._add(name, widen(total)), count, result, facts)

    def _is_along_rows(self, call: FunctionCall) -> bool:
        """Returns True for a reduction along the dimension that has all rows."""
        if not self._has_columns or not columns.is_strided(call.tensors):
            return False
        if call.name in columns.PLACED:
            dim = call.kwargs.get("dim", *call.args[1:2])
            return self._rows is not None and (dim == 0 or call.name == "bincount")
        dims = [self._dim_of(each) for each in call.tensors]
        if call.name in columns.PRODUCTS:
            return columns.contracts(call.name, call.args, dims)
        is_known = call.name in columns.REDUCTIONS
        return is_known and columns.is_along(dims[0], call.args, call.kwargs)

    def _dim_of(self, rows: Tensor) -> int:
        """Returns the dimension of the rows in a tensor."""
        dim = self._of(rows).dim
        return columns.first_dim_of(rows) if dim is None else dim

    def _loss(self, function: Any, arguments: dict[str, Any]) -> Tensor:
        """Computes a loss of torch. Of a mean, the sum and the count are noted."""
        mean = sum_and_count(function, arguments)
        name = function.__name__
        is_selected = self._of(arguments.get("input")).is_selected
        result: Tensor
        if mean is not None:
            total, divisor = mean
            # The recomputation of a checkpoint has the loss alone.
            hooks = saved_tensors_hooks(_as_it_is, _as_it_is) if in_checkpoint() else None
            with hooks or contextlib.nullcontext():
                result = total / divisor
            key = self._key(function, arguments)
            has_weight = arguments.get("weight") is not None
            is_counted = RULES[function] is RULES[F.cross_entropy] or has_weight or is_selected
            # Other divisors follow from sizes.
            count = divisor.item() if divisor.is_cpu and not is_counted else divisor
            # The graph of a first pass does not tell. Buffers and class labels learn nothing.
            sources = arguments.get("target"), arguments.get("weight")
            may_learn = any(map(self._may_learn, sources))
            place = self._add(name, total)
            self._quotient(name, place, count, result, key=key, may_learn=may_learn)
            return result
        result = function(**arguments)
        if reduction_in(arguments) == "sum" and not result.dim():
            self._sum(name, widen(result), result)
        else:
            self._learn(result, _UNKNOWN._replace(is_selected=is_selected))
        return result

    def _may_learn(self, value: object) -> bool:
        """Returns True for a floating tensor that is not known to be a constant."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return False
        facts = self._of(value)
        return facts.level != _OF_NOTHING or facts.number is not None

    def _key(self, function: Any, arguments: dict[str, Any]) -> Hashable:
        """Returns a key that is equal for losses of the same targets, which have the same count."""
        target = arguments.get("target")
        rule = RULES[function]
        is_class = (
            rule is RULES[F.cross_entropy]
            and isinstance(target, Tensor)
            and not target.is_floating_point()
        )
        shape = getattr(arguments.get("input"), "shape", None)
        if not isinstance(target, Tensor) or not (is_class or target.shape == shape):
            return None
        tensors = [
            tensor for tensor in (target, arguments.get("weight")) if isinstance(tensor, Tensor)
        ]
        self._held += tensors  # while they live, no other tensor is at their place
        places = [
            (storage_id(each.untyped_storage()), each.storage_offset(), each.shape, each.stride())
            for each in tensors
        ]
        return (
            rule,
            *places,
            *versions(tensors),
            arguments.get("ignore_index", -100) if is_class else None,
        )

    def formula(self, result: Any) -> tuple[Formula, list[Statistic]]:
        """Returns the formula of the result of the criterion, and its statistics."""
        logged = values_to_log(result)
        beside = {id(leaf) for name, leaf in containers.leaves(result) if name in logged}

        structure = containers.map_leaves(lambda leaf: self._entry(leaf, beside), result)
        entries = dict(containers.leaves(structure))
        places = places_behind(entries.values(), self._operations)
        branches = self._branches_for(places)
        places |= places_behind(branches, self._operations)
        if self._has_shards and places & (self._outside.keys() - self._of_model):
            raise ValueError(
                "the loss of a model uses parameters that FSDP2 has gathered, as a penalty does, expected a backward of its own "
                "for them: loss.backward(), then penalty(model.module).backward(); in TrainStep, parameter.register_hook adds a "
                "derivative"
            )
        lengths = lengths_of(self._shapes, self._rows or 0) if self._knows_numbers else []
        statistics = [each for each in self.statistics.values() if each.number in places]
        formula = Formula(
            structure,
            entries,
            [each for each in self._operations if places.intersection(each.results)],
            [*map(self._described, statistics)],
            {name: self._form(leaf) for name, leaf in containers.leaves(result)},
            {number: each for number, each in self._outside.items() if number in places},
            logged,
            lengths,
            self._has_read,
            self._columns,
            self._averaged_everywhere(),
            branches,
            self._read,
            self._has_loop,
        )
        return formula, statistics

    def _branches_for(self, places: set[int]) -> dict[Value, bool]:
        """Returns the branches of the criterion, and those of a model on sums at some places."""
        return {
            value: truth
            for value, truth in self._branches.items()
            if value.number > self._end_of_model
            or places & places_behind([value], self._operations)
        }

    def _entry(self, leaf: object, beside: set[int]) -> object:
        """Returns the place of an entry of the result, or Unknown. ``beside`` are values to log."""
        if not isinstance(leaf, Tensor):
            return leaf
        facts = self._of(leaf)
        # A constant to log may be the number of rows of a shard.
        is_fixed = facts.number is None and id(leaf) in beside
        is_known = leaf.numel() == 1 and facts.level <= _OF_SUMS and not is_fixed
        return self._place(leaf) if is_known else Unknown()

    def _described(self, statistic: Statistic) -> Statistic:
        """Returns a statistic without its value."""
        count = statistic.value
        per_row = count / self._rows if isinstance(count, (int, float)) and self._rows else None
        return statistic._replace(value=None, per_row=per_row)

    def sums(self) -> list[Tensor]:
        """Returns the sums that are tensors."""
        values = (each.value for each in self.statistics.values())
        return [value for value in values if isinstance(value, Tensor)]

    def replace(
        self, sums: Iterable[Tensor], before: Iterable[Tensor], output: Iterable[Tensor]
    ) -> None:
        """Takes others in the place of :meth:`sums`, and the tensors of an output."""
        new = iter(sums)
        for number, each in self.statistics.items():
            if isinstance(each.value, Tensor):
                self.statistics[number] = each._replace(value=next(new))
        for first, second in zip(before, output, strict=True):
            if first in self._facts:
                self._facts[second] = self._facts[first]

    def average(self, result: object) -> None:
        """Notes that the entries of a result are averaged over the shards, whatever they are."""
        for _, leaf in containers.leaves(result):
            if isinstance(leaf, Tensor):
                total = self._add("the loss", weighted_sum(leaf, 1))
                self._quotient("the loss", total, 1.0, leaf)
                self._facts[leaf] = self._facts[leaf]._replace(form=OTHER)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _wide_sum(call: FunctionCall, result: Tensor) -> Tensor:
    """Returns the sum behind a sum or a mean, which half precision would round."""
    wide = widen(result)
    if call.name == "mean" or (call.name == "sum" and wide is not result):
        wide = torch.sum(*call.args, **{**call.kwargs, "dtype": wide.dtype})
    return wide


def _share_memory(tensor: Tensor, other: Tensor) -> bool:
    """Returns True if two plain tensors have one storage."""
    memory = memory_of_plain(tensor)
    return memory is not None and memory == memory_of_plain(other) and tensor.device == other.device


def _is_selection(name: str, tensors: Sequence[Tensor], result: Any) -> bool:
    """Returns True for an operation whose result has a size that depends on values."""
    if name == "getitem":
        return any(index.dtype == torch.bool for index in tensors[1:])
    return name in _SELECTIONS or (name == "where" and len(tensors) == 1)


def _is_getter(func: Any) -> bool:
    """Returns True for a function that reads a property of a tensor."""
    return getattr(func, "__name__", "") == "__get__"


def _level_of(name: str, facts: Sequence[Facts]) -> int:
    """Returns what a function of tensors depends on."""
    levels = {each.level for each in facts}
    if levels == {_OF_NOTHING} and name in _REDUCTIONS and any(each.is_sized for each in facts):
        return _OF_ROWS  # It may be a count of them.
    if not {_OF_SUMS, _OF_ROWS} <= levels:
        return max(levels, default=_OF_NOTHING)
    are_columns = all(each.is_column for each in facts if each.level == _OF_SUMS)
    return _OF_ROWS if are_columns and _OF_BOTH not in levels else _OF_BOTH


def _lacks_graph(tensors: Sequence[Tensor], facts: Sequence[Facts]) -> bool:
    """Returns True for sums of columns without a graph beside rows that have one, as in
    ``x / x.mean(0).detach()``: only gradients tell that the rows depend on each other.
    """
    pairs = [*zip(tensors, facts, strict=True)]
    has_sums = any(
        each.level == _OF_SUMS and not each.is_target and not tensor.requires_grad
        for tensor, each in pairs
    )
    return has_sums and any(tensor.requires_grad for tensor in tensors)


def _is_plain(index: object) -> bool:
    """Returns True for an index that no value tells."""
    indices = index if isinstance(index, tuple) else (index,)
    return all(isinstance(each, _INDICES) for each in indices)


def _lists_of_entries(
    value: Any, rows: int | None, *, is_part: bool = False
) -> Iterator[list[Any]]:
    """Yields the lists in a structure that may have an entry for each row, such as strings or mappings.

    Others are lists of heads or layers, whose tensors have all rows.
    """
    if isinstance(value, list):
        tensors = containers.tensors_in(value)
        have_rows = (tensors or not value) and all(each.shape[:1] == (rows,) for each in tensors)
        is_part = is_part or all(isinstance(entry, Tensor) for entry in value)
        yield from () if have_rows and (is_part or len(value) != rows) else [value]
    elif not isinstance(value, Tensor) and (container := containers.open_container(value)):
        for child in container.children:
            yield from _lists_of_entries(child, rows, is_part=not isinstance(value, tuple))


def sum_and_count(function: Any, arguments: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Returns the sum and the divisor of a mean that a loss of torch computes, or None for another
    reduction.
    """
    if reduction_in(arguments) not in ("mean", "batchmean"):
        return None
    count = divisor(RULES[function], function, arguments)
    settings = {
        name: value
        for name, value in arguments.items()
        if name not in ("reduction", "size_average", "reduce")
    }
    if function is F.ctc_loss:  # The sum omits the division by the length of each sequence.
        mean = function(**settings)
        return (widen(mean) * count if count else zero_of(mean)), count
    if any(
        isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        for value in settings.values()
    ):
        # a sum in float16 overflows
        return widen(function(**settings, reduction="none")).sum(), count
    return function(**settings, reduction="sum"), count
