"""Notes of the sums over the rows that a criterion or a model computes, and of the operations on them.

A mode of torch sees each call. It tells what the result depends on: nothing, sums, rows, or both. A
sum of rows is a statistic, and what is computed of statistics is the formula. Python numbers that
are read from values of the rows are noted too, since a shard may have others::

    facts.py           what a tensor depends on
    drafts.py          the statistics, and the operations on them
    shard_numbers.py   numbers of Python that a shard may have of its own
"""

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ..batch import containers
from ..replicas.all_rows import sum_over_rows
from ..replicas.batchnorm import gather_statistics
from ..runtime.torch_private import (
    PACK_NAME,
    count_at_root,
    has_shards,
    in_checkpoint,
    storage_id,
    versions,
)
from . import columns
from .drafts import Draft
from .entries import values_to_log
from .facts import (
    FIXED,
    NEW,
    NORMS,
    OF_BOTH,
    OF_NOTHING,
    OF_ROWS,
    OF_SUMS,
    SELECTIONS,
    SUMS,
    TOTALS,
    UNKNOWN,
    Facts,
    FunctionCall,
)
from .formula import (
    OTHER,
    ROOT,
    Formula,
    Operation,
    Statistic,
    Unknown,
    places_behind,
    results_in,
    root,
    shape_of,
)
from .rules import RULES, arguments_of, divisor, reduction_in
from .shard_numbers import ShardNumbers
from .sums import weighted_sum, widen, zero_of

_OF_VALUES = SELECTIONS | NEW | {"where", "__setitem__", PACK_NAME}
_PROPERTIES = {"__get__", "size", "dim"}  # They may be read, as in a model.
_INDICES = slice, int, type(None), type(...)  # They select elements that no value tells.


class SumNotes(TorchFunctionMode):
    """Notes the sums over the rows that are computed in its blocks, and the operations on them.

    There may be two blocks: the forward of a model that computes its loss, and a criterion.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_unknown_count = False
        self._draft = Draft()
        self._facts = self._draft.facts
        self._numbers = ShardNumbers()
        self._columns: list[torch.Size] = []  # The shapes of reductions along the rows.
        self._of_model: set[int] = set()
        self._has_shards = False
        self._held: list[Tensor] = []  # The storages identify counts.

    def __enter__(self) -> Self:
        self._facts.begin_block()
        super().__enter__()
        return self

    @property
    def statistics(self) -> dict[int, Statistic]:
        """The sums that are noted. The keys are places in the formula."""
        return self._draft.statistics

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
        self._facts.begin(rows, is_blind=is_blind, has_columns=has_columns)
        shapes = [tensor.shape for tensor in containers.tensors_in(values)]
        self._numbers.begin(shapes, has_lists=any(_lists_of_entries(values, rows)))
        return self

    def of_targets(self, targets: object) -> Self:
        """Tells the values that do not depend on the outputs."""
        for tensor in containers.tensors_in(targets):
            self._facts.tell(tensor, Facts(OF_ROWS, is_target=True))
        return self

    def of_entries(self, values: object) -> Self:
        """Tells the values of each row in lists with an entry for each row."""
        rows = self._facts.rows
        for entries in _lists_of_entries(values, rows):
            places = range(len(entries)) if len(entries) == rows else ()
            for row, entry in zip(places, entries, strict=False):
                for tensor in containers.tensors_in(entry):
                    self._facts.tell(tensor, self._facts.of(tensor)._replace(row=row))
        return self

    def of_constants(self, constants: object) -> Self:
        """Tells the values that do not depend on the rows."""
        for tensor in containers.tensors_in(constants):
            self._facts.tell(tensor, FIXED)
        return self

    def of_criterion(self, parameters: Iterable[Tensor]) -> Self:
        """Tells the parameters of the criterion."""
        for place, parameter in enumerate(parameters):
            self._facts.tell(parameter, FIXED._replace(number=-1 - place))
        self._draft.end_model()
        return self

    def of_model(self, module: nn.Module) -> Self:
        """Tells the model, whose parameters the criterion does not have itself.

        Those of shards that are whole in the forward are freed behind it.
        """
        self._has_shards = has_shards(module)
        for parameter in module.parameters():
            if type(parameter) is not nn.Parameter:  # Others are captured where they are used.
                self._facts.capture(parameter)
        self._of_model = {*self._facts.outside}
        return self

    def name_of_mean(self, tensors: Sequence[Tensor]) -> str:
        """Returns the loss of torch whose mean is the only tensor of an output, or an empty text."""
        places = {self._facts.of(tensor).number for tensor in tensors if len(tensors) == 1}
        name = "".join(each.text for each in self._draft.operations if places & {*each.results})
        return name if name in ("cross_entropy", "nll_loss") and not self._has_shards else ""

    def of_mean(self, name: str, tensors: Sequence[Tensor]) -> bool:
        """Notes such a mean, whose count its graph tells. Returns False for another output."""
        count = count_at_root(tensors[0]) if len(tensors) == 1 else None
        if count is not None:
            (mean,) = tensors
            # A mean over no targets is nan.
            place = self._draft.add(name, torch.where(count != 0, mean * count, 0.0))
            self._draft.quotient(name, place, count, mean, may_learn=False)
        return count is not None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch, and notes a sum, or an operation on sums."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # Compiled code is not seen, and runs for others too.
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        self._numbers.note_arguments(name.strip("_"), args)
        if name == "__get__" and func.__self__.__name__ in columns.TRANSPOSES:
            name = func.__self__.__name__
        is_property = name in _PROPERTIES and type(args[0]) is Tensor
        # The rows of a shard are computed of a sum of all of them.
        if func in (sum_over_rows, gather_statistics) or (
            is_property and self._facts.get(args[0]) is None
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
        if is_mean or not result.dim() or self._facts.get(result) is not None:
            return False
        if self._facts.rows_taken(name, [*args, *kwargs.values()]):
            return False
        if self._facts.rows and columns.broadcasts(name, args, result):
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
                    notes.append(self._facts.get(part))
            elif isinstance(part, (list, tuple)):
                parts += part
            elif isinstance(part, dict):
                return False
        is_of_batch = any(facts and (facts.level or facts.is_selected) for facts in notes)
        return None in notes and not is_of_batch

    def _call(self, func: Any, args: Any, kwargs: Any, *results: Any) -> Any:
        """Calls a function, which may have returned one of ``results``, and notes it."""
        call = self._facts.describe(func, args, kwargs)
        if func in RULES and call.level == OF_ROWS and self._facts.row_of(call) is None:
            return self._loss(func, arguments_of(func, *args, **kwargs))
        operation = self._draft.operation(call, func, args, kwargs)
        if call.writes:
            self._draft.keep_values(args[0], call.level)
            self._facts.forget(args[0], call.level)
        result = results[0] if results else func(*args, **kwargs)
        self._note_read(call, result)
        is_same = bool(call.values) and result is call.values[0]
        if is_same and not call.writes:  # A conversion to the own type returns its argument.
            return result
        tensors = results_in(call.name, result, call.values)
        if operation is not None and tensors:
            self._note_operation(call, operation, tensors)
        elif self._facts.adds_rows(call):
            self._draft.sum("sum", widen(tensors[0]), tensors[0])
        else:
            self._note_rows(call, tensors)
        return result

    def _note_read(self, call: FunctionCall, result: object) -> None:
        """Notes what Python reads, and its branches on sums."""
        if isinstance(result, Tensor):
            return
        self._numbers.note_read(call, result, [*map(self._facts.of, call.tensors)])
        if call.name == "bool" and call.level == OF_SUMS:
            self._draft.branch(call.tensors[0], truth=bool(result))

    def _note_operation(
        self, call: FunctionCall, operation: Operation, results: Sequence[Tensor]
    ) -> None:
        """Notes an operation on sums or parameters."""
        division = self._draft.division(call)
        if division is None:
            self._draft.note(call, operation, results)
        elif self._numbers.are_sizes:
            self._draft.divide(call, division, results[0])
        else:
            self.has_unknown_count = True
            self._facts.tell(results[0], Facts(OF_BOTH))

    def _note_rows(self, call: FunctionCall, results: Sequence[Tensor]) -> None:
        """Keeps the facts about results that are not in the formula, and notes sums of rows."""
        row = self._facts.row_of(call)
        rows: Sequence[int | None] = self._facts.rows_taken(call.name, call.values)
        for tensor, each in zip(results, rows or [row] * len(results), strict=True):
            facts = self._facts.of_result(call, tensor, may_have_read=self._numbers.may_have_read)
            self._facts.learn(tensor, facts._replace(row=each))
        if call.level != OF_ROWS or not results:
            return
        if call.name in TOTALS and row is None:
            self._reduce(call, results[0])
        self._numbers.note_row(call, results[0], row)

    def _reduce(self, call: FunctionCall, result: Tensor) -> None:
        """Notes the sum of all elements of a tensor or of a product, their mean, or their norm, and
        sums and means along the rows.
        """
        rows, name = call.tensors[0], call.name
        if result.dim() and not self._facts.is_along_rows(call):
            self._numbers.note_mean(call, result)
            return
        if not rows.dim() and not self._facts.of(rows).is_row:
            return
        if result.dim():
            self._columns.append(result.shape)
        is_target = all(self._facts.of(each).is_target for each in call.tensors)
        facts = Facts(OF_SUMS, is_target=is_target, is_column=result.dim() > 0)
        if name in SUMS:
            self._draft.sum("sum", _wide_sum(call, result), result, is_target=is_target)
        elif name in NORMS:
            orders = {each for each in call.values if type(each) in (int, float, str)}
            if orders <= {2, "fro"}:
                squares = widen(result).square()
                place = self._draft.add("sum of squares", squares, may_learn=not is_target)
                self._draft.derive(root, "norm", [place], result, facts._replace(form=ROOT))
        else:
            count: Any = rows.numel() // max(result.numel(), 1)
            if self._facts.of(rows).is_selected:
                count = torch.tensor(count)  # It does not follow from sizes.
            if name == "nanmean":
                total = rows.nansum()
                count = rows.isnan().logical_not().sum()
            else:
                total = _wide_sum(call, result)
            name += shape_of(total)
            self._draft.quotient(name, self._draft.add(name, widen(total)), count, result, facts)

    def _loss(self, function: Any, arguments: dict[str, Any]) -> Tensor:
        """Computes a loss of torch. Of a mean, the sum and the count are noted."""
        mean = sum_and_count(function, arguments)
        name = function.__name__
        is_selected = self._facts.of(arguments.get("input")).is_selected
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
            place = self._draft.add(name, total)
            self._draft.quotient(name, place, count, result, key=key, may_learn=may_learn)
            return result
        result = function(**arguments)
        if reduction_in(arguments) == "sum" and not result.dim():
            self._draft.sum(name, widen(result), result)
        else:
            self._facts.learn(result, UNKNOWN._replace(is_selected=is_selected))
        return result

    def _may_learn(self, value: object) -> bool:
        """Returns True for a floating tensor that is not known to be a constant."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return False
        facts = self._facts.of(value)
        return facts.level != OF_NOTHING or facts.number is not None

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
        draft = self._draft
        places = places_behind(entries.values(), draft.operations)
        branches = draft.branches_for(places)
        places |= places_behind(branches, draft.operations)
        outside = self._facts.outside
        if self._has_shards and places & (outside.keys() - self._of_model):
            raise ValueError(
                "the loss of a model uses parameters that FSDP2 has gathered, as a penalty does, expected a backward of its own "
                "for them: loss.backward(), then penalty(model.module).backward(); in TrainStep, parameter.register_hook adds a "
                "derivative"
            )
        rows = self._facts.rows or 0
        statistics = [each for each in self.statistics.values() if each.number in places]
        formula = Formula(
            structure,
            entries,
            [each for each in draft.operations if places.intersection(each.results)],
            [_without_value(each, rows) for each in statistics],
            {name: self._facts.form(leaf) for name, leaf in containers.leaves(result)},
            {number: each for number, each in outside.items() if number in places},
            logged,
            self._numbers.lengths(rows),
            self._numbers.has_read,
            self._columns,
            self._numbers.averaged(),
            branches,
            self._numbers.operands,
            self._numbers.has_loop,
        )
        return formula, statistics

    def _entry(self, leaf: object, beside: set[int]) -> object:
        """Returns the place of an entry of the result, or Unknown. ``beside`` are values to log."""
        if not isinstance(leaf, Tensor):
            return leaf
        facts = self._facts.of(leaf)
        # A constant to log may be the number of rows of a shard.
        is_fixed = facts.number is None and id(leaf) in beside
        is_known = leaf.numel() == 1 and facts.level <= OF_SUMS and not is_fixed
        return self._facts.place(leaf) if is_known else Unknown()

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
            self._facts.replace(first, second)

    def average(self, result: object) -> None:
        """Notes that the entries of a result are averaged over the shards, whatever they are."""
        for _, leaf in containers.leaves(result):
            if isinstance(leaf, Tensor):
                total = self._draft.add("the loss", weighted_sum(leaf, 1))
                self._draft.quotient("the loss", total, 1.0, leaf)
                self._facts.tell(leaf, self._facts.of(leaf)._replace(form=OTHER))


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _without_value(statistic: Statistic, rows: int) -> Statistic:
    """Returns a statistic without its value, of which the elements of a row may be known."""
    count = statistic.value
    per_row = count / rows if isinstance(count, (int, float)) and rows else None
    return statistic._replace(value=None, per_row=per_row)


def _wide_sum(call: FunctionCall, result: Tensor) -> Tensor:
    """Returns the sum behind a sum or a mean, which half precision would round."""
    wide = widen(result)
    if call.name == "mean" or (call.name == "sum" and wide is not result):
        wide = torch.sum(*call.args, **{**call.kwargs, "dtype": wide.dtype})
    return wide


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
