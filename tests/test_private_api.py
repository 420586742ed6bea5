"""Private names of torch are in ``runtime/torch_private.py``. The tracer and the simulator have their own."""

import ast
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.sources import parse
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
OF_INSTANCES = {
    "_set_sequence_nr",
    "_saved_reduction",
    "_saved_self",
    "_saved_total_weight",
    "_saved_weight",
    "_orig_mod",
}  # nodes and compiled modules have more than their classes
PRIVATE = {
    name for owner in OBJECTS for name in dir(owner) if re.match("_[^_]", name)
} | OF_INSTANCES


OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
READS_ATTRIBUTES = re.compile(r"(getattr|hasattr|setattr|delattr|attrgetter|\.get|\.pop)$")
EXCUSES = {  # private names of other objects, with the reason
    "integrations/lightning.py": {
        "_compiler_ctx": "tells that a LightningModule is compiled",
        "_ddp_comm_hook": "an argument of DDPStrategy, which subclasses read",
        "_ddp_kwargs": "arguments of DDPStrategy, which subclasses read",
        "_should_accumulate": "tells the last batch of a window, also at the end of an epoch",
        "_skip_backward": "tells an epoch for the statistics of batch norm of averaged weights",
    },
    "integrations/transformers.py": {"_n_gpu": "TrainingArguments have no public setter"},
    "state/checkpoint.py": {"_exit": "a public function of os"},
}


def defined_names(source):
    """Returns the private names that a source defines: functions, classes, variables and attributes of ``self``."""
    names = set()
    for node in ast.walk(parse(source)):
        is_stored = isinstance(getattr(node, "ctx", None), ast.Store)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and is_stored:
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and is_stored and _root(node) in ("self", "cls"):
            names.add(node.attr)
        elif (
            isinstance(node, ast.Subscript) and is_stored and "__dict__" in ast.unparse(node.value)
        ):
            names.add(getattr(node.slice, "value", None))  # self.__dict__["_name"] = value
    return {name for name in names if isinstance(name, str) and _is_private(name)} | OF_NAMED_TUPLES


def imported_names(tree):
    """Returns the names that stand for torch or a part of it, and the private names that are imported from there."""
    private = set()
    torch_names = {"torch"}
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in imports:
        module = (getattr(node, "module", None) or "").split(".")
        for alias in node.names:
            parts = [*module, *alias.name.split(".")]
            if next(filter(None, parts)) == "torch" and not getattr(node, "level", 0):
                torch_names.add((alias.asname or alias.name).split(".")[0])
                private |= set(filter(_is_private, parts))
    return torch_names, private


def strings_of(node):
    """Returns the nodes of strings that may be names of attributes."""
    if isinstance(node, ast.Call) and READS_ATTRIBUTES.search(ast.unparse(node.func)):
        return node.args
    return {ast.Subscript: lambda: [node.slice], ast.Compare: lambda: [node.left]}.get(
        type(node), list
    )()


def private_names(source, defined):
    """Returns the private names of torch that a source uses, and those of other objects that are not among the ``defined`` ones.

    A name of torch may be an attribute of ``self`` if the same source defines it.
    """
    tree = parse(source)
    here = defined_names(source)
    torch_names, names = imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            is_own = getattr(node.value, "id", "") in ("self", "cls") and node.attr in here
            of_torch = node.attr in PRIVATE and not is_own
            if of_torch or _root(node) in torch_names or node.attr not in defined:
                names.add(node.attr)
        # Such as state["_modules"] and "_orig_mod."
        if isinstance(node, ast.Constant) and str(node.value).rstrip(".") in PRIVATE:
            names.add(node.value)
        values = [each.value for each in strings_of(node) if isinstance(each, ast.Constant)]
        found = {str(value) for value in values if re.fullmatch(r"_[A-Za-z]\w*", str(value))}
        names |= found - defined
    return names


def _is_private(name):
    return name.startswith("_") and not name.startswith("__")


def _root(node):
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


@pytest.fixture(scope="module", name="found")
def names_by_file():
    """The private names that each file of the package uses."""
    sources = {
        path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")
    }
    defined = set().union(*map(defined_names, sources.values()))
    return {name: private_names(source, defined) for name, source in sources.items()}


def test_private_names_of_torch_are_in_one_file_and_those_of_other_objects_have_a_reason(found):
    outside = {
        name: names for name, names in found.items() if names and not name.startswith(ALLOWED)
    }
    assert outside == {name: set(reasons) for name, reasons in EXCUSES.items()}


def test_exceptions_are_needed(found):
    assert [
        part
        for part in ALLOWED
        if not any(names and name.startswith(part) for name, names in found.items())
    ] == []
