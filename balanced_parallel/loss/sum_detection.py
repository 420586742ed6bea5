"""Reads in the source of a criterion whether it is a sum, which its parts make up by themselves, or divides by something."""

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

from torch import nn

from .reduction import reduction_of
from .rules import find_torch_loss

__all__: list[str] = []


def read_source(function: Any) -> ast.Module | None:
    """The syntax tree of a function, or ``None`` where its source is not at hand."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


def is_sum(criterion: Any) -> bool:
    """Returns True if every value that ``criterion`` returns is a sum in its source: a loss with ``reduction="sum"`` or
    ``size_average=False``, or ``.sum()``; alone, added up, or scaled by something that is not a count."""
    while isinstance(criterion, functools.partial):
        criterion = criterion.func
    kind = type(criterion)
    is_object = not inspect.isroutine(criterion)
    function: Any = criterion
    if is_object:
        function = kind.forward if isinstance(criterion, nn.Module) else getattr(kind, "__call__", None)  # noqa: B004
    tree = read_source(function)
    if tree is None:
        return False
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda))]
    if not functions or (isinstance(functions[0], ast.Lambda) and len(functions) > 1):
        return False  # several lambdas in a line: nobody knows which
    seen = inspect.getclosurevars(inspect.unwrap(function))
    held: dict[str, Any] = {**seen.globals, **seen.nonlocals}
    if is_object and not isinstance(functions[0], ast.Lambda) and functions[0].args.args:
        held[functions[0].args.args[0].arg] = criterion
    return _Reading(functions[0], held).returns_sums()


class _Reading:
    """One function: what its names were assigned, and what the objects are that it does not assign."""

    def __init__(self, function: ast.FunctionDef | ast.Lambda, held: Mapping[str, Any]) -> None:
        self.held = held
        self.assigned: dict[str, list[ast.expr]] = {}
        self.open: set[str] = set()
        nodes = list(ast.walk(function))
        for node in nodes:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
            for target in targets:
                if isinstance(target, ast.Name) and isinstance(node, (ast.Assign, ast.AugAssign)):
                    changed = ast.BinOp(ast.Constant(0), node.op, node.value) if isinstance(node, ast.AugAssign) else node.value
                    self.assigned.setdefault(target.id, []).append(changed)
        returned = [node.value for node in nodes if isinstance(node, ast.Return)]
        self.returned = [function.body] if isinstance(function, ast.Lambda) else returned

    def returns_sums(self) -> bool:
        return bool(self.returned) and all(value is not None and self._sums(value) for value in self.returned)

    def _sums(self, value: ast.expr) -> bool:
        if isinstance(value, ast.Call):
            return self._calls_sum(value)
        if isinstance(value, ast.UnaryOp):
            return self._sums(value.operand)
        if isinstance(value, ast.Name) and value.id in self.assigned and value.id not in self.open:
            self.open.add(value.id)
            found = [one for one in self.assigned[value.id] if not isinstance(one, ast.Constant)]
            answer = bool(found) and all(map(self._sums, found))
            self.open.discard(value.id)
            return answer
        if not isinstance(value, ast.BinOp):
            return False
        left, right = value.left, value.right
        if isinstance(value.op, (ast.Add, ast.Sub)):
            return all(self._sums(side) or _is_zero(side) for side in (left, right))
        if isinstance(value.op, ast.Mult):
            return any(self._sums(one) and self._scales(other) for one, other in ((left, right), (right, left)))
        return isinstance(value.op, ast.Div) and isinstance(right, ast.Constant) and self._sums(left)

    def _scales(self, value: ast.expr) -> bool:
        """Returns True for a factor that is given. One that is computed here may be one over a count."""
        value = value.operand if isinstance(value, ast.UnaryOp) else value
        named = isinstance(value, ast.Name) and value.id not in self.assigned
        return named or isinstance(value, (ast.Constant, ast.Attribute))

    def _calls_sum(self, call: ast.Call) -> bool:
        settings = {keyword.arg: keyword.value.value for keyword in call.keywords if isinstance(keyword.value, ast.Constant)}
        if settings.get("reduction") == "sum" or settings.get("size_average") is False:
            return True
        if isinstance(call.func, ast.Attribute) and call.func.attr == "sum":
            of_torch = isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
            return len(call.args) == of_torch and not call.keywords  # else along a dimension
        if isinstance(call.func, ast.Call):  # nn.BCELoss(reduction="sum")(output, target)
            return self._calls_sum(call.func)
        called = self._object(call.func)
        return find_torch_loss(called) is not None and isinstance(called, nn.Module) and reduction_of(called) == "sum"

    def _object(self, node: ast.expr) -> Any:
        """Returns the object behind a name or an attribute that was made before."""
        if isinstance(node, ast.Name):
            return self.held.get(node.id)
        return getattr(self._object(node.value), node.attr, None) if isinstance(node, ast.Attribute) else None


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0
