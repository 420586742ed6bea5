"""Means that a criterion of the user computes inside.

Each becomes one sum over one count of the whole batch. The criterion runs as it is written, and its
terms are recorded::

    loss = F.cross_entropy(output, labels) + 0.5 * (output - values).pow(2).mean()

    shard 0   total 1 / count 1 + 0.5 * total 2 / count 2
    shard 1   total 1 / count 1 + 0.5 * total 2 / count 2
    batch     sum of totals 1 / sum of counts 1 + 0.5 * sum of totals 2 / sum of counts 2

A result must be a linear combination of such means, with coefficients that are numbers, parameters
or buffers of the criterion. Any other result is refused: nothing tells how that of the whole batch
follows from those of the shards. The rows of a mean may still depend on each other, as in a
contrastive loss. So the terms of halves of some shards are compared with those of all of them
together.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ..batch import containers
from ..batch.outputs import PerReplica
from ..batch.rows import Shard
from ..replicas.all_rows import sum_over_rows
from ..runtime.devices import move
from ..runtime.torch_private import is_output_of_ddp, storage_id, versions
from .copies import Calls, CriterionCopies, ShardLoss
from .coupled import ROWS_TO_CHECK, LossOfSums, ShardStatistics
from .entries import LoggedMeans, places_beside_loss, places_to_log, refuse_total
from .rules import RULES, arguments_of, divisor, reduction_in, refuse_coupled, unwrap
from .sums import Bound, LossSum, add_numbers, add_up, divide, weighted_sum, widen, zero_of

# levels: what a tensor depends on
_OF_NOTHING = 0
_OF_TARGETS = 1
_OF_OUTPUTS = 2
_OF_ALL_ROWS = 3  # a sum over all rows, which is no divisor of a shard
_CONSTANT = "a constant"
_OVER_NUMBER = "a sum over a number"
# Kinds of values beside the loss that need not add up over the rows.
_NO_MEAN = "a value that is not a sum of known means"
_NUMBER = "a number that is equal for all rows"
_SEVERAL = "several"  # the key of a mean that takes two passes in micro-batches
# Names of one operation, without underscores.
_NAMES = {
    "radd": "add",
    "iadd": "add",
    "rmul": "mul",
    "imul": "mul",
    "multiply": "mul",
    "isub": "sub",
    "subtract": "sub",
}
_NAMES |= {
    "truediv": "div",
    "itruediv": "div",
    "true_divide": "div",
    "divide": "div",
    "negative": "neg",
}
_SIGNS = {"add": (1, 1), "sub": (1, -1), "rsub": (-1, 1), "neg": (-1,)}
# values of a tensor, as Python objects
_READS = {"item", "int", "float", "index", "tolist", "numpy", "array"}
# whose size depends on values
_SELECTIONS = {"nonzero", "argwhere", "masked_select", "unique", "bincount"}
_BOUNDS = {"clamp", "clamp_min", "clip", "max", "maximum"}
# Operations that keep the sum of the elements and its gradient, and a mean, which divides it.
_UNCHANGED = {
    "to",
    "type",
    "type_as",
    "float",
    "double",
    "cpu",
    "cuda",
    "view",
    "reshape",
    "squeeze",
    "clone",
    "pos",
}
_UNCHANGED |= {"sum", "mean", "as_tensor"}
_NEW = {"new_zeros", "zeros_like", "new_tensor", "new_full", "new_ones", "ones_like", "full_like"}


class UnknownMeanError(ValueError):
    """A criterion is not a linear combination of means."""


class Term(NamedTuple):
    """A mean: its sum and its count, and its coefficient in a linear combination."""

    kind: str  # the function that computes it
    total: Tensor
    weight: Any  # a number or a tensor; None: a sum that is not divided
    # equal for terms that have one count by their construction; None: zero or a constant, which
    # takes any
    key: Hashable
    factor: Any = 1.0
    # a number "added" to the count of all rows, and its "least" value
    bounds: tuple[tuple[str, Any], ...] = ()

    @property
    def value(self) -> Tensor:
        """The sum times the coefficient."""
        return torch.mul(widen(self.total), self.factor)

    def describe(self) -> str:
        """Returns the name of the mean, with its coefficient if that is a Python number."""
        has_factor = not isinstance(self.factor, Tensor) and self.factor != 1
        return f"{self.factor:.9g} * {self.kind}" if has_factor else self.kind


Form = list[Term]  # a linear combination


class Facts(NamedTuple):
    """Facts about a tensor that a recorder has seen."""

    level: int
    form: Form | None = None  # the linear combination that the elements add up to
    bounded: tuple[Tensor, Any] | None = None  # the count that was clamped, and its smallest value
    is_selected: bool = False  # The size depends on values.
    is_copy: bool = False  # A copy in an autograd function; only that of DDP hands a gradient on.


_UNKNOWN = Facts(_OF_OUTPUTS)
_PROPERTIES = {"__get__", "size", "dim"}  # They may be read, as in a model.
_INDICES = slice, int, type(None), type(...)  # They select elements that no value tells.


class MeanRecorder(TorchFunctionMode):
    """Records the means that are computed in its block, and the tensors whose elements add up to
    linear combinations of them.

    ``constants`` do not depend on the rows, and ``targets`` not on the outputs. So do the results
    of functions of them alone.
    """

    def __init__(self, constants: Any, output: Any, targets: Any, rows: int) -> None:
        super().__init__()
        self._rows = rows
        self._has_graph = torch.is_grad_enabled()
        self._facts = WeakIdKeyDictionary()
        # no value of the batch is a Python number
        self._knows_numbers = not _has_entries((output, targets), rows)
        self.has_unknown_count = False
        for level, structure in ((_OF_TARGETS, targets), (_OF_NOTHING, constants)):
            self._facts.update(
                (tensor, Facts(level)) for tensor in containers.tensors_in(structure)
            )
        self._held: list[Tensor] = []  # whose storages identify divisors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch, and records a mean, a sum or a linear combination."""
        kwargs = kwargs or {}
        if func in RULES or not self._is_unknown(func, args, kwargs):
            return self._call(func, args, kwargs)
        result = func(*args, **kwargs)
        is_tensor = isinstance(result, Tensor)
        if is_tensor and result.dim() and result not in self._facts:
            return result
        if not is_tensor and getattr(func, "__name__", "") in _PROPERTIES:
            return result
        return self._call(func, args, kwargs, result)

    def _call(self, func: Any, args: Any, kwargs: Any, *results: Any) -> Any:
        """Calls a function, which may have returned one of ``results``, and records it."""
        tensors = containers.tensors_in((args, kwargs))
        # The backward of an autograd function is not that of the sums in its forward.
        depends_on_rows = torch.is_grad_enabled() == self._has_graph and any(
            map(self._level, tensors)
        )
        if func in RULES and depends_on_rows:
            return self._loss(func, arguments_of(func, *args, **kwargs))
        name = str(getattr(func, "__name__", "")).strip("_")
        name = _NAMES.get(name, name)
        form = self._combine(name, args, kwargs) if depends_on_rows else None
        result = results[0] if results else func(*args, **kwargs)
        args = args or tuple(kwargs.values())
        self._note(name, args, tensors, result)
        if not isinstance(result, Tensor):
            return result
        if form is not None:
            form = _times(form, result.numel() / args[0].numel()) if name == "mean" else form
            self._facts[result] = self._of(result)._replace(form=form)
        elif name == "clone" and not depends_on_rows:
            facts = self._of(args[0])
            self._facts[result] = facts._replace(is_copy=True)
        elif depends_on_rows and not result.dim() and result is not args[0]:
            form = self._record(name, result, args)
            bounded = self._bounded(name, args, kwargs)
            self._learn(result, self._of(result)._replace(form=form, bounded=bounded))
        return result

    def _is_unknown(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Returns True for most operations of a model: an argument may depend on the outputs, and
        none is a linear combination.
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
            is_used = facts is not None and (facts.form is not None or facts.is_selected)
            if is_used or isinstance(part, (list, tuple, dict)):
                return False
            if facts is None and isinstance(part, Tensor):
                is_unknown |= not isinstance(part, nn.Parameter)
        return is_unknown

    def _note(self, name: str, args: Any, tensors: list[Tensor], result: Any) -> None:
        """Notes what the result of an operation depends on.

        It may be a tensor that was written in place.
        """
        is_selected = _is_selection(name, tensors, result) or any(
            self._of(tensor).is_selected for tensor in tensors
        )
        if is_selected and type(result) in (int, torch.Size):
            self._knows_numbers = False
        elif name in _READS and not isinstance(result, Tensor):
            # A loss may be read to print it.
            is_loss = (
                self._level(tensors[0]) != _OF_TARGETS and self.terms_of(tensors[0]) is not None
            )
            self._knows_numbers = self._knows_numbers and is_loss
        if name == "setitem":
            result = args[0]
            is_selected = self._of(args[0]).is_selected
        if name in _UNCHANGED and isinstance(args[0], Tensor):
            tensors = args[:1]  # Another tensor gives its type and device.
        for tensor in filter(torch.is_tensor, result if isinstance(result, tuple) else (result,)):
            level = self._level_of_result(name, tensors, tensor)
            self._learn(tensor, Facts(level, is_selected=is_selected))

    def _learn(self, tensor: Tensor, facts: Facts) -> None:
        """Keeps the facts about a tensor, if they are not those of an unknown one."""
        if facts == _UNKNOWN:
            self._facts.pop(tensor, None)
        else:
            self._facts[tensor] = facts

    def _level_of_result(self, name: str, tensors: Sequence[Tensor], result: Tensor) -> int:
        if name == sum_over_rows.__name__:
            return _OF_ALL_ROWS
        is_new = name in _NEW and not result.dim() and len(tensors) == 1
        if not tensors and (result.numel() != 1 or name == "arange"):
            return _OF_OUTPUTS  # An empty tensor may be written to unseen.
        level = _OF_NOTHING if is_new else max(map(self._level, tensors), default=_OF_NOTHING)
        # A model that computes its loss has rows in place of outputs, and parameters.
        is_output = level == _OF_TARGETS and any(tensor.requires_grad for tensor in tensors)
        return _OF_OUTPUTS if is_output else level

    def _of(self, value: object) -> Facts:
        """Returns what is known of a value."""
        facts: Facts | None = self._facts.get(value) if isinstance(value, Tensor) else None
        if facts and facts.is_copy and not is_output_of_ddp(value):
            facts = facts._replace(form=None)
        return facts or Facts(_OF_NOTHING if isinstance(value, nn.Parameter) else _OF_OUTPUTS)

    def _level(self, tensor: Tensor) -> int:
        return self._of(tensor).level

    def _form(self, value: Any) -> Form | None:
        """Returns the linear combination that a number is, or that the elements of a tensor add up
        to, or None.
        """
        form = self._of(value).form
        factor = self._factor(value)
        if form is not None or factor is None:
            return form
        return (
            []
            if _is_zero(factor)
            else [Term(_CONSTANT, torch.tensor(float(self._rows)), self._rows, None, factor)]
        )

    def _factor(self, value: Any) -> Any:
        """Returns a number, or a copy of a tensor that does not depend on the rows as a scalar;
        otherwise None.
        """
        if isinstance(value, (int, float)):
            return value
        is_constant = (
            isinstance(value, Tensor) and value.numel() == 1 and self._level(value) == _OF_NOTHING
        )
        return value.reshape(()).clone() if is_constant else None

    def _combine(self, name: str, args: Any, kwargs: Any) -> Form | None:
        """Returns the linear combination that the elements of the result of an operation add up to,
        or None.
        """
        first, second = (*args, None, None)[:2]
        if name in _UNCHANGED or name == "detach":
            form = self._of(first).form
            # Nothing is lost where there is no graph.
            return _detached(form) if form and name == "detach" and self._has_graph else form
        if name in ("stack", "cat"):
            return self._add_up(first or (), itertools.repeat(1))
        if kwargs:
            return None
        if name in _SIGNS:
            sizes = {value.numel() if isinstance(value, Tensor) else 1 for value in args}
            # others are broadcast
            return self._add_up(args, _SIGNS[name]) if len(sizes) == 1 else None
        if name == "div":
            return self._divide(first, second)
        return self._multiply(first, second) if name == "mul" else None

    def _add_up(self, values: Sequence[Any], signs: Iterable[int]) -> Form | None:
        forms = [form for form in map(self._form, values) if form is not None]
        return (
            [*itertools.chain(*map(_times, forms, signs))]
            if forms and len(forms) == len(values)
            else None
        )

    def _multiply(self, first: Any, second: Any) -> Form | None:
        if self._factor(second) is None:
            first, second = second, first
        form = self._form(first)
        factor = self._factor(second)
        is_empty = _is_zero(factor) and _is_sum(form)
        return None if form is None or factor is None or is_empty else _times(form, factor)

    def _divide(self, value: Any, divisor: Any) -> Form | None:
        form = self._form(value)
        factor = self._factor(divisor)
        if form is None or factor is None or _is_zero(factor):
            return None
        if not isinstance(factor, (int, float)) or not _is_sum(form) or value.numel() != 1:
            return _times(form, 1 / factor)
        if not self._knows_numbers:
            self.has_unknown_count = True
            return None
        if any(term.weight is None for term in form):
            # it may be divided in place
            form = [Term(_OVER_NUMBER, value.reshape(()).clone(), 1.0, None)]
        counts = [term.weight * factor for term in form]
        return [
            term._replace(weight=count, key=("a number", count))
            for term, count in zip(form, counts, strict=True)
        ]

    def _bounded(self, name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Any] | None:
        """Returns the count in a call that bounds it, and its smallest value, or None."""
        settings = {**dict(zip(("input", "min", "max"), args, strict=False)), **kwargs}
        least = (
            self._factor(settings.get("min", settings.get("other"))) if name in _BOUNDS else None
        )
        is_bound = isinstance(args[0], Tensor) and least is not None and settings.get("max") is None
        return (args[0], least) if is_bound else None

    def _record(self, name: str, result: Tensor, args: Any) -> Form | None:
        """Returns the only term of a scalar that depends on the rows: a mean, a sum, a quotient, or
        zero.
        """
        if name == "mul" and any(map(_is_zero, args)):
            # it connects parameters that are not used
            return [Term("zero", result, self._rows, None)]
        if name == "mean":
            total = args[0].sum(dtype=torch.promote_types(args[0].dtype, torch.float32))
            return [Term("mean", total, args[0].numel(), object())]
        if name == "nanmean":
            count = args[0].isnan().logical_not().sum()
            return [Term("nanmean", widen(args[0].nansum()), count, object())]
        if name in ("sum", "nansum", "count_nonzero"):
            return [Term("sum", result, None, None)]
        is_quotient = name == "div" and _is_sum(self._form(args[0])) and isinstance(args[1], Tensor)
        return self._quotient(*args) if is_quotient else None

    def _quotient(self, total: Tensor, divisor: Tensor) -> Form | None:
        count, least = self._of(divisor).bounded or (divisor, None)
        form = self._form(count) or []
        added = [term.factor for term in form if term.kind == _CONSTANT]
        is_of_shard = self._level(count) < _OF_ALL_ROWS
        if not is_of_shard or not _is_sum([term for term in form if term.kind != _CONSTANT]):
            return None
        bounds = [("added", sum(added))] if added else []
        bounds += [] if least is None else [("least", least)]
        # a count of outputs may have a gradient
        is_fixed = not added and self._level(count) < _OF_OUTPUTS and not count.requires_grad
        return [
            Term(
                "quotient",
                total,
                count - sum(added),
                object() if is_fixed else _SEVERAL,
                bounds=tuple(bounds),
            )
        ]

    def _loss(self, function: Any, arguments: dict[str, Any]) -> Tensor:
        """Computes a loss of torch. Of a mean, the sum and the count are recorded."""
        mean = sum_and_count(function, arguments)
        if mean is None:
            result: Tensor = function(**arguments)
            form = [Term("sum", result, None, None)] if reduction_in(arguments) == "sum" else None
        else:
            total, count = mean
            result = total / count
            form = [Term(function.__name__, total, count, self._key(function, arguments))]
        self._facts[result] = Facts(_OF_OUTPUTS, form)
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

    def terms_of(self, loss: Any, *, adds_sums: bool = False) -> list[Term] | None:
        """Returns the terms of a loss with their coefficients, or None if it is not a sum of means.

        With ``adds_sums``, sums that are not divided are means over one.
        """
        form = None if isinstance(loss, Tensor) and loss.numel() != 1 else self._form(loss)
        if form is not None and adds_sums:
            key, bounds = object(), (("least", 1.0),)
            form = [
                term._replace(weight=0.0, key=key, bounds=bounds) if term.weight is None else term
                for term in form
            ]
        return None if form is None or any(term.weight is None for term in form) else form


def _is_sum(form: Form | None) -> bool:
    """Returns True for sums, which may be divided by numbers."""
    return bool(form) and all(
        term.weight is None or term.kind == _OVER_NUMBER for term in form or ()
    )


def _is_selection(name: str, tensors: list[Tensor], result: Any) -> bool:
    """Returns True for an operation whose result has a size that depends on values."""
    if name == "getitem":
        return any(index.dtype == torch.bool for index in tensors[1:])
    return name in _SELECTIONS or (name == "where" and isinstance(result, tuple))


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


def _is_zero(value: object) -> bool:
    """Returns True for a Python number that is zero."""
    return isinstance(value, (int, float)) and not value


def _detached(form: Form) -> Form:
    return [term._replace(total=term.value.detach(), factor=1.0) for term in form]


def _times(form: Form, factor: Any) -> Form:
    return [term._replace(factor=term.factor * factor) for term in form]


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


class MeanName(NamedTuple):
    """The name of a mean, equal in all shards."""

    place: str  # The place of the loss in the result of the criterion.
    number: int
    mean: int  # equal for one mean in several losses
    kind: str
    has_several: bool  # the means of the criterion have several counts
    text: str  # contains the coefficient, if it is a Python number


_ROWS = MeanName("", -1, -1, "", False, ""), "rows"


class FoundMeans(NamedTuple):
    """The output of a model that computes the loss itself: the loss, and the means in it.

    They are compared with those that the criterion computes of halves of ``inputs``.
    """

    loss: Tensor
    means: dict[MeanName, Term]
    inputs: tuple[Any, ...]
    rest: Any = None  # The model returns it too.


class Additive:
    """A criterion whose sums add up over the rows. Its output is the module that it calls."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Tensor:
        """Calls the function."""
        return self._function(*arguments)


def find_means(shard: ShardLoss, *, is_split: bool) -> tuple[Any, dict[MeanName, Term]]:
    """Calls a criterion. Returns its result, and the terms of the losses in it.

    Raises:
        UnknownMeanError: with ``is_split``, if a loss is not a sum of means.
    """
    if isinstance(shard.output, FoundMeans):
        return shard.output.loss, shard.output.means
    module, (_, arguments, settings) = shard.criterion, unwrap(shard.criterion)
    owner = shard.output if isinstance(module, Additive) else module
    constants = (
        [*owner.parameters(), *owner.buffers()]
        if isinstance(owner, nn.Module)
        else (arguments, settings)
    )
    with MeanRecorder(
        constants, shard.output, (shard.targets, shard.kwargs), shard.rows
    ) as recorder:
        result = shard.call()
    beside = places_beside_loss(result)
    pairs: list[tuple[str, Term]] = []
    for place, leaf in containers.leaves(result):
        if leaf is None:
            continue
        terms = recorder.terms_of(leaf, adds_sums=isinstance(module, Additive))
        # A loss is averaged over the ranks, or computed as a whole.
        if shard.collectives.is_used or (terms is None and not is_split):
            terms = [Term("the loss", weighted_sum(leaf, 1), 1, _SEVERAL)]
        if place in beside:
            terms = _terms_beside_loss(leaf, terms, shard.rows)
        if terms is None:
            _refuse_unknown(module, recorder.has_unknown_count, place)
        pairs += [(place, term) for term in terms]
    return result, _with_names(pairs, beside)


def _terms_beside_loss(leaf: object, terms: Form | None, rows: int) -> Form:
    """Returns the terms of a value to log, which need not be a sum of means."""
    if isinstance(leaf, (int, float)):
        total = torch.tensor(float(leaf * rows))
        return [Term(_NUMBER, total, rows, None, bounds=(("square", leaf * leaf),))]
    return [Term(_NO_MEAN, torch.tensor(torch.nan), 0.0, None)] if terms is None else terms


def _with_names(pairs: list[tuple[str, Term]], beside: set[str]) -> dict[MeanName, Term]:
    """Returns the terms of a result by their names. Counts of values to log do not matter."""
    keys = {term.key for place, term in pairs if place not in beside} - {None}
    has_several = len(keys) > 1 or _SEVERAL in keys
    terms: dict[MeanName, Term] = {}
    totals = [id(term.total) for _, term in pairs]
    for number, (place, term) in enumerate(pairs):
        mean = totals.index(id(term.total))
        terms[MeanName(place, number, mean, term.kind, has_several, term.describe())] = term
    return terms


_COUNTS = (
    ", expected a number that follows from the sizes of the rows, as len(errors) does: for a count of some rows, divide by a "
    "tensor, as in errors.sum() / mask.sum().clamp(min=1), or give DataParallelCriterion weight=, a function "
    "(output, *targets) -> scalar that counts them, and minimum=1 for max(count, 1); for a constant, reduction='sum'"
)


def _refuse_unknown(criterion: object, has_unknown_count: bool, place: str) -> NoReturn:
    refuse_coupled(criterion)
    if has_unknown_count:
        raise UnknownMeanError(
            f"the loss{place} of {containers.describe(criterion)} is a sum over a number that was read from values of the batch, "
            f"as int(mask.sum()), len(errors[mask]) or an entry of a list, which may have a lower bound in each shard{_COUNTS}"
        )
    setting = getattr(criterion, "reduction", "mean")
    note = (
        ""
        if setting == "mean"
        else f" (the attribute reduction={setting!r} has no effect on a forward of its own)"
    )
    raise UnknownMeanError(
        f"the loss{place} of {containers.describe(criterion)} is not a sum of known means, so that of several shards of a batch "
        "is unknown, expected losses of torch, such as F.cross_entropy(output, target), and errors.mean(), times numbers: give "
        "DataParallelCriterion weight=, a function (output, *targets) -> scalar that returns the mean's divisor; weight='rows' "
        f"for a mean over rows with equal weights; reduction='sum' for a sum; whole=True if its rows depend on each other{note}"
    )


def single_mean(shard: ShardLoss) -> LossSum:
    """Returns the :class:`LossSum` of a criterion whose means have one count.

    Raises:
        UnknownMeanError: the means have several counts, and had one in the batches before.
    """
    if not shard.rows:
        return LossSum(widen(shard.nothing()), 0.0)
    result, all_terms = find_means(shard, is_split=True)
    places = places_to_log(result)
    terms = {name: term for name, term in all_terms.items() if name.place not in places}
    _refuse_shared(terms)
    if any(name.has_several for name in terms):
        raise UnknownMeanError(
            f"the means of {containers.describe(shard.criterion)} have different counts, and had one in the first batch: "
            f"{', '.join(name.kind for name in terms)}; {_ALWAYS}, a function (output, *targets) -> scalar"
        )
    count = next((term.weight for term in terms.values() if term.key is not None), shard.rows)
    # A constant is a sum over the rows, and joins the sums over another count.
    totals = [
        term.value * (count / shard.rows) if term.kind == _CONSTANT else term.value
        for term in terms.values()
    ]
    names = {(name, "total"): term.total for name, term in all_terms.items()}
    total = functools.reduce(torch.add, totals or [shard.nothing()])
    return LossSum(total, count, names, logged=_logged(places, all_terms))


def _logged(places: set[str], terms: dict[MeanName, Term]) -> LoggedMeans:
    """Returns the values of a shard to log."""
    logged: dict[str, list[LossSum] | None] = {}
    for name, term in terms.items():
        if name.place not in places or term.kind == _NUMBER:
            continue
        bounds = dict(term.bounds)
        if term.kind == _NO_MEAN or "added" in bounds:
            logged[name.place] = None
            continue
        bound = Bound(float(bounds.get("least", 0.0)))
        means = logged.get(name.place) or []
        logged[name.place] = [*means, LossSum(term.value.detach(), term.weight, bound=bound)]
    return logged


def _refuse_shared(names: Iterable[MeanName]) -> None:
    """Raises ``ValueError`` if a mean is in several losses."""
    places: dict[int, str] = {}
    for name in names:
        first = places.setdefault(name.mean, name.place)
        if first != name.place:
            refuse_total(f"the same {name.kind} in {first} and {name.place}")


_ALWAYS = "expected the same means times the same numbers for all rows: compute each always, or give weight="


class LossOfMeans(LossOfSums):
    """The loss of an update that is a sum of means.

    Its statistics are their sums, with coefficients, and counts.

    Once a batch has shown that all means have one count, :func:`single_mean` computes the loss in
    one pass.
    """

    def __init__(
        self, copies: CriterionCopies, home: torch.device, *, is_split: bool = True
    ) -> None:
        super().__init__(copies, home, is_split=is_split)
        self._to_log: set[str] = set()
        # All entries, before the second pass tells which are losses.
        self._entries: dict[str, Tensor | None] = {}

    @property
    def has_one_count(self) -> bool:
        """True if an update that was split has shown one count for all means."""
        return (
            self.is_split
            and bool(self._total)
            and not any(name.has_several for name, _ in self._total)
            and (not self.least or len(self._places) == 4)  # a bounded mean alone
        )

    @property
    def _places(self) -> list[tuple[MeanName, str]]:
        """The statistics of the losses, without those of values to log."""
        return [place for place in self._total if place[0].place not in self._to_log]

    @property
    def least(self) -> float:
        """The lower bound of the only count."""
        return max(
            (float(self._mean(*place)) for place in self._places if place[1] == "least"),
            default=0.0,
        )

    @functools.cached_property
    def _is_empty(self) -> bool:
        """True if nothing was counted. To read the counts waits for the device."""
        counts = [self._count(name) for name, kind in self._total if kind == "count"]
        return bool(counts) and not any(map(bool, counts))

    def hand_back_parts(self, parts: list[Any]) -> list[LossSum]:
        """Returns a loss for each part.

        They have no weight if nothing was counted, so that nothing is updated.
        """
        part = next((part for part in parts if part.tensors), None)
        if part is not None and self._entries:
            self._leave_out(part)
        losses = super().hand_back_parts(parts)
        if self._is_empty:
            losses = [dataclasses.replace(loss, weight=0.0) for loss in losses]
        return losses

    def _values_to_log(self, result: object) -> LoggedMeans:
        """Returns the values beside the loss of all rows.

        Without a graph, nothing tells losses from other entries: the second pass does.
        """
        self._to_log = places_to_log(result)
        entries = dict(containers.leaves(result))
        self._entries = entries if len(entries) > 1 and not self._to_log else {}
        logged: dict[str, Sequence[LossSum] | None] = {**super()._values_to_log(result)}
        for name, _ in self._total:
            if name.kind == _NO_MEAN:
                logged[name.place] = None
            elif name.kind == _NUMBER:
                logged.pop(name.place, None)
        return logged

    def _leave_out(self, part: ShardStatistics) -> None:
        """Takes entries without a gradient out of the loss: they are values to log."""
        names = [
            name
            for (name, kind), tensor in part.tensors.items()
            if kind == "total" and tensor.requires_grad
        ]
        _refuse_shared(names)
        untrained = self._entries.keys() - {name.place for name in names}
        logged: dict[str, Sequence[LossSum] | None] = {}
        for place in untrained if names else ():
            value = self._entries[place]
            if value is not None:
                logged[place] = [LossSum(value.detach(), 1.0)]
                self._loss = self._loss - self._is_reporter * value.detach().to(self._loss)
        self._entries = {}
        self._logged = logged

    def finish(self, nothing: Tensor) -> Any:
        """Returns the loss of all statistics, as in :class:`LossOfSums`."""
        result = super().finish(nothing)
        for name, kind in self._total:
            differs = False
            if kind == "square":
                number = self._mean(name, "total")
                differs = not number.square().isclose(self._mean(name, kind))
            if name.kind == _NO_MEAN or differs:
                _refuse_unknown(self.copies.criterion, False, name.place)
        return result

    def _statistics(self, shard: ShardLoss) -> ShardStatistics:
        nothing = shard.nothing()
        if not shard.rows:
            return ShardStatistics({}, None, nothing)
        result, terms = find_means(shard, is_split=self.is_split)
        numbers: dict[Any, Any] = {_ROWS: shard.rows}
        for name, term in terms.items():
            numbers |= {(name, "total"): term.value, (name, "count"): term.weight}
            numbers |= {(name, kind): bound * shard.rows for kind, bound in term.bounds}
        tensors = {place: add_up([number], nothing.device) for place, number in numbers.items()}
        structure = containers.map_leaves(
            lambda leaf: None if leaf is None else containers.Leaf(), result
        )
        return ShardStatistics(tensors, structure, nothing)

    def _finish(self) -> Any:
        losses: dict[str, Tensor] = {}
        for name in [name for name, kind in self._total if kind == "total"]:
            value = self._total[name, "total"]
            mean = divide(value, self._count(name).to(value.dtype))
            losses[name.place] = losses[name.place] + mean if name.place in losses else mean

        def fill(place: str, values: list[Any]) -> Any:
            loss = losses.get(place, torch.zeros(()))
            return (
                None if values[0] is None else move(loss, self.copies.output_device or loss.device)
            )

        return containers.zip_leaves(fill, [self._structure])

    def _mean(self, name: MeanName, kind: str) -> Tensor:
        """Returns the mean of a number over the shards, which have added it times their rows."""
        return self._total[name, kind] / self._total[_ROWS]

    def _count(self, name: MeanName) -> Tensor:
        """Returns the count of all rows that a mean divides by, within its bounds."""
        count = self._total[name, "count"]
        if (name, "added") in self._total:
            count = count + self._mean(name, "added")
        return (
            torch.maximum(count, self._mean(name, "least"))
            if (name, "least") in self._total
            else count
        )

    def check(self, statistics: Sequence[dict[Any, Tensor]], calls: Calls) -> None:
        """Compares the names of the means of all shards too."""
        self._check_shapes([each for each in statistics if each])
        super().check(statistics, calls)

    def _sample(self, output: PerReplica, shard: Shard) -> None:
        refuse_coupled(self.copies.criterion)
        if isinstance(output[0], FoundMeans):
            output = output.map(lambda result: result.inputs)
            self._most = ROWS_TO_CHECK  # The model runs on them.
        super()._sample(output, shard)

    def compare_sums(self, samples: Sequence[dict[Any, Tensor]], times: int = 1) -> None:
        """Compares the means, without values beside the loss that are none."""
        means = []
        for sample in samples:
            places = [place for place in sample if place[0].kind not in (_NO_MEAN, _NUMBER)]
            means.append({place: sample[place] for place in places})
        super().compare_sums(means, times)

    def _kind(self, place: Any) -> Hashable:
        kind: str = place[0].kind
        return kind

    def _name(self, number: int, place: Any) -> str:
        return f"the {place[1]} of {place[0].text}"

    def _check_shapes(self, parts: Sequence[dict[Any, Tensor]]) -> None:
        for part in parts:
            if [*part] != [*parts[0]]:
                first, other = (
                    ", ".join(name.text for name, kind in each if kind == "total")
                    for each in (parts[0], part)
                )
                raise UnknownMeanError(
                    f"the criterion computes {first} for some rows, and {other} for others; {_ALWAYS}"
                )

    def _refuse(self, reason: str, cause: Exception | None = None) -> NoReturn:
        is_of_number = reason.startswith("the count of") and _OVER_NUMBER in reason
        advice = _COUNTS if is_of_number else _DEPENDENT
        raise UnknownMeanError(
            f"the loss of {containers.describe(self.copies.criterion)} does not add up over the rows: {reason}{advice}"
        ) from cause


class ExactLossOfMeans(LossOfMeans):
    """A :class:`LossOfMeans` whose sums are the same for any order of the parts, on any ranks."""

    def __init__(
        self, copies: CriterionCopies, home: torch.device, *, is_split: bool = True
    ) -> None:
        super().__init__(copies, home, is_split=is_split)
        self._numbers: dict[Any, list[Tensor]] = {}

    def _add(self, parts: list[ShardStatistics]) -> None:
        super()._add(parts)
        for part in parts:
            for place, number in part.tensors.items():
                self._numbers.setdefault(place, []).append(number)

    def _sum_over_ranks(self, nothing: Tensor) -> list[int]:
        """Sums the statistics of all ranks, without a graph. Returns the ranks with rows."""
        form = {place: total.to("meta") for place, total in self._total.items()}
        numbers = {place: [*map(float, parts)] for place, parts in self._numbers.items()}
        everywhere = enumerate(self._gather((self._structure, form, numbers)))
        by_rank = {rank: parts for rank, parts in everywhere if parts[1]}
        self._check_shapes([form for _, form, _ in by_rank.values()])
        for self._structure, form, _ in [*by_rank.values()][-1:]:
            for place, like in form.items():
                everyone = itertools.chain(*(parts[2][place] for parts in by_rank.values()))
                total = add_numbers([*everyone])
                self._total[place] = torch.full_like(like, total, device=self.home)
        return [*by_rank]


_DEPENDENT = (
    ". The rows depend on each other, or it draws random numbers: give DataParallelCriterion whole=True; "
    "AdditiveLoss(statistics, finish) for a function of sums; weight=, a function (output, *targets) -> scalar, for a mean; or, "
    "if each shard pads to its own longest row, write (errors * mask).sum() / mask.sum()"
)
