"""Private names of torch are in ``runtime/torch_private.py``. The tracer and the simulator have their own."""

import ast
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import balanced_parallel

PACKAGE = Path(balanced_parallel.__file__).parent
ALLOWED = ("runtime/torch_private.py", "memory/trace/", "memory/operators.py", "simulation/")

OBJECTS = (
    torch,
    torch.Tensor,
    nn.Linear(1, 1),
    nn.Parameter,
    torch.optim.Optimizer,
    torch.UntypedStorage,
    torch.autograd.graph.Node,
    torch.autograd.Variable,
    dist.ProcessGroup,
)
OF_INSTANCES = {"_set_sequence_nr", "_saved_self", "_orig_mod"}  # nodes and compiled modules have more than their classes
PRIVATE = {name for owner in OBJECTS for name in dir(owner) if re.match("_[^_]", name)} | OF_INSTANCES


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
        elif isinstance(node, ast.Constant) and str(node.value).rstrip(".") in PRIVATE:  # state["_modules"], "_orig_mod."
            found.append((node.lineno, node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            on_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if (node.attr in PRIVATE and not (on_self and node.attr in defined)) or _root(node) in torch_names:
                found.append((node.end_lineno, node.attr))
    return sorted(found)


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
        if not inside.as_posix().startswith(ALLOWED):
            yield pytest.param(path, id=inside.as_posix())


@pytest.mark.parametrize("path", list(checked_files()))
def test_private_names_of_torch_are_in_one_file(path):
    assert private_names(path.read_text()) == []


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
        ("tensor._version  # there is no public counter to read", ["_version"]),
        ("name.replace('_orig_mod.', '')", ["_orig_mod."]),
        ("group._get_backend(device)", ["_get_backend"]),
    ],
)
def test_private_names_are_found(line, names):
    assert sorted(name for _, name in private_names(line)) == names
