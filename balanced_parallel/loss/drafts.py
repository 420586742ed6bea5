"""The formula of a criterion while it is noted: its statistics, and the operations on them."""

import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch import containers
from .facts import OF_NOTHING, OF_SUMS, Facts, FactsOfTensors, FunctionCall, is_getter
from .formula import (
    CONSTANT,
    OTHER,
    OVER_NUMBER,
    ROOT,
    SUM,
    UNCHANGED,
    Form,
    Operation,
    Statistic,
    Value,
    add_forms,
    call_method,
    multiply_forms,
    places_behind,
    shape_of,
)
from .sums import widen

_CHECKS = {"isnan", "isinf", "isfinite"}  # A branch on them is that of errors.
_BOUNDS = {"clamp", "clamp_min", "clip", "max", "maximum"}
_SUM = Facts(OF_SUMS)
# Names of the methods of a tensor. Some cannot be imported by the name that they have themselves.
_METHODS = {id(each): name for kind in Tensor.__mro__ for name, each in vars(kind).items()}


class Draft:
    """The statistics that are noted so far, and the operations on them, which may divide by counts."""

    def __init__(self) -> None:
        self._numbers = itertools.count()  # the places
        self.facts = FactsOfTensors(self._numbers)
        self.statistics: dict[int, Statistic] = {}  # The keys are places.
        self.operations: list[Operation] = []
        self._branches: dict[Value, bool] = {}  # The truth of values that Python has asked for.
        self._end_of_model = 0  # Places of the criterion are behind it.
        self._counts: dict[Hashable, int] = {}  # Losses of the same targets have one.

    def end_model(self) -> None:
        """Begins the part of the criterion."""
        self._end_of_model = next(self._numbers)

    def add(self, kind: str, value: Any, *, is_count: bool = False, may_learn: bool = True) -> int:
        """Notes a statistic. Returns its place."""
        number = next(self._numbers)
        learns = self.facts.learns(value, may_learn=may_learn)
        self.statistics[number] = Statistic(kind, value, number, is_count, learns=learns)
        return number

    def sum(self, kind: str, total: Tensor, result: Tensor, *, is_target: bool = False) -> None:
        """Notes an undivided sum over the rows."""
        kind += shape_of(total)
        number = self.add(kind, total, may_learn=not is_target)
        form = SUM._replace(place=number)
        is_column = result.dim() > 0
        facts = Facts(OF_SUMS, number, form, is_target=is_target, is_column=is_column)
        self.facts.learn(result, facts)

    def derive(
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
        self.operations.append(operation)
        self.facts.learn(result, facts._replace(number=number))

    def quotient(
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
            place = self.add(kind, count, is_count=True, may_learn=may_learn)
            self._counts[key] = place
        facts = facts._replace(form=Form("mean", place))
        text = "" if kind == OVER_NUMBER else kind
        self.derive(torch.div, "div", [total, place], result, facts, text)

    def operation(self, call: FunctionCall, func: Any, args: Any, kwargs: Any) -> Operation | None:
        """Returns an operation on sums or parameters, or None for another one."""
        if call.level > OF_SUMS:
            return None
        places = [self.facts.of(tensor).number for tensor in call.tensors]
        inputs = [place for place in places if place is not None]
        if not inputs:
            return None
        arguments = containers.map_tensors(self.facts.place, (tuple(args), kwargs))
        # Ranks exchange functions. Properties and some operators have none that can be imported.
        if is_getter(func):
            func = operator.attrgetter(call.name)
        elif id(func) in _METHODS:
            func = functools.partial(call_method, _METHODS[id(func)])
        has_graph = not self.facts.is_inside
        return Operation(func, call.name, arguments, inputs, (), call.writes, has_graph)

    def note(self, call: FunctionCall, operation: Operation, results: Sequence[Tensor]) -> None:
        """Notes an operation on sums or parameters."""
        first, second = (*call.values, None)[:2]
        facts, other = self.facts.of(first), self.facts.of(second)
        is_target = all(self.facts.of(each).is_target for each in call.tensors)
        form = self._form_of(call) if call.level else CONSTANT
        if call.name == "div" and call.level and not call.kwargs:
            form = self._over(facts.form, other.form) or form
        if form.kind == "sum" and results[0].numel() == 1:
            self.sum("sum", widen(results[0]), results[0], is_target=is_target)
            return
        places = [next(self._numbers) for _ in results]
        self.operations.append(operation._replace(results=places))
        for number, tensor in zip(places, results, strict=True):
            original = facts if call.name in ("clone", "detach") else None
            is_column = any(self.facts.of(each).is_column for each in call.tensors)
            learned = Facts(call.level, number, form, None, is_target, original=original)
            self.facts.learn(tensor, learned._replace(is_column=is_column))

    def _form_of(self, call: FunctionCall) -> Form:
        """Returns the form of the result of an operation on sums."""
        name = call.name
        if name in ("stack", "cat", "sum", "mean"):
            return add_forms([*map(self.facts.form, call.tensors)])
        forms = [*map(self.facts.form, call.values)]
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

    def _bound(self, form: Form, call: FunctionCall) -> Form:
        """Returns the form of a count with a lower bound that is a number."""
        settings = {**dict(zip(("input", "min", "max"), call.values, strict=False)), **call.kwargs}
        least = settings.get("min", settings.get("other"))
        if isinstance(least, Tensor) and least.is_cpu and self.facts.of(least).level == OF_NOTHING:
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

    def division(self, call: FunctionCall) -> tuple[int, float] | None:
        """Returns the place of a sum, and the number that a call divides it by, or None."""
        if call.name != "div" or call.kwargs:
            return None
        first, number = call.values
        facts = self.facts.of(first)
        before = facts.divided
        if facts.form.kind == "sum" and facts.number is not None:
            before = facts.number, 1.0
        if before is None or not isinstance(number, (int, float)) or not number:
            return None
        return before[0], before[1] * float(number)

    def divide(self, call: FunctionCall, divided: tuple[int, float], result: Tensor) -> None:
        """Notes the division of a sum by a number, which follows from the sizes of the rows."""
        is_target = self.facts.of(call.values[0]).is_target
        facts = Facts(OF_SUMS, divided=divided, is_target=is_target)
        self.quotient(OVER_NUMBER, *divided, result, facts, key=divided[1])

    def branch(self, tensor: Tensor, *, truth: bool) -> None:
        """Notes that Python has asked for the truth of a function of sums."""
        place = self.facts.of(tensor).number
        names = {each.name for each in self.operations if place in each.results}
        if place is not None and names.isdisjoint(_CHECKS):
            self._branches[Value(place)] = truth

    def branches_for(self, places: set[int]) -> dict[Value, bool]:
        """Returns the branches of the criterion, and those of a model on sums at some places."""
        return {
            value: truth
            for value, truth in self._branches.items()
            if value.number > self._end_of_model or places & places_behind([value], self.operations)
        }

    def keep_values(self, written: Tensor, level: int) -> None:
        """Copies the statistics in the memory of a tensor that a function of a level writes to."""
        sharing = self.facts.sharing(written, level)
        for number in [self.facts.of(tensor).number for tensor in sharing]:
            each = self.statistics.get(number) if number is not None else None
            if each is not None and isinstance(each.value, Tensor):
                self.statistics[each.number] = each._replace(value=each.value.clone())
