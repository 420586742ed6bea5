"""Private names of torch stay inside ``runtime`` and ``simulation``, where their reasons are written down.

Elsewhere a line that uses one needs a comment with the reason, and the upstream issue if there is one.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
import torch
from torch import nn

import balanced_parallel

PACKAGE = Path(balanced_parallel.__file__).parent
ALLOWED = {"runtime", "simulation"}

OBJECTS = (
    torch,
    torch.Tensor,
    nn.Linear(1, 1),
    nn.Parameter,
    torch.optim.Optimizer,
    torch.UntypedStorage,
    torch.autograd.graph.Node,
    torch.autograd.Variable,
)
FUNCTIONS_OF_NODES = {"_set_sequence_nr", "_saved_self"}  # nodes have more attributes than their class
PRIVATE = {name for owner in OBJECTS for name in dir(owner) if re.match("_[^_]", name)} | FUNCTIONS_OF_NODES


def private_names(source):
    """Returns the lines of a source and the private names of torch that each of them uses."""
    tree = ast.parse(source)
    defined = {node.attr for node in ast.walk(tree) if _is_assigned_on_self(node)}
    defined |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    torch_names = {"torch"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            for alias in node.names:
                parts = [*(module or "").split("."), *alias.name.split(".")]
                if next(filter(None, parts)) == "torch" and not getattr(node, "level", 0):
                    torch_names.add((alias.asname or alias.name).split(".")[0])
                    found += [(node.lineno, part) for part in parts if _is_private(part)]
        elif isinstance(node, ast.Constant) and node.value in PRIVATE:  # state["_modules"], getattr(tensor, "_base")
            found.append((node.lineno, node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            on_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if (node.attr in PRIVATE and not (on_self and node.attr in defined)) or _root(node) in torch_names:
                found.append((node.end_lineno, node.attr))
    return sorted(found)


def without_reason(source):
    """Returns the private names of torch whose line has no comment; comments for tools do not count."""
    comments = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = re.sub(r"#\s*(type: ignore|noqa|fmt:)\S*", "", token.string).strip("# ")
    return [(line, name) for line, name in private_names(source) if not comments.get(line)]


def _is_private(name):
    return name.startswith("_") and not name.startswith("__")


def _is_assigned_on_self(node):
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self"


def _root(node):
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def checked_files():
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        if not {inside.parts[0], inside.as_posix()} & ALLOWED:
            yield pytest.param(path, id=inside.as_posix())


@pytest.mark.parametrize("path", list(checked_files()))
def test_private_names_of_torch_have_a_reason_on_their_line(path):
    assert without_reason(path.read_text()) == []


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("import torch\ntorch._foreach_add_(left, right)", ["_foreach_add_"]),
        ("import torch\ntorch.autograd.Variable._execution_engine.queue_callback(f)", ["_execution_engine"]),
        ("from torch.utils._pytree import tree_leaves", ["_pytree"]),
        ("from torch._utils import _take_tensors", ["_take_tensors", "_utils"]),
        ("import torch._subclasses.fake_tensor", ["_subclasses"]),
        ("from torch.nn.parallel import _functions\n_functions._streams", ["_functions", "_streams"]),
        ("versions = [tensor._version for tensor in tensors]", ["_version"]),
        ("node._set_sequence_nr(1)", ["_set_sequence_nr"]),
        ("module.__dict__['_buffers']", ["_buffers"]),
        ("class Layer(nn.Module):\n    def f(self):\n        return self._modules", ["_modules"]),
        ("class Writes:\n    def __init__(self):\n        self._parameters = []", []),
        ("self._own()\nentry._replace(rows=1)\ntensor.__class__", []),
        ("tensor._version  # there is no public counter to read", []),
        ("tensor._version  # type: ignore[attr-defined]", ["_version"]),
    ],
)
def test_private_names_are_found(line, names):
    assert sorted(name for _, name in without_reason(line)) == names
