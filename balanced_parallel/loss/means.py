"""Means that a criterion of the user computes inside. Each becomes one sum over one count of the whole batch.

    loss = F.cross_entropy(output, labels) + 0.5 * (output - values).pow(2).mean()

    shard 0   total 0 / count 0 + 0.5 * total 1 / count 1      the criterion runs as it is written, and its terms are recorded
    shard 1   total 0 / count 0 + 0.5 * total 1 / count 1
    batch     sum of totals 0 / sum of counts 0 + 0.5 * ...

A result must be a linear combination of such means, with coefficients that are numbers, parameters or buffers of the criterion.
Any other result is refused: nothing tells how that of the whole batch follows from those of the shards. The rows of a mean may
still depend on each other, as in a contrastive loss. So the terms of the first batch are compared with those of its halves.
"""

import collections
import functools
import sys
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ..batch import containers
from ..batch.outputs import PerReplica
from ..batch.rows import Shard
from ..runtime.collectives import world_size
from ..runtime.devices import move
from ..runtime.torch_private import storage_id, versions
from .coupled import LossOfSums, ShardStatistics
from .rules import RULES, arguments_of, divisor, reduction_in, refuse_coupled, unwrap
from .sums import LossSum, ShardLoss, add_up, divide, weighted_sum, widen

Name = tuple[str, int, int]  # a place in the code, and the number and the count of the means that are computed there
Form = dict[Name, Any]  # coefficients of the terms by name
_OF_NOTHING, _OF_TARGETS, _OF_OUTPUTS = 0, 1, 2  # levels: what a tensor depends on
_SEVERAL = "several"  # the divisor of a mean that takes two passes in micro-batches
_CONSTANT = "a constant", 0, 1  # the name of the constant in a linear combination
_WHOLE = "the loss", 0, 1
# Names of one operation, without underscores.
_NAMES = {"radd": "add", "iadd": "add", "rmul": "mul", "imul": "mul", "multiply": "mul", "isub": "sub", "subtract": "sub"}
_NAMES |= {"truediv": "div", "itruediv": "div", "true_divide": "div", "divide": "div", "negative": "neg"}
# Operations that keep the value of a scalar and its gradient. Those of the second line join scalars.
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
    "sum",
    "mean",
}
_LIBRARIES = "torch.", "balanced_parallel.loss.", "balanced_parallel.savings."  # a mean is named after the code that calls them
_JOINS = {"stack", "cat", "hstack", "concat", "concatenate"}
_ZEROS = {"zeros", "new_zeros", "zeros_like"}
_NEW = {"new_tensor", "new_full", "new_ones", "ones_like", "full_like"}


class UnknownMeanError(ValueError):
    """A criterion is not a linear combination of means."""


class Term(NamedTuple):
    """A mean: its sum and its count."""

    total: Tensor
    weight: Any  # a number or a tensor; None: a sum that is not divided
    key: Hashable  # equal for terms that have one count by their construction; None: zero or a constant, which takes any
    factor: Any = 1.0


class MeanRecorder(TorchFunctionMode):
    """Records the means that are computed in its block, and the tensors that are linear combinations of them.

    ``constants`` do not depend on the rows, and ``targets`` not on the outputs. So do the results of functions of them alone.
    """

    def __init__(self, constants: Iterable[Any], targets: Iterable[Any]) -> None:
        super().__init__()
        self.terms: dict[Name, Term] = {}
        self._calls = collections.Counter[str]()  # of each place in the code
        self._has_graph = torch.is_grad_enabled()
        self._forms = WeakIdKeyDictionary()  # the linear combination that a tensor is, or a list of those of its elements
        self._levels = WeakIdKeyDictionary()
        for level, tensors in ((_OF_TARGETS, targets), (_OF_NOTHING, constants)):
            self._levels.update({tensor: level for tensor in tensors if isinstance(tensor, Tensor)})
        self._held: list[Tensor] = []  # whose storages identify divisors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch, and records a mean, a sum or a linear combination."""
        kwargs = kwargs or {}
        tensors = [leaf for _, leaf in containers.leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        level = max(map(self._level, tensors), default=_OF_NOTHING)
        if func in RULES and level:
            return self._loss(func, arguments_of(func, *args, **kwargs))
        name = str(getattr(func, "__name__", "")).strip("_")
        name = _NAMES.get(name, name)
        form = self._combine(name, args, kwargs)
        result = func(*args, **kwargs)
        if name == "setitem" or not isinstance(result, Tensor):
            for tensor in args[:1] if name == "setitem" else ():
                self._forget(tensor)
            parts = result if isinstance(result, tuple) else ()  # of an unbind
            self._levels.update({part: level for part in parts if isinstance(part, Tensor)})
            return result
        if name in _UNCHANGED and isinstance(args[0], Tensor):
            level = self._level(args[0])  # not that of the tensor whose type and device it takes
        self._forget(result)  # it may be written in place
        if name in _ZEROS and not (tensors and result.dim()):
            form = {}
        if name in _NEW and not result.dim() and not any(isinstance(argument, Tensor) for argument in args[1:]):
            level = _OF_NOTHING
        if level or tensors or result.numel() == 1:  # an empty tensor may be written to unseen
            self._levels[result] = level
        if form is not None:
            self._forms[result] = form
        elif level and result.dim() == 0:
            self._record(name, result, args)
        return result

    def form_of(self, value: Any) -> Form | None:
        """Returns the linear combination that a number or a tensor is, or None."""
        if isinstance(value, (int, float)):
            return {_CONSTANT: value} if value else {}
        if not isinstance(value, Tensor):
            return None
        form = self._forms.get(value)
        if form is None and (factor := self._factor(value)) is not None:
            return {_CONSTANT: factor}
        return form if isinstance(form, dict) else None

    def _level(self, tensor: Tensor) -> int:
        return int(self._levels.get(tensor, _OF_NOTHING if isinstance(tensor, nn.Parameter) else _OF_OUTPUTS))

    def _forget(self, tensor: Tensor) -> None:
        self._forms.pop(tensor, None)
        self._levels.pop(tensor, None)

    def _combine(self, name: str, args: Any, kwargs: Any) -> Form | list[Form] | None:
        """Returns the linear combination of the result of an operation, a list for a vector of them, or None."""
        first, second = (*args, None, None)[:2]
        if name in _JOINS and isinstance(first, (list, tuple)):
            entries = [form for form in map(self.form_of, first) if form is not None]
            return entries if len(entries) == len(first) and any(map(self._has_form, first)) else None
        if "out" in kwargs or "rounding_mode" in kwargs or not (self._has_form(first) or self._has_form(second)):
            return None
        if isinstance(vector := self._forms.get(first) if self._has_form(first) else None, list):
            if name in ("sum", "mean"):
                return _times(functools.reduce(_plus, vector), 1 if name == "sum" else 1 / len(vector))
            factor = self._factor(second) if name == "mul" else None
            return None if factor is None else [_times(form, factor) for form in vector]
        if name in ("add", "sub", "rsub"):
            form, other = self.form_of(first), self.form_of(second)
            sign = kwargs.get("alpha", 1) * (1 if name == "add" else -1)
            if form is None or other is None:
                return None
            return _plus(_times(form, sign), other) if name == "rsub" else _plus(form, _times(other, sign))
        if name == "mul" and self._factor(second) is None:
            first, second = second, first
        form, factor = self.form_of(first), self._factor(second)
        if form is None or name in _UNCHANGED:
            return form
        if name == "neg":
            return _times(form, -1)
        if factor is None or name not in ("mul", "div"):
            return None
        if isinstance(factor, (int, float)) and not factor and (name == "div" or self._is_sum(form)):
            return None
        return _times(form, factor if name == "mul" else 1 / factor)

    def _has_form(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value in self._forms

    def _factor(self, value: Any) -> Any:
        """Returns a number, or a tensor that does not depend on the rows as a scalar; otherwise None."""
        if isinstance(value, (int, float)):
            return value
        is_constant = isinstance(value, Tensor) and value.numel() == 1 and self._level(value) == _OF_NOTHING
        return value.reshape(()) if is_constant else None

    def _record(self, name: str, result: Tensor, args: Any) -> None:
        """Records a scalar that depends on the rows: a mean, a sum, a quotient of sums, or zero."""
        if name == "mul" and any(isinstance(factor, (int, float)) and not factor for factor in args):
            self._add("zero", result, Term(result, 0, None))  # it connects parameters that are not used
        elif name == "mean":
            tensor = args[0]
            total = tensor.sum(dtype=torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None)
            self._add(name, result, Term(total, tensor.numel(), object()))
        elif name == "sum":
            self._add(name, result, Term(result, None, None))
        elif name == "div" and self._is_sum(self.form_of(args[0])) and self._is_sum(self.form_of(args[1])):
            is_fixed = self._level(args[1]) < _OF_OUTPUTS  # a count of outputs may have a gradient
            self._add("quotient", result, Term(args[0], args[1], object() if is_fixed else _SEVERAL))

    def _loss(self, function: Any, arguments: dict[str, Any]) -> Tensor:
        """Computes a loss of torch. Of a mean, the sum and the count are recorded."""
        reduction = reduction_in(arguments)
        if reduction not in ("mean", "batchmean"):
            result: Tensor = function(**arguments)
            if reduction == "sum":
                self._add("sum", result, Term(result, None, None))
            return result
        count = divisor(RULES[function], function, arguments)
        if function is F.ctc_loss:  # its sum omits the division by the length of each sequence
            total = widen(function(**arguments)) * count
        else:
            settings = {name: value for name, value in arguments.items() if name not in ("reduction", "size_average", "reduce")}
            if any(isinstance(value, Tensor) and value.dtype == torch.float16 for value in settings.values()):
                total = widen(function(**settings, reduction="none")).sum()  # a sum in float16 overflows
            else:
                total = function(**settings, reduction="sum")
        result = total / count
        self._add(function.__name__, result, Term(total, count, self._key(function, arguments)))
        return result

    def _key(self, function: Any, arguments: dict[str, Any]) -> Hashable:
        """Returns a key that is equal for losses of the same targets, which have the same count."""
        target, rule = arguments.get("target"), RULES[function]
        is_class = rule is RULES[F.cross_entropy] and isinstance(target, Tensor) and not target.is_floating_point()
        if not is_class and (not isinstance(target, Tensor) or target.shape != arguments["input"].shape):
            return object()
        tensors = [tensor for tensor in (target, arguments.get("weight")) if isinstance(tensor, Tensor)]
        self._held += tensors  # while they live, no other tensor is at their place
        places = [(storage_id(each.untyped_storage()), each.storage_offset(), each.shape, each.stride()) for each in tensors]
        return rule, *places, *versions(tensors), arguments.get("ignore_index", -100) if is_class else None

    def _is_sum(self, form: Form | None) -> bool:
        return bool(form) and all(name in self.terms and self.terms[name].weight is None for name in form or ())

    def _add(self, kind: str, result: Tensor, term: Term) -> None:
        if torch.is_grad_enabled() != self._has_graph:  # inside of an autograd function, whose backward is not that of the sum
            return
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_LIBRARIES):
            frame = frame.f_back
        place = f"{kind} in {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        name = place, self._calls[place], 0
        self._calls[place] += 1
        self.terms[name] = term
        self._forms[result] = {name: 1.0}

    def terms_of(self, loss: Any, rows: int) -> dict[Name, Term] | None:
        """Returns the terms of a loss by name, with their coefficients, or None if it is not a sum of means."""
        form = self.form_of(loss)
        if form is None or any(name in self.terms and self.terms[name].weight is None for name in form):
            return None
        terms: dict[Name, Term] = {_CONSTANT: Term(torch.tensor(float(rows)), rows, None), **self.terms}
        places = {name: (name[0], name[1], self._calls[name[0]]) for name in form}
        return {
            places[name]: terms[name]._replace(factor=factor, weight=rows if terms[name].key is None else terms[name].weight)
            for name, factor in form.items()
        }


def _plus(first: Form, second: Form) -> Form:
    return first | {name: first[name] + factor if name in first else factor for name, factor in second.items()}


def _times(form: Form, factor: Any) -> Form:
    return {name: coefficient * factor for name, coefficient in form.items()}


def find_means(shard: ShardLoss, *, is_split: bool) -> tuple[Any, dict[tuple[str, Name], Term]]:
    """Calls the criterion of a shard. Returns its result, and the terms of each of its losses by key path and name.

    Without a split, any other loss is one term.

    Raises:
        UnknownMeanError: a loss is not a sum of means.
    """
    module, (_, arguments, settings) = shard.criterion, unwrap(shard.criterion)
    constants = [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else (arguments, settings)
    recorder = MeanRecorder(
        *([leaf for _, leaf in containers.leaves(each)] for each in (constants, (shard.targets, shard.kwargs)))
    )
    with recorder:
        result = shard.call()
    named: dict[tuple[str, Name], Term] = {}
    for place, loss in containers.leaves(result):
        terms: dict[Name, Term] | None = {} if loss is None else recorder.terms_of(loss, shard.rows)
        if terms is None and is_split:
            _refuse_unknown(module)
        if terms is None:
            terms = {_WHOLE: Term(weighted_sum(loss, 1), 1, _SEVERAL)}
        named |= {(place, name): term for name, term in terms.items()}
    return result, named


def _refuse_unknown(criterion: Any) -> NoReturn:
    setting = getattr(criterion, "reduction", "mean")
    note = "" if setting == "mean" else f" (the attribute reduction={setting!r} has no effect on a forward of its own)"
    raise UnknownMeanError(
        f"the loss of {containers.describe(criterion)} is not a sum of known means, so that of several shards of a batch is "
        "unknown. Known are the losses of torch, such as F.cross_entropy(output, target), and errors.mean(), times numbers, "
        "parameters or buffers of the criterion; not a division by a number, a function of a mean, or a loss that the model "
        "computes. Give DataParallelCriterion weight=, a function (output, *targets) -> scalar that returns the divisor of its "
        "mean; weight='rows' for a mean over rows with equal weights; reduction='sum' for a sum; whole=True for a loss whose "
        f"rows depend on each other{note}"
    )


def single_mean(shard: ShardLoss) -> LossSum:
    """Returns the :class:`LossSum` of a criterion whose means have one count.

    Raises:
        UnknownMeanError: the means have several counts, and had one in the batches before.
    """
    if not shard.rows:
        return LossSum(widen(shard.nothing()), 0.0)
    _, terms = find_means(shard, is_split=True)
    if _has_several(terms.values()):
        raise UnknownMeanError(
            f"the means of {containers.describe(shard.criterion)} have different counts, and had one in the first batch: "
            f"{', '.join(name[0] for _, name in terms)}; expected the same means in each batch: compute them always, also of "
            "nothing, or give DataParallelCriterion weight=, a function (output, *targets) -> scalar"
        )
    count = next((term.weight for term in terms.values() if term.key is not None), shard.rows)
    totals = [
        add_up([term.factor], term.total.device) * count if name[0] == _CONSTANT[0] else widen(term.total) * term.factor
        for (_, name), term in terms.items()
    ]
    return LossSum(functools.reduce(torch.add, totals or [shard.nothing()]), count)


def _has_several(terms: Iterable[Term]) -> bool:
    divisors = {term.key for term in terms} - {None}
    return len(divisors) > 1 or _SEVERAL in divisors


class LossOfMeans(LossOfSums):
    """The loss of an update that is a sum of means. Its statistics are their sums and counts.

    Once a batch has shown that all means have one count, :func:`single_mean` computes the loss in one pass.
    """

    may_lack = True
    _is_empty = False  # nothing was counted

    def value(self, outputs: PerReplica, shards: Sequence[Shard]) -> Any:
        """Returns the loss of a batch, in the structure that the criterion returns."""
        self.is_split = len(shards) > 1 or world_size() > 1
        return super().value(outputs, shards)

    def hand_back_parts(self, parts: list[Any]) -> list[LossSum]:
        """Returns a loss for each part. They have no weight if nothing was counted, so that nothing is updated."""
        losses = super().hand_back_parts(parts)
        return [LossSum(loss.total, 0.0) for loss in losses] if self._is_empty else losses

    def _statistics(self, shard: ShardLoss) -> ShardStatistics:
        nothing = shard.nothing()
        if not shard.rows:
            return ShardStatistics(None, None, nothing)
        result, terms = find_means(shard, is_split=self.is_split)
        has_several = _has_several(terms.values())
        tensors: dict[Any, Tensor] = {_SEVERAL: add_up([shard.rows * has_several], nothing.device)}
        more: dict[Any, Tensor] = {}
        for (place, name), term in terms.items():
            total, count = widen(term.total) * term.factor, add_up([term.weight], nothing.device)
            tensors |= {(place, name, "total"): total, (place, name, "count"): count}
            more[place, name, "coefficient"] = count * term.factor
        structure = containers.map_leaves(lambda leaf: None if leaf is None else containers.Leaf(), result)
        return ShardStatistics(tensors, structure, nothing, more)

    def _parts(self, outputs: PerReplica, shards: Sequence[Shard]) -> list[ShardStatistics]:
        if self.is_split and not self.criterion.is_checked:
            refuse_coupled(self.criterion.module)
        return super()._parts(outputs, shards)

    def _halves(self, outputs: PerReplica, shards: Sequence[Shard]) -> list[ShardStatistics]:
        return super()._halves(outputs, shards) if self.is_split else []

    def _over_ranks(self, nothing: Tensor | None) -> tuple[dict[Any, Tensor], list[int]]:
        total, ranks = super()._over_ranks(nothing)
        total = dict(total)
        several = total.pop(_SEVERAL, None)
        if several is not None and self.is_split and self.criterion.is_coupled:
            self.criterion.is_coupled = bool(several)
        numbers: dict[Any, int] = {}
        for _, (name, _, number), _ in total:
            if numbers.setdefault(name, number) != number:
                raise UnknownMeanError(
                    f"the criterion computes {name} {number} times for some rows, and {numbers[name]} times for others, expected "
                    "as many means for all rows: compute them always, also of nothing, or give DataParallelCriterion weight="
                )
        counts = [tensor for (_, _, kind), tensor in total.items() if kind == "count"]
        self._is_empty = bool(counts) and not any(map(bool, counts))
        return total, ranks

    def _finish(self, total: dict[Any, Tensor]) -> Any:
        losses: dict[str, Tensor] = {}
        for (place, name, kind), tensor in total.items():
            if kind == "total":
                mean = divide(tensor, total[place, name, "count"].to(tensor.dtype).clamp(min=self.criterion.minimum))
                losses[place] = losses[place] + mean if place in losses else mean

        def fill(place: str, values: list[Any]) -> Any:
            device = self.criterion.output_device
            loss = None if values[0] is None else losses.get(place, torch.zeros(()))
            return loss if loss is None or device is None else move(loss, device)

        return containers.zip_leaves(fill, [self._structure])

    def _tolerance(self, tensor: Tensor) -> float:
        is_half = self.criterion.precision.name != "fp32" or torch.is_autocast_enabled(tensor.device.type)
        return 2e-2 if is_half else 1e-7 if tensor.dtype == torch.float64 else 1e-3

    def _compare(self, whole: ShardStatistics, halves: Sequence[ShardStatistics], rows: int | None) -> None:
        parts = []
        for part in (whole, *halves):
            parts.append(part._replace(tensors={name: each for name, each in (part.tensors or {}).items() if name != _SEVERAL}))
        super()._compare(parts[0], parts[1:], rows)

    def _name(self, number: int, place: Any) -> str:
        _, (name, _, _), kind = place
        return f"the {kind} of {name}"

    def _refuse(self, reason: str, cause: Exception | None = None) -> NoReturn:
        raise UnknownMeanError(
            f"the loss of {containers.describe(self.criterion.module)} does not add up over the rows: {reason}. The rows depend "
            "on each other, or it draws random numbers. Give DataParallelCriterion whole=True, which computes it once for all "
            "rows; or AdditiveLoss(statistics, finish), if it is a function of sums; or weight=, a function (output, *targets) "
            "-> scalar, if its rows are independent"
        ) from cause
