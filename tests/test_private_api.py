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


OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
EXCUSES = {  # private names of other objects, with the reason
    "integrations/transformers.py": {
        "_n_gpu": "TrainingArguments have no public setter",
        "_prepare_inputs": "a method of Trainer for its subclasses",
    },
    "strategies/fsdp.py": {"_no_split_modules": "the blocks of a model of transformers"},
    "training/checkpoint.py": {"_exit": "a public function of os"},
}


def defined_names(source):
    """Returns the private names that a source defines: functions, classes, variables and attributes of ``self``."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _root(node) in ("self", "cls"):
            names.add(node.attr)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and "__dict__" in ast.unparse(node.value):
            names.add(getattr(node.slice, "value", None))  # self.__dict__["_name"] = value
    return {name for name in names if isinstance(name, str) and _is_private(name)} | OF_NAMED_TUPLES


def foreign_names(source, defined):
    """Returns the lines and the private names, attributes or strings for them, that are not among the ``defined`` ones."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            names.append((node.end_lineno, node.attr))
        elif isinstance(node, ast.Call) and re.search(
            r"(getattr|hasattr|setattr|delattr|attrgetter|\.get|\.pop)$", ast.unparse(node.func)
        ):
            names += [(node.lineno, argument.value) for argument in node.args if isinstance(argument, ast.Constant)]
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            names.append((node.lineno, node.slice.value))
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant):
            names.append((node.lineno, node.left.value))
    return sorted((line, name) for line, name in names if re.fullmatch(r"_[A-Za-z]\w*", str(name)) and name not in defined)


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


@pytest.fixture(scope="module", name="defined")
def collect_defined_names():
    return set().union(*(defined_names(path.read_text()) for path in PACKAGE.rglob("*.py")))


@pytest.mark.parametrize("path", list(checked_files()))
def test_private_names_of_other_objects_have_a_reason(path, defined):
    excuses = EXCUSES.get(path.relative_to(PACKAGE).as_posix(), {})
    assert {name for _, name in foreign_names(path.read_text(), defined)} == set(excuses)


def test_exceptions_are_needed(defined):
    assert all((PACKAGE / name).exists() for name in EXCUSES)
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    private = {name for name, source in sources.items() if private_names(source) or foreign_names(source, defined)}
    assert [part for part in ALLOWED if not any(name.startswith(part) for name in private)] == []


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("optimizer._step_count += 1", ["_step_count"]),
        ("for hook in self._optimizer_state_dict_pre_hooks.values(): hook(self)", ["_optimizer_state_dict_pre_hooks"]),
        ("rnn._flat_weights", ["_flat_weights"]),
        ("getattr(group, '_timeout', None)", ["_timeout"]),
        ("hasattr(parameter, '_unsharded_param')", ["_unsharded_param"]),
        ("setattr(optimizer, '_patched', True)", ["_patched"]),
        ("vars(optimizer)['_hooks']", ["_hooks"]),
        ("'_hooks' in vars(optimizer)", ["_hooks"]),
        ("attrgetter('_hooks', '_others')", ["_hooks", "_others"]),
        ("module.__dict__.pop('_was_there', None)", ["_was_there"]),
        ("class Own:\n    _size = 1\n    def _f(self):\n        self._x, y = 1, other._x + other._size + other._f()", []),
        ("entry._replace(x=1)\nself.__class__\nprint('_name')", []),
        ("self.__dict__['_own'] = 1\nself.__dict__['_own']", []),
    ],
)
def test_private_names_of_other_objects_are_found(line, names):
    assert [name for _, name in foreign_names(line, defined_names(line))] == names


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
