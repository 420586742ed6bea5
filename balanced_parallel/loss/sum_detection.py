"""Detection of sums in the source of a criterion. The losses of shards add up to a sum, but not to a mean."""

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
    """Returns the syntax tree of a function, or None if its source is not available."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


def is_sum(criterion: Any) -> bool:
    """Returns True if all values that ``criterion`` returns are sums in its source.

    A sum is a loss with ``reduction="sum"`` or ``size_average=False``, a call of ``.sum()``, a sum of sums, or a sum scaled by a
    given factor. A factor that the function computes may be the inverse of a count.
    """
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
        return False  # several lambdas in one line cannot be distinguished
    variables = inspect.getclosurevars(inspect.unwrap(function))
    objects: dict[str, Any] = {**variables.globals, **variables.nonlocals}
    if is_object and not isinstance(functions[0], ast.Lambda) and functions[0].args.args:
        objects[functions[0].args.args[0].arg] = criterion
    return _SumDetector(functions[0], objects).returns_sums()


class _SumDetector:
    """Syntax tree of one function, with the expressions that are assigned to its variables.

    Args:
        function: the function.
        objects: global and nonlocal variables, by name.
    """

    def __init__(self, function: ast.FunctionDef | ast.Lambda, objects: Mapping[str, Any]) -> None:
        self.objects = objects
        self.assigned: dict[str, list[ast.expr]] = {}
        self.visiting: set[str] = set()
        nodes = list(ast.walk(function))
        for node in nodes:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
            for target in targets:
                if isinstance(target, ast.Name) and isinstance(node, (ast.Assign, ast.AugAssign)):
                    value = ast.BinOp(ast.Constant(0), node.op, node.value) if isinstance(node, ast.AugAssign) else node.value
                    self.assigned.setdefault(target.id, []).append(value)
        returned = [node.value for node in nodes if isinstance(node, ast.Return)]
        self.returned = [function.body] if isinstance(function, ast.Lambda) else returned

    def returns_sums(self) -> bool:
        """Returns True if the function returns sums only."""
        return bool(self.returned) and all(value is not None and self._is_sum(value) for value in self.returned)

    def _is_sum(self, value: ast.expr) -> bool:
        if isinstance(value, ast.Call):
            return self._calls_sum(value)
        if isinstance(value, ast.UnaryOp):
            return self._is_sum(value.operand)
        if isinstance(value, ast.Name) and value.id in self.assigned and value.id not in self.visiting:
            self.visiting.add(value.id)
            values = [assigned for assigned in self.assigned[value.id] if not isinstance(assigned, ast.Constant)]
            all_sums = bool(values) and all(map(self._is_sum, values))
            self.visiting.discard(value.id)
            return all_sums
        if not isinstance(value, ast.BinOp):
            return False
        left, right = value.left, value.right
        if isinstance(value.op, (ast.Add, ast.Sub)):
            return all(self._is_sum(side) or _is_zero(side) for side in (left, right))
        if isinstance(value.op, ast.Mult):
            pairs = ((left, right), (right, left))
            return any(self._is_sum(term) and self._is_given_factor(factor) for term, factor in pairs)
        return isinstance(value.op, ast.Div) and isinstance(right, ast.Constant) and self._is_sum(left)

    def _is_given_factor(self, value: ast.expr) -> bool:
        """Returns True for a constant, an attribute, or a variable that the function does not assign."""
        value = value.operand if isinstance(value, ast.UnaryOp) else value
        is_variable = isinstance(value, ast.Name) and value.id not in self.assigned
        return is_variable or isinstance(value, (ast.Constant, ast.Attribute))

    def _calls_sum(self, call: ast.Call) -> bool:
        settings = {keyword.arg: keyword.value.value for keyword in call.keywords if isinstance(keyword.value, ast.Constant)}
        if settings.get("reduction") == "sum" or settings.get("size_average") is False:
            return True
        if isinstance(call.func, ast.Attribute) and call.func.attr == "sum":
            of_torch = isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
            return len(call.args) == of_torch and not call.keywords  # with more arguments, a sum along one dimension
        if isinstance(call.func, ast.Call):  # nn.BCELoss(reduction="sum")(output, target)
            return self._calls_sum(call.func)
        called = self._object(call.func)
        return find_torch_loss(called) is not None and isinstance(called, nn.Module) and reduction_of(called) == "sum"

    def _object(self, node: ast.expr) -> Any:
        """Returns the object that a name or an attribute refers to, or None if the function creates it."""
        if isinstance(node, ast.Name):
            return self.objects.get(node.id)
        return getattr(self._object(node.value), node.attr, None) if isinstance(node, ast.Attribute) else None


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0
