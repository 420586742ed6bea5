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

import contextlib
import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batch import containers
from ..runtime.devices import move
from .copies import parameters_in

OVER_NUMBER = "a sum over a number"
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
# Another tensor gives its type and its device.
CONVERSIONS = {"to", "type", "type_as", "float", "double", "cpu", "cuda", "as_tensor"}
# Operations of one tensor that keep the sum of its elements.
UNCHANGED = CONVERSIONS | {"view", "reshape", "squeeze", "clone", "pos", "detach"}


def call_method(name: str, *args: Any, **kwargs: object) -> Any:
    """Calls a method of a tensor, its first argument."""
    return getattr(Tensor, name)(*args, **kwargs)


def root(total: Tensor) -> Tensor:
    """Returns the square root. Its derivative at zero is zero, as that of a norm."""
    return total.where(total > 0, 1).sqrt() * (total > 0)


@dataclasses.dataclass(frozen=True)
class Value(containers.Leaf):
    """The place of a tensor in a formula. Parameters of the criterion have -1, -2, ..."""

    number: int


@dataclasses.dataclass(frozen=True, eq=False)
class Constant(containers.Leaf):
    """A tensor that does not depend on the rows."""

    tensor: Tensor
    text: str

    def __getstate__(self) -> dict[str, object]:
        """Returns what another rank gets, which may have other devices."""
        return {"tensor": self.tensor.cpu(), "text": self.text}


class Unknown(containers.Leaf):
    """A result that is no function of sums."""


class Form(NamedTuple):
    """A tensor as a linear combination: of sums that are not divided, or that have equal counts."""

    kind: str = "other"  # "zero", "constant", "sum", "bounded", "mean" or "root" of a sum
    place: int = -1  # The statistic itself that a sum or a bound is of, or the count of a mean.
    least: float = 0.0  # The lower bound of the count.
    has_constant: bool = False

    @property
    def bound(self) -> float:
        """The lower bound of the divisor. Sums that are not divided have no count."""
        return 1.0 if self.kind == "sum" else self.least


OTHER, CONSTANT, ZERO, SUM, ROOT = map(Form, ("other", "constant", "zero", "sum", "root"))


class Operation(NamedTuple):
    """An operation of a formula, with places for its tensors."""

    function: Callable[..., object]
    name: str
    arguments: tuple[Sequence[object], dict[str, object]]
    inputs: Sequence[int]  # the places that are computed before
    results: Sequence[int]
    writes: bool = False  # The first argument gets the result.
    has_graph: bool = True
    text: str = ""  # It stands in place of that of the arguments.


class Statistic(NamedTuple):
    """A sum over the rows of a shard."""

    kind: str  # The function that computes it.
    value: Tensor | float | None
    number: int  # the place in the formula
    is_count: bool = False
    is_bounded: bool = False  # A quotient has a lower bound of the count.
    learns: bool = True  # It has a gradient, or nothing tells.
    per_row: float | None = None  # Elements of a row, of a count that follows from sizes.


@dataclasses.dataclass(frozen=True, eq=False)
class Formula:
    """The operations that compute the result of a criterion from statistics.

    Args:
        result: the result, with a place for each tensor.
        entries: its leaves, by their key paths.
        inputs: the statistics, without their values.
        forms: those of the entries of the result.
        outside: parameters that the criterion does not have itself, by their places.
        logged: the entries that are values to log.
        lengths: the elements of a row in each tensor of the shard, None without rows.
        has_read: True if numbers of Python may be values of the shard.
        columns: the shapes of reductions along the rows.
        averaged: the numbers of elements in means of a row, and those that rows are divided by.
        branches: the truth of values that Python has asked for, as in ``if``.
        numbers: those in operations behind a read of values, which may have told them.
        has_loop: True if rows are computed one by one.
    """

    result: Any
    entries: dict[str, object]
    operations: Sequence[Operation]
    inputs: Sequence[Statistic]
    forms: dict[str, Form] = dataclasses.field(default_factory=dict)
    outside: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    logged: AbstractSet[str] = frozenset()
    lengths: Sequence[float | None] = ()
    has_read: bool = False
    columns: Sequence[torch.Size] = ()
    averaged: Sequence[float] = ()
    branches: dict[Value, bool] = dataclasses.field(default_factory=dict)
    numbers: Sequence[float] = ()
    has_loop: bool = False

    def __getstate__(self) -> dict[str, object]:
        """Returns what another rank gets: parameters outside of the criterion stay on this one."""
        return {**vars(self), "outside": dict.fromkeys(self.outside)}

    @functools.cached_property
    def losses(self) -> list[str]:
        """The entries that are losses."""
        entries = self.entries.items()
        return [place for place, leaf in entries if leaf is not None and place not in self.logged]

    @property
    def graphs(self) -> list[bool]:
        """True for each operation with a graph."""
        return [each.has_graph for each in self.operations]

    def compute(self, sums: Sequence[Tensor], criterion: Any = None) -> Any:
        """Returns the result for sums, with their graph and that of the criterion's parameters."""
        home = sums[0].device if sums else None
        parameters = self._parameters(criterion)
        values = {number: move_to(each, home) for number, each in parameters.items()}
        values.update(zip([each.number for each in self.inputs], sums, strict=True))

        def fill(leaf: object) -> object:
            if isinstance(leaf, Value):
                return values[leaf.number]
            return move_to(leaf.tensor, home) if isinstance(leaf, Constant) else leaf

        for each in self.operations:
            arguments: Any = containers.map_leaves(fill, each.arguments)
            args, kwargs = arguments
            if each.writes:
                args = (args[0].clone(), *args[1:])
            with contextlib.nullcontext() if each.has_graph else torch.no_grad():
                result = each.function(*args, **kwargs)
            values.update(zip(each.results, results_in(each.name, result, args), strict=True))
        return containers.map_leaves(fill, self.result)

    def branches_otherwise(self, sums: Sequence[Tensor], criterion: Any) -> bool:
        """Returns True if Python would take another branch for these sums."""
        values = dataclasses.replace(self, result=[*self.branches]).compute(sums, criterion)
        return [*map(bool, values)] != [*self.branches.values()]

    def entry(self, place: str, criterion: Any) -> "Formula":
        """Returns the formula of one entry, whose parameters are constants."""
        leaf = self.entries[place]
        numbers = places_behind([leaf], self.operations)
        fixed = {}
        for number, parameter in self._parameters(criterion).items():
            if number in numbers:
                fixed[number] = Constant(parameter.detach().clone(), "")

        def fix(leaf: object) -> object:
            return fixed.get(leaf.number, leaf) if isinstance(leaf, Value) else leaf

        return dataclasses.replace(
            self,
            result=fix(leaf),
            operations=[
                each._replace(arguments=containers.map_leaves(fix, each.arguments))
                for each in self.operations
                if numbers.intersection(each.results)
            ],
            inputs=self.inputs_of([place]),
            outside={},
            branches={},
        )

    def _parameters(self, criterion: object) -> dict[int, Tensor]:
        """Returns the parameters by their places."""
        places = itertools.count(-1, -1)
        return dict(zip(places, parameters_in(criterion), strict=False)) | self.outside

    def inputs_of(self, places: Sequence[str]) -> list[Statistic]:
        """Returns the statistics that some entries of the result need."""
        numbers = places_behind([self.entries[place] for place in places], self.operations)
        return [each for each in self.inputs if each.number in numbers]

    def text_of(self, places: Sequence[str]) -> str:
        """Returns entries of the result as text. It has all numbers, and is equal for other rows."""
        texts = {each.number: each.kind for each in self.inputs}
        for operation in self.operations:
            text = shorten(operation.text or _text_of(operation, texts))
            texts.update((number, text) for number in operation.results)
        return ", ".join(_text(self.entries[place], texts) for place in places)

    def mean_of(self, places: Sequence[str]) -> Form | None:
        """Returns the sum of some entries, or None if it is no linear combination over one count.

        A sum that has a gradient is no count: weights that a model learns, for example.
        """
        form = add_forms([self.forms[place] for place in places])
        is_bounded = form.has_constant and bool(form.least)
        learns = any(each.learns for each in self.inputs if each.number == form.place)
        is_known = form.kind == "sum" or (form.kind == "mean" and not learns)
        return form if is_known and not is_bounded and not self.branches else None


def move_to(tensor: Tensor, device: torch.device | None) -> Tensor:
    """Moves a tensor to a device. A scalar may stay on the host."""
    is_on_host = tensor.is_cpu and not tensor.dim() and not tensor.requires_grad
    return tensor if device is None or is_on_host else move(tensor, device)


def places_behind(leaves: Iterable[object], operations: Sequence[Operation]) -> set[int]:
    """Returns the places that some leaves are computed of, with their own."""
    places = {leaf.number for leaf in leaves if isinstance(leaf, Value)}
    for each in reversed(operations):
        if places.intersection(each.results):
            places.update(each.inputs)
    return places


def results_in(name: str, result: object, args: Sequence[object]) -> list[Tensor]:
    """Returns the tensors in the result of an operation, or the one that it has written to."""
    parts = args[:1] if name == "setitem" else result
    if not isinstance(parts, (tuple, list)):
        parts = [parts]
    return [part for part in parts if isinstance(part, Tensor)]


def shape_of(total: Tensor) -> str:
    """Returns the shape of a sum of columns as text."""
    return f" of shape {tuple(total.shape)}" if total.dim() else ""


def shorten(text: str) -> str:
    """Returns a text with a checksum in place of its end: that of a loop may double in each turn."""
    return text if len(text) < 300 else f"{text[:200]}... {zlib.crc32(text.encode())}"


def _text_of(operation: Operation, texts: dict[int, str]) -> str:
    args, kwargs = operation.arguments
    parts = [_text(leaf, texts) for leaf in flatten((*args, *kwargs.values()))]
    sign = _SIGNS.get(operation.name)
    if operation.name in UNCHANGED:
        return parts[0]
    if sign is None or len(parts) != 2:
        return f"{operation.name}({', '.join(parts)})"
    first, second = (f"({part})" if sign in "*/" and " " in part else part for part in parts)
    return f"{first} {sign} {second}"


def _text(leaf: object, texts: dict[int, str]) -> str:
    if isinstance(leaf, Value):
        return texts.get(leaf.number, "a parameter")
    return leaf.text if isinstance(leaf, Constant) else str(leaf)


def add_forms(forms: Sequence[Form]) -> Form:
    """Returns the form of a sum."""
    kinds = {form.kind for form in forms} - {"zero"}
    if not kinds - {"constant"}:
        return CONSTANT if kinds else ZERO
    has_constant = "constant" in kinds or any(form.has_constant for form in forms)
    alike = {
        SUM if form.kind == "sum" else form._replace(has_constant=has_constant)
        for form in forms
        if form.kind not in ("zero", "constant")
    }
    if len(alike) > 1 or kinds & {"other", "bounded", "root"} or (has_constant and "sum" in kinds):
        return OTHER
    return alike.pop()


def multiply_forms(first: Form, second: Form) -> Form:
    """Returns the form of a product."""
    if "zero" in (first.kind, second.kind):
        return ZERO
    first, second = (first, second) if second.kind == "constant" else (second, first)
    return first if second.kind == "constant" else OTHER


def flatten(arguments: Iterable[Any]) -> Iterator[Any]:
    """Yields arguments, and the entries of lists and tuples among them."""
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            yield from argument
        else:
            yield argument
