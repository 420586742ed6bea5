"""A criterion as a function of sums over the rows.

It runs on each shard as it is written. Each sum over a tensor that depends on the rows is noted, and
so is every operation on such sums. These operations are a *formula*, the same for all shards::

    loss = F.cross_entropy(output, labels) + (output - values).pow(2).mean().sqrt()

    shard 0   sums 4.2, 9.0    counts 3, 12
    shard 1   sums 2.2, 1.6    counts 1, 9
    batch          6.4, 10.6         4, 21     loss = 6.4 / 4 + sqrt(10.6 / 21)

The sums are added over shards, micro-batches and ranks, and the formula is computed of these. A
result that depends on the rows in another way has no formula.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ..batch import containers
from ..replicas.all_rows import sum_over_rows
from ..runtime.devices import move
from ..runtime.torch_private import base_of, is_output_of_ddp, storage_id, versions
from .entries import values_to_log
from .rules import RULES, arguments_of, divisor, reduction_in
from .sums import widen, zero_of

# Levels: what a tensor depends on.
_OF_NOTHING = 0
_OF_SUMS = 1
_OF_ROWS = 2
_OF_BOTH = 3  # on rows and on sums of them, or in an unknown way
OVER_NUMBER = "a sum over a number"
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
_SIGNS = {"add": "+", "sub": "-", "rsub": "-", "mul": "*", "div": "/"}
# Values of a tensor, as Python objects.
_READS = {"item", "int", "float", "index", "tolist", "numpy", "array"}
# Their size depends on values.
_SELECTIONS = {"nonzero", "argwhere", "masked_select", "unique", "bincount"}
_BOUNDS = {"clamp", "clamp_min", "clip", "max", "maximum"}
# Another tensor gives them its type and its device.
_CONVERSIONS = {"to", "type", "type_as", "float", "double", "cpu", "cuda", "as_tensor"}
# Operations of one tensor that keep the sum of its elements.
_UNCHANGED = _CONVERSIONS | {"view", "reshape", "squeeze", "clone", "pos", "detach"}
_LINEAR = _UNCHANGED | {"neg", "sum", "mean", "add", "sub", "rsub", "stack", "cat"}
_REDUCTIONS = {"sum", "nansum", "count_nonzero", "mean", "nanmean"}
_NEW = {"new_zeros", "zeros_like", "new_tensor", "new_full", "new_ones", "ones_like", "full_like"}
_CREATIONS = _NEW | {"tensor", "as_tensor", "zeros", "ones", "full", "scalar_tensor"}
_PROPERTIES = {"__get__", "size", "dim"}  # They may be read, as in a model.
_INDICES = slice, int, type(None), type(...)  # They select elements that no value tells.
_WRITES = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"}


@dataclasses.dataclass(frozen=True)
class Value(containers.Leaf):
    """The place of a tensor in a formula. Parameters of the criterion have -1, -2, ..."""

    number: int


@dataclasses.dataclass(frozen=True, eq=False)
class Constant(containers.Leaf):
    """A tensor that does not depend on the rows."""

    tensor: Tensor
    text: str


class Unknown(containers.Leaf):
    """A result that is no function of sums."""


class Operation(NamedTuple):
    """An operation of a formula, with places for its tensors."""

    function: Any
    name: str
    arguments: tuple[Any, Any]  # positional ones, and those by name
    results: tuple[int, ...]
    writes: bool  # to its first argument
    text: str = ""  # in place of that of the arguments


class Statistic(NamedTuple):
    """A sum over the rows of a shard. Counts with one key are equal by their construction."""

    kind: str  # the function that computes it
    value: Any  # a tensor or a number
    number: int  # its place in the formula
    key: Hashable = None  # None: not a count
    is_bounded: bool = False  # A quotient has a lower bound of the count.


class Mean(NamedTuple):
    """A linear combination of sums over counts that are equal, or of undivided sums."""

    count: int | None = None  # the place of a count, or None
    key: Hashable = None
    least: float = 0.0  # the lower bound of the count
    is_count: bool = False  # It is the count itself.
    has_constant: bool = False

    @property
    def bound(self) -> float:
        """The lower bound of the divisor. Sums that are not divided have no count."""
        return 1.0 if self.count is None else self.least


_ZERO, _FIXED = "zero", "a constant"


@dataclasses.dataclass(frozen=True, eq=False)
class Formula:
    """The operations that compute the result of a criterion from statistics.

    Args:
        result: the result, with a place for each tensor.
        inputs: the places of the statistics.
        kinds: the functions that compute them.
        keys: the keys of those that are counts, as numbers.
        counts: the places of counts without a bound. Nothing is counted if all are zero.
        outside: parameters that the criterion does not have itself, by their places.
        losses: the entries of the result that are losses.
        logged: the others, values to log.
    """

    result: Any
    operations: Sequence[Operation]
    inputs: Sequence[int]
    kinds: Sequence[str]
    keys: dict[int, int]
    counts: set[int]
    outside: dict[int, Tensor]
    losses: Sequence[str]
    logged: Sequence[str]

    @classmethod
    def of(
        cls,
        structure: Any,
        result: Any,
        operations: Sequence[Operation],
        statistics: Sequence[Statistic],
        outside: dict[int, Tensor],
    ) -> "Formula":
        """Returns the formula of a result, whose tensors have their places in ``structure``."""
        counts = [each for each in statistics if each.key is not None]
        distinct = [*dict.fromkeys(each.key for each in counts)]
        logged = values_to_log(result)
        entries = [place for place, leaf in containers.leaves(result) if leaf is not None]
        return cls(
            structure,
            operations,
            [each.number for each in statistics],
            [each.kind for each in statistics],
            {each.number: distinct.index(each.key) for each in counts},
            {each.number for each in counts if not each.is_bounded},
            outside,
            [place for place in entries if place not in logged],
            [place for place in entries if place in logged],
        )

    def compute(self, sums: Sequence[Tensor], parameters: Sequence[Tensor]) -> Any:
        """Returns the result for sums, with their graph and that of ``parameters``."""
        values: dict[int, Any] = dict(zip(self.inputs, sums, strict=True))
        for number, parameter in itertools.chain(
            self.outside.items(), ((-1 - place, each) for place, each in enumerate(parameters))
        ):
            values[number] = move(parameter, sums[0].device) if sums else parameter

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, Value):
                return values[leaf.number]
            if not isinstance(leaf, Constant):
                return leaf
            is_scalar = leaf.tensor.is_cpu and not leaf.tensor.dim()
            return leaf.tensor if is_scalar or not sums else move(leaf.tensor, sums[0].device)

        for each in self.operations:
            args, kwargs = containers.map_leaves(fill, each.arguments)
            if each.writes:
                args = (args[0].clone(), *args[1:])
            result = each.function(*args, **kwargs)
            values.update(zip(each.results, _tensors(result, args), strict=True))
        return containers.map_leaves(fill, self.result)

    def times(self, factor: Tensor | float) -> "Formula":
        """Returns the formula of a single loss times a factor."""
        number = 1 + max([*self.inputs, *(max(each.results) for each in self.operations)], default=0)
        tensor = torch.as_tensor(factor)
        arguments = (self.result, Constant(tensor, "the scale")), {}
        product = Operation(torch.mul, "mul", arguments, (number,), writes=False)
        operations = [*self.operations, product]
        return dataclasses.replace(self, result=Value(number), operations=operations)

    def inputs_of(self, place: str) -> set[int]:
        """Returns the places of the statistics that an entry of the result needs."""
        leaf = dict(containers.leaves(self.result))[place]
        return needed([leaf], self.operations).intersection(self.inputs)

    def text_of(self, places: Iterable[str]) -> str:
        """Returns entries of the result as text. It has all numbers, and is equal for other rows."""
        texts = dict(zip(self.inputs, self.kinds, strict=True))
        for each in self.operations:
            text = each.text or _text_of(each, texts)
            for position, number in enumerate(each.results):
                texts[number] = text if len(each.results) == 1 else f"{text}[{position}]"
        leaves = dict(containers.leaves(self.result))
        return ", ".join(_text(leaves[place], texts) for place in places)

    def mean_of(self, places: Iterable[str]) -> Mean | None:
        """Returns the mean that the sum of some entries is, or None if it is none over one count."""
        found: dict[int, Any] = dict.fromkeys(self.outside, _FIXED)
        for number in self.inputs:
            key = self.keys.get(number)
            found[number] = Mean() if key is None else Mean(number, key, is_count=True)
        for each in self.operations:
            mean = _mean_of(each, found)
            found.update(dict.fromkeys(each.results, mean))
        leaves = dict(containers.leaves(self.result))
        whole = _add([_kind_of(leaves[place], found) for place in places])
        is_mean = isinstance(whole, Mean) and not (whole.least and whole.has_constant)
        return whole if is_mean and not whole.is_count else None


def needed(leaves: Iterable[object], operations: Sequence[Operation]) -> set[int]:
    """Returns the places that some leaves are computed of, with their own."""
    places = {leaf.number for leaf in leaves if isinstance(leaf, Value)}
    for each in reversed(operations):
        if places.intersection(each.results):
            places.update(value.number for value in _values(each.arguments))
    return places


def _values(arguments: object) -> Iterator[Value]:
    return (leaf for _, leaf in containers.leaves(arguments) if isinstance(leaf, Value))


def _tensors(result: Any, args: Any) -> list[Tensor]:
    """Returns the tensors in the result of an operation. It may have written to its first argument."""
    if result is None:
        result = args[:1]
    return [*filter(torch.is_tensor, result if isinstance(result, (tuple, list)) else [result])]


def _text_of(operation: Operation, texts: dict[int, str]) -> str:
    parts = [_text(leaf, texts) for _, leaf in containers.leaves(operation.arguments)]
    sign = _SIGNS.get(operation.name)
    if operation.name in _UNCHANGED:
        return parts[0]
    if sign is None or len(parts) != 2:
        return f"{operation.name}({', '.join(parts)})"
    if operation.function.__name__.startswith("__r"):
        parts.reverse()
    first, second = (f"({part})" if sign in "*/" and " " in part else part for part in parts)
    return f"{first} {sign} {second}"


def _text(leaf: object, texts: dict[int, str]) -> str:
    if isinstance(leaf, Value):
        return texts.get(leaf.number, "a parameter")
    return leaf.text if isinstance(leaf, Constant) else str(leaf)


def _kind_of(leaf: object, found: dict[int, Any]) -> Any:
    """Returns the mean that a leaf is, or what else it is; None if it is neither."""
    if isinstance(leaf, Value):
        return found.get(leaf.number, _FIXED)
    return _ZERO if isinstance(leaf, (int, float)) and not leaf else _FIXED


def _add(kinds: Sequence[Any]) -> Any:
    """Returns the kind of a sum."""
    means = [kind for kind in kinds if isinstance(kind, Mean)]
    if None in kinds:
        return None
    if not means:
        return _FIXED if _FIXED in kinds else _ZERO
    has_constant = _FIXED in kinds or any(mean.has_constant for mean in means)
    alike = {mean._replace(count=None, has_constant=False) for mean in means}
    is_undivided = means[0].key is None or means[0].is_count
    if len(alike) > 1 or (has_constant and is_undivided):
        return None
    return means[0]._replace(has_constant=has_constant)


def _mean_of(operation: Operation, found: dict[int, Any]) -> Any:
    """Returns the kind of the result of an operation."""
    (args, kwargs), name = operation.arguments, operation.name
    leaves = [leaf for _, leaf in containers.leaves((args, kwargs))]
    kinds = [_kind_of(leaf, found) for leaf in leaves if isinstance(leaf, (Value, Constant))]
    if all(kind in (_ZERO, _FIXED) for kind in kinds):
        return _FIXED
    first, second = ([_kind_of(leaf, found) for leaf in args] + [None, None])[:2]
    if name in _UNCHANGED:
        return kinds[0]
    if name in _BOUNDS and isinstance(first, Mean) and first.is_count:
        settings = {**dict(zip(("input", "min", "max"), args, strict=False)), **kwargs}
        least = settings.get("min", settings.get("other"))
        least = float(least.tensor) if isinstance(least, Constant) and least.tensor.is_cpu else least
        is_bound = isinstance(least, (int, float)) and settings.get("max") is None
        return first._replace(least=float(least)) if is_bound and not first.least else None
    if any(isinstance(kind, Mean) and kind.is_count for kind in kinds[: 2 - (name == "div")]):
        return None
    if name in ("add", "sub", "rsub"):
        return _add([_kind_of(leaf, found) for leaf in args]) if not kwargs else None
    if name in _LINEAR:
        return _add(kinds)
    if name == "mul" and second is not None:
        first, second = (first, second) if isinstance(first, Mean) else (second, first)
        return second if second == _ZERO else first if second == _FIXED else None
    if name != "div" or kwargs or first is None:
        return None
    if isinstance(second, Mean):
        is_quotient = second.is_count and first == Mean()
        return second._replace(is_count=False) if is_quotient else None
    return first if second == _FIXED else None


class Facts(NamedTuple):
    """Facts about a tensor."""

    level: int
    number: int | None = None  # its place in the formula
    statistic: int | None = None  # the number of the statistic that it is, or bounds
    is_bounded: bool = False
    is_sum: bool = False  # It is a combination of undivided sums. A number divides it by a count.
    divided: tuple[int, float] | None = None  # The place of a sum, and the number that divided it.
    is_selected: bool = False  # The size depends on values.
    is_copy: bool = False  # A copy in an autograd function; only that of DDP hands a gradient on.
    is_target: bool = False  # It does not depend on the outputs.
    is_loss: bool = False  # It is computed of a quotient that depends on them.
    text: str = "a tensor"  # of a constant


_UNKNOWN = Facts(_OF_ROWS)


class SumNotes(TorchFunctionMode):
    """Notes the sums over the rows that are computed in its block, and the operations on them.

    ``parameters`` of the criterion, those ``outside`` of it and ``constants`` do not depend on the
    rows, and ``targets`` not on the outputs.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        outside: Sequence[Tensor],
        constants: object,
        output: object,
        targets: object,
        rows: int,
    ) -> None:
        super().__init__()
        self.statistics: list[Statistic] = []
        self.has_unknown_count = False
        self._operations: list[Operation] = []
        self._outside: dict[int, Tensor] = {}
        self._numbers = itertools.count()
        self._has_graph = torch.is_grad_enabled()
        # No value of the batch is a Python number.
        self._knows_numbers = not _has_entries((output, targets), rows)
        self._held: list[Tensor] = []  # Their storages identify counts.
        self._facts = WeakIdKeyDictionary()
        for tensor in containers.tensors_in(targets):
            self._facts[tensor] = Facts(_OF_ROWS, is_target=True)
        for tensor in containers.tensors_in(constants):
            self._facts[tensor] = Facts(_OF_NOTHING, is_target=True)
        for place, parameter in enumerate(parameters):
            self._facts[parameter] = Facts(_OF_NOTHING, -1 - place, is_target=True)
        for parameter in outside:
            self._capture(parameter)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch, and notes a sum, or an operation on sums."""
        kwargs = kwargs or {}
        if func is sum_over_rows:  # The rows of a shard are computed of it.
            return func(*args, **kwargs)
        if func in RULES or not self._is_unknown(func, args, kwargs):
            return self._call(func, args, kwargs)
        result = func(*args, **kwargs)
        is_tensor = isinstance(result, Tensor)
        if is_tensor and result.dim() and result not in self._facts:
            return result
        if not is_tensor and getattr(func, "__name__", "") in _PROPERTIES:
            return result
        return self._call(func, args, kwargs, result)

    def _is_unknown(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Returns True for most operations of a model: an argument may depend on the rows, and none
        is a sum.
        """
        name = str(getattr(func, "__name__", "")).strip("_")
        if name in _SELECTIONS | {"setitem", "where"}:
            return False
        index = args[1] if name == "getitem" else None
        indices = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(each, _INDICES) for each in indices):
            return False
        is_unknown = False
        for part in _flatten((*args, *kwargs.values())):
            facts = self._facts.get(part) if isinstance(part, Tensor) else None
            is_used = facts is not None and (facts.level != _OF_NOTHING or facts.is_selected)
            if is_used or isinstance(part, (list, tuple, dict)):
                return False
            if facts is None and isinstance(part, Tensor):
                is_unknown |= not isinstance(part, nn.Parameter)
        return is_unknown

    def _call(self, func: Any, args: Any, kwargs: Any, *results: Any) -> Any:
        """Calls a function, which may have returned one of ``results``, and notes it."""
        whole_name = str(getattr(func, "__name__", ""))
        name = _NAMES.get(whole_name.strip("_"), whole_name.strip("_"))
        tensors = containers.tensors_in((args, kwargs))
        if name in _CONVERSIONS and args and isinstance(args[0], Tensor):
            tensors = tensors[:1]
        level = self._level_of(tensors)
        # The backward of an autograd function is not that of the sums in its forward.
        is_outside = torch.is_grad_enabled() == self._has_graph
        if func in RULES and level == _OF_ROWS and is_outside:
            return self._loss(func, arguments_of(func, *args, **kwargs))
        has_places = any(self._of(tensor).number is not None for tensor in tensors)
        arguments = None
        if has_places and level <= _OF_SUMS and is_outside:
            arguments = containers.map_tensors(self._place, (tuple(args), kwargs))
        first, second = (*args, *kwargs.values(), None, None)[:2]
        writes = whole_name in _WRITES or (whole_name[-1:] == "_" and whole_name[:1] != "_")
        if writes and level:
            self._keep_values(first)
        result = results[0] if results else func(*args, **kwargs)
        self._note_read(name, tensors, result)
        made = _tensors(result, args)
        if arguments is not None and made:
            operation = Operation(func, name, arguments, (), writes)
            self._note(operation, level, first, second, made)
        else:
            for tensor in made:
                self._learn(tensor, self._facts_of(name, args, tensors, level, tensor))
        if writes and level and isinstance(first, Tensor) and base_of(first) is not first:
            self._learn(base_of(first), _UNKNOWN if level == _OF_ROWS else Facts(_OF_BOTH))
        is_reduction = name in _REDUCTIONS and level == _OF_ROWS and is_outside
        if is_reduction and made and not result.dim() and first.dim():
            self._reduce(name, first, result)
        return result

    def _of(self, value: object) -> Facts:
        """Returns what is known of a value."""
        if not isinstance(value, Tensor):
            return Facts(_OF_NOTHING, is_target=True)
        facts: Facts | None = self._facts.get(value)
        if facts is None and isinstance(value, nn.Parameter):
            facts = self._capture(value)
        if facts and facts.is_copy and not is_output_of_ddp(value):
            return Facts(_OF_BOTH)
        return facts or _UNKNOWN

    def _capture(self, parameter: Tensor) -> Facts:
        """Gives a place to a parameter that the criterion does not have itself."""
        number = next(self._numbers)
        self._outside[number] = parameter
        facts = self._facts[parameter] = Facts(_OF_NOTHING, number, is_target=True)
        return facts

    def _level_of(self, tensors: Iterable[object]) -> int:
        levels = {self._of(tensor).level for tensor in tensors}
        return _OF_BOTH if {_OF_SUMS, _OF_ROWS} <= levels else max(levels, default=_OF_NOTHING)

    def _learn(self, tensor: Tensor, facts: Facts) -> None:
        """Keeps the facts about a tensor, if they are not those of an unknown one."""
        if facts == _UNKNOWN:
            self._facts.pop(tensor, None)
        else:
            self._facts[tensor] = facts

    def _place(self, tensor: Tensor) -> Value | Constant:
        """Returns the place of a tensor, or a copy of a constant, which may be written to."""
        facts = self._of(tensor)
        if facts.number is not None:
            return Value(facts.number)
        return Constant(tensor.detach().clone(), facts.text)

    def _facts_of(
        self, name: str, args: Any, tensors: Sequence[Tensor], level: int, result: Tensor
    ) -> Facts:
        """Returns the facts about a result that is not in the formula."""
        is_inside = torch.is_grad_enabled() != self._has_graph
        if name == "clone" and is_inside and level == _OF_SUMS:
            return self._of(args[0])._replace(is_copy=True)
        is_new = name in _NEW and len(tensors) == 1
        if result.numel() == 1 and (is_new or (not tensors and name in _CREATIONS)):
            text = self._text(name, args[1:] if is_new else args)
            return Facts(_OF_NOTHING, text=text, is_target=True)
        if not tensors:
            return _UNKNOWN  # It may be random, or be written to unseen.
        facts = [*map(self._of, tensors)]
        known = Facts(
            level,
            is_selected=_is_selection(name, tensors, result) or any(each.is_selected for each in facts),
            is_target=all(each.is_target for each in facts) and not result.requires_grad,
        )
        if level == _OF_NOTHING:
            return known._replace(text=self._text(name, args))
        is_unknown = level == _OF_SUMS or (is_inside and not result.dim())
        return known._replace(level=_OF_BOTH) if is_unknown else known

    def _text(self, name: str, args: Any) -> str:
        parts = [leaf for _, leaf in containers.leaves(tuple(args))]
        texts = (self._of(part).text if isinstance(part, Tensor) else str(part) for part in parts)
        return f"{name}({', '.join(texts)})"

    def _note_read(self, name: str, tensors: list[Tensor], result: Any) -> None:
        """Notes numbers of Python that may be values of the batch."""
        is_size = type(result) in (int, torch.Size)
        if is_size and any(self._of(tensor).is_selected for tensor in tensors):
            self._knows_numbers = False
        if name in _READS and tensors and not isinstance(result, Tensor):
            facts = self._of(tensors[0])
            # A loss may be read to print it.
            self._knows_numbers &= facts.level == _OF_NOTHING or facts.is_loss

    def _note(
        self, operation: Operation, level: int, first: Any, second: Any, made: Sequence[Tensor]
    ) -> None:
        """Notes an operation that made some tensors from ``first`` and ``second``."""
        name = operation.name
        facts, other = self._of(first), self._of(second)
        is_number = isinstance(second, (int, float)) and bool(second)
        is_division = name == "div" and bool(level) and not operation.arguments[1]
        if is_division and is_number and not operation.writes and (facts.is_sum or facts.divided):
            self._divide(facts, second, made[0])
            return
        if level and self._is_sum(name, operation.arguments, first, second):
            is_target = facts.is_target and other.is_target
            self._sum("sum", widen(made[0]), made[0], is_target=is_target)
            return
        if is_division and other.statistic is not None:
            self._count(other)
        numbers = tuple(next(self._numbers) for _ in made)
        self._operations.append(operation._replace(results=numbers))
        is_bounded = name in _BOUNDS and not other.level
        known = Facts(
            level,
            statistic=facts.statistic if is_bounded or name in _UNCHANGED else None,
            is_bounded=is_bounded or facts.is_bounded,
            is_target=facts.is_target and other.is_target,
            is_loss=(is_division and other.level == _OF_SUMS and not facts.is_target)
            or facts.is_loss
            or other.is_loss,
        )
        for number, tensor in zip(numbers, made, strict=True):
            self._facts[tensor] = known._replace(number=number)

    def _count(self, facts: Facts) -> None:
        """Notes that a sum is a count: it divides another."""
        assert facts.statistic is not None
        statistic = self.statistics[facts.statistic]
        self.statistics[facts.statistic] = statistic._replace(
            key=statistic.key or object(),
            is_bounded=statistic.is_bounded or facts.is_bounded,
        )

    def _is_sum(self, name: str, arguments: Any, first: Any, second: Any) -> bool:
        """Returns True for a combination of undivided sums, which is one."""
        facts, other = self._of(first), self._of(second)
        if name in _UNCHANGED or name == "neg":
            return facts.is_sum
        if name == "mul":
            has_factor = _OF_NOTHING in (facts.level, other.level) and 0 not in arguments[0]
            return has_factor and facts.is_sum != other.is_sum
        if name not in ("add", "sub", "rsub") or arguments[1]:
            return False
        return facts.is_sum and (other.is_sum or (isinstance(second, int) and not second))

    def _add(self, kind: str, value: Any, key: Hashable = None) -> Statistic:
        """Notes a statistic."""
        statistic = Statistic(kind, value, next(self._numbers), key)
        self.statistics.append(statistic)
        return statistic

    def _keep_values(self, written: Tensor) -> None:
        """Copies the statistics in the memory of a tensor that is written to."""
        place = storage_id(written.untyped_storage())
        for number, each in enumerate(self.statistics):
            if isinstance(each.value, Tensor) and storage_id(each.value.untyped_storage()) == place:
                self.statistics[number] = each._replace(value=each.value.clone())

    def _sum(self, kind: str, total: Tensor, result: Tensor, *, is_target: bool = False) -> None:
        """Notes an undivided sum over the rows."""
        number = self._add(kind, total).number
        place = len(self.statistics) - 1
        self._facts[result] = Facts(_OF_SUMS, number, place, is_sum=True, is_target=is_target)

    def _quotient(
        self,
        kind: str,
        total: int,
        count: Any,
        key: Hashable,
        result: Tensor,
        *,
        is_target: bool = False,
    ) -> None:
        """Notes the quotient of a sum and a count."""
        statistic = self._add(kind, count, key)
        number = next(self._numbers)
        arguments = (Value(total), Value(statistic.number)), {}
        text = "" if kind == OVER_NUMBER else kind
        operation = Operation(torch.div, "div", arguments, (number,), writes=False, text=text)
        self._operations.append(operation)
        self._facts[result] = Facts(_OF_SUMS, number, is_loss=not is_target, is_target=is_target)

    def _divide(self, facts: Facts, number: float, result: Tensor) -> None:
        """Divides a sum by a number, which follows from the sizes of the rows."""
        if not self._knows_numbers:
            self.has_unknown_count = True
            self._facts[result] = Facts(_OF_BOTH)
            return
        assert facts.number is not None
        total, before = facts.divided or (facts.number, 1.0)
        count = before * float(number)
        key = "a number", count
        self._quotient(OVER_NUMBER, total, count, key, result, is_target=facts.is_target)
        self._facts[result] = self._facts[result]._replace(divided=(total, count))

    def _reduce(self, name: str, rows: Tensor, result: Tensor) -> None:
        """Notes the sum of all elements of a tensor, or their mean."""
        is_target = self._of(rows).is_target
        if name in ("sum", "nansum", "count_nonzero"):
            self._sum("sum", widen(result), result, is_target=is_target)
            return
        count: Any = rows.numel()
        if name == "mean":
            total: Any = rows.sum(dtype=torch.promote_types(result.dtype, torch.float32))
        else:
            count = rows.isnan().logical_not().sum()
            total = widen(rows.nansum())
        total = self._add(name, total).number
        self._quotient(name, total, count, object(), result, is_target=is_target)

    def _loss(self, function: Any, arguments: dict[str, Any]) -> Tensor:
        """Computes a loss of torch. Of a mean, the sum and the count are noted."""
        mean = sum_and_count(function, arguments)
        name = function.__name__
        if mean is not None:
            total, count = mean
            result = total / count
            key = self._key(function, arguments)
            self._quotient(name, self._add(name, total).number, count, key, result)
            return result
        result = function(**arguments)
        if reduction_in(arguments) == "sum" and not result.dim():
            self._sum(name, widen(result), result)
        else:
            self._learn(result, _UNKNOWN)
        return result

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
            return object()
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

    def formula(self, result: Any) -> Formula:
        """Returns the formula of the result of the criterion, with what it needs alone.

        ``statistics`` are those of the formula then.
        """

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            is_known = leaf.numel() == 1 and self._of(leaf).level <= _OF_SUMS
            return self._place(leaf) if is_known else Unknown()

        structure = containers.map_leaves(place, result)
        places = needed([leaf for _, leaf in containers.leaves(structure)], self._operations)
        operations = [each for each in self._operations if places.intersection(each.results)]
        self.statistics = [each for each in self.statistics if each.number in places]
        outside = {number: each for number, each in self._outside.items() if number in places}
        return Formula.of(structure, result, operations, self.statistics, outside)


def _is_selection(name: str, tensors: Sequence[Tensor], result: Any) -> bool:
    """Returns True for an operation whose result has a size that depends on values."""
    if name == "getitem":
        return any(index.dtype == torch.bool for index in tensors[1:])
    return name in _SELECTIONS or (name == "where" and len(tensors) == 1)


def _flatten(arguments: Iterable[Any]) -> Iterator[Any]:
    """Yields arguments, and the entries of lists and tuples among them."""
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            yield from argument
        else:
            yield argument


def _has_entries(value: Any, rows: int) -> bool:
    """Returns True for a structure with a list of an entry for each row, such as strings or
    mappings.
    """
    if isinstance(value, list):
        return not all(
            isinstance(entry, Tensor) and entry.dim() and len(entry) == rows for entry in value
        )
    container = containers.open_container(value)
    return container is not None and any(_has_entries(child, rows) for child in container.children)


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
