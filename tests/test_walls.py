"""Rules for all files: which folders they may import, names, no side effects of the import. Tables of exceptions have no rest."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.sources import parse

import balanced_parallel

PACKAGE = Path(balanced_parallel.__file__).parent
TESTS = Path(__file__).parent
ROOT = {"__init__", "__main__"}  # the public names and the command line may import everything

CORE = {"runtime", "batch", "replicas", "loss", "optim", "training", "strategies"}
MAY_IMPORT = {
    "runtime": set(),
    "batch": {"runtime"},
    "replicas": {"batch", "runtime"},
    "savings": {"loss", "replicas", "runtime"},
    "loss": {"replicas", "batch", "runtime"},
    "optim": {"replicas", "runtime"},
    "training": {"optim", "loss", "replicas", "batch", "runtime"},
    "strategies": {"training", "optim", "loss", "replicas", "batch", "runtime"},
    "data": {"batch", "runtime"},
    "reproducible": {"strategies", "training", "optim", "loss", "replicas", "batch", "runtime"},
    "state": {"training", "optim", "runtime"},
    "memory": {"diagnostics", "savings", "strategies", "batch", "runtime"},
    "diagnostics": {
        "savings",
        "strategies",
        "training",
        "optim",
        "loss",
        "replicas",
        "batch",
        "runtime",
    },
    "simulation": {"runtime"},
    "integrations": {"strategies", "training", "optim", "loss", "replicas", "batch", "runtime"},
}
# The core imports other folders where a program asks for what they do, in a function.
DEFERRED = {
    "loss/inside.py": {"reproducible.row_random": "rows that are compared draw the same numbers"},
    "training/recovery.py": {"savings.saving": "an out of memory names the savings"},
    "training/step.py": {
        "reproducible.exact": "reproducible=",
        "state.state": "state_dict() and digest()",
    },
}
TORCH_ONLY = [Path("loss/rules.py")]
OTHER_TESTS = {
    "gpu",
    "helpers",
    "libraries",
    "regressions",
}  # Their files have other names than modules.


def when_imported(tree):
    """Yields the nodes of a file that run when it is imported."""
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        is_of_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not (is_function or is_of_types):
            yield node
            yield from when_imported(node)


def imported_modules(source, package, walk=ast.walk):
    """Returns the modules of this package that a file imports, as paths below it.

    Args:
        package: names of the folders that the file is in: ``("memory", "trace")``.
        walk: yields the nodes to look at.
    """
    found = set()
    for node in walk(parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
        elif (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "balanced_parallel"
        ):
            base = node.module.split(".")[1:]
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.partition(".")[2]
                for alias in node.names
                if alias.name.startswith("balanced_parallel.")
            }
            continue
        else:
            continue
        prefix = [part for part in base if part]
        found |= {".".join([*prefix, alias.name]) for alias in node.names}
    return found


def forbidden_imports(source, package, walk=ast.walk):
    """Returns the modules that a file in ``package`` imports and may not."""
    public = set() if package[0] in CORE else {*balanced_parallel.__all__} - MAY_IMPORT.keys()
    allowed = MAY_IMPORT[package[0]] | {package[0], "__version__"} | public
    return {
        module
        for module in imported_modules(source, package, walk)
        if module.split(".")[0] not in allowed
    }


def files():
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        if inside.with_suffix("").name not in ROOT or len(inside.parts) > 1:
            yield pytest.param(path, inside.parts[:-1], id=str(inside))


def test_all_folders_are_in_the_import_table():
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {
        "__pycache__",
        ".ruff_cache",
    } == set(MAY_IMPORT)
    assert {path.stem for path in PACKAGE.glob("*.py")} == ROOT


@pytest.mark.parametrize(("path", "package"), list(files()))
def test_files_import_only_allowed_folders(path, package):
    source = path.read_text()
    deferred = {module.rpartition(".")[0] for module in forbidden_imports(source, package)}
    assert deferred == set(DEFERRED.get(path.relative_to(PACKAGE).as_posix(), ()))
    assert not forbidden_imports(source, package, when_imported)


# Names that a wing imports from the core.
MOST_SEAMS = {
    "data": 17,
    "diagnostics": 20,
    "integrations": 22,
    "memory": 30,
    "reproducible": 37,
    "savings": 10,
    "simulation": 8,
    "state": 14,
}


@pytest.mark.parametrize("wing", MOST_SEAMS)
def test_wings_import_few_names_of_the_core(wing):
    names = set()
    for path in (PACKAGE / wing).rglob("*.py"):
        names |= imported_modules(path.read_text(), path.relative_to(PACKAGE).parts[:-1])
    from_core = {name for name in names if name.split(".")[0] in CORE}
    assert len(from_core) <= MOST_SEAMS[wing], sorted(from_core)


def test_torch_only_files_import_no_other_module():
    for path in TORCH_ONLY:
        assert not imported_modules((PACKAGE / path).read_text(), path.parts[:-1])


OF_ANY_PROGRAM = {"allocator", "devices", "lines", "operators", "problem"}
OF_ANY_PROGRAM |= {"allocations", "doubles", "fakes", "private", "quantized"}
OF_ANY_PROGRAM |= {"results", "stacks", "tracer", "values"}
OF_ROWS_AND_STREAMS = {
    f"strategies.tracing.{name}" for name in ("Shard", "SideStreams", "TracedBatch")
}


@pytest.mark.parametrize("name", sorted(OF_ANY_PROGRAM))
def test_what_traces_any_program_does_not_know_the_layouts(name):
    """It knows batches, and the savings that it applies; ``memory/trace/layouts.py`` knows the engine."""
    (path,) = (PACKAGE / "memory").rglob(f"{name}.py")
    imported = imported_modules(path.read_text(), path.relative_to(PACKAGE).parts[:-1])
    modules = {
        module
        for module in imported - OF_ROWS_AND_STREAMS
        if module.split(".")[0] not in ("batch", "runtime", "savings")
    }
    assert {
        module for module in modules if set(module.split(".")).isdisjoint(OF_ANY_PROGRAM)
    } == set()


def test_the_step_asks_its_arithmetic_in_place_of_its_setting():
    source = (PACKAGE / "training" / "step.py").read_text()
    assert source.count('== "bits"') == 1  # the check of the argument


@functools.cache
def imports_by_file():
    """Returns the modules of the package, each with the modules that it imports, those under ``TYPE_CHECKING`` too."""
    paths = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
    }
    imports = {}
    for name, path in paths.items():
        names = imported_modules(path.read_text(), path.relative_to(PACKAGE).parts[:-1])
        imports[name] = {
            part
            for part in paths
            for other in names
            if other == part or other.rpartition(".")[0] == part
        } - {name}
    return imports


def cycle(imports):
    """Returns modules that import each other, or none."""
    left = dict(imports)
    while left:
        free = [name for name, needs in left.items() if not needs & left.keys()]
        if not free:
            return sorted(left)
        for name in free:
            del left[name]
    return []


def test_folders_and_files_do_not_import_each_other():
    assert not cycle(MAY_IMPORT)
    assert not cycle(imports_by_file())
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


def misnamed(test_files, modules):
    """Returns the test files whose names do not begin with ``test_<module>``, for any of ``modules``."""
    return [
        name
        for name in test_files
        if not any(f"{name}_".startswith(f"test_{module}_") for module in modules)
    ]


def test_test_files_are_named_after_modules():
    for folder in TESTS.iterdir():
        tested = next(
            (
                root / folder.name
                for root in (PACKAGE, TESTS.parent)
                if (root / folder.name).is_dir()
            ),
            None,
        )
        if tested is not None and folder.name not in OTHER_TESTS:
            modules = {
                path.stem for path in tested.rglob("*")
            }  # There are native/ and the folders of benchmarks.
            assert not misnamed([path.stem for path in folder.glob("test_*.py")], modules), folder
        else:
            assert not folder.is_dir() or folder.name in {*OTHER_TESTS, "__pycache__"}, (
                f"{folder.name} is not a tested folder"
            )
    for name in OTHER_TESTS:
        assert (TESTS / name).is_dir()
        assert not (PACKAGE / name).exists(), f"{name} has modules: its tests are named after them"


def test_test_files_are_short():
    assert not [
        str(path) for path in TESTS.rglob("*.py") if len(path.read_text().splitlines()) > 820
    ]


def test_public_names_do_not_shadow_modules():
    for folder in ["", *MAY_IMPORT]:
        module = __import__(f"balanced_parallel.{folder}".rstrip("."), fromlist=["__name__"])
        names = {path.stem for path in (PACKAGE / folder).iterdir()}
        hidden = [
            name
            for name in names & set(vars(module))
            if not isinstance(vars(module)[name], type(ast))
        ]
        assert not hidden, f"{module.__name__} hides its modules {hidden}"


IMPORT = """
import os, sys
import torch, torch.distributed.algorithms.ddp_comm_hooks.default_hooks, torch.nn.parallel, torch.optim
import torch._subclasses.fake_tensor, torch.utils.flop_counter
class Watched(type(os.environ)):
    def __getitem__(self, key): raise AssertionError("read " + str(key))
    def __setitem__(self, key, value): raise AssertionError("wrote " + str(key))
before = dict(os.environ)
os.environ.__class__ = Watched
import balanced_parallel
os.environ.__class__ = Watched.__base__
assert dict(os.environ) == before
assert not torch.cuda.is_initialized()
assert not torch.distributed.is_initialized()

late = ("memory", "simulation", "diagnostics", "reproducible", "data", "state", "savings", "integrations")
loaded = [name for name in sys.modules if name.startswith(tuple(f"balanced_parallel.{part}" for part in late))]
assert not loaded, loaded
assert set(balanced_parallel.__all__) <= set(dir(balanced_parallel))
assert set(balanced_parallel.memory.__all__) <= set(dir(balanced_parallel.memory))
from balanced_parallel import memory, simulate, verify
from balanced_parallel.memory import MemoryPlan, MemoryReport, estimate, fit, plan
assert memory.plan is plan and balanced_parallel.simulate is simulate
"""


def test_import_has_no_side_effects_and_loads_the_planner_the_simulator_and_verify_at_their_first_use():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_only_the_launch_reads_the_environment():
    readers = [
        path.name
        for path in PACKAGE.rglob("*.py")
        if "environ" in path.read_text() and "os." in path.read_text()
    ]
    assert readers == ["launch.py"]


REPLACES_FUNCTIONS_OF_TORCH = ("memory/trace/", "simulation/")
CLASSES_OF_TORCH = ("nn", "dist", "Tensor", "Parameter", "Module", "Optimizer")
SETTINGS_OF_TORCH = (
    "torch.backends.",
    "backends.",
)  # flags that torch's documentation tells users to set


SETTERS = (
    "setattr",
    "delattr",
    "type.__setattr__",
    "patch.object",
    "patch.multiple",
    "mock.patch.object",
)


def patches_of_torch(source):
    """Returns the lines that assign to an attribute of a module or a class of torch, also by ``del`` and by ``SETTERS``."""
    tree = parse(source)
    names = {"torch", *CLASSES_OF_TORCH}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [getattr(node, "module", None) or alias.name for alias in node.names]
            pairs = zip(modules, node.names, strict=True)
            names |= {
                (alias.asname or alias.name).split(".")[0]
                for module, alias in pairs
                if module.split(".")[0] == "torch"
            }
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            owner = ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in SETTERS:
            owner = ast.unparse(node.args[0]) + "."
        else:
            continue
        if owner.split(".")[0] in names and not owner.startswith(SETTINGS_OF_TORCH):
            lines.append(node.lineno)
    return sorted(lines)


def test_nothing_replaces_a_function_of_torch():
    paths = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    patches = {name: patches_of_torch(path.read_text()) for name, path in paths.items()}
    patching = {name for name, lines in patches.items() if lines}
    assert not {name for name in patching if not name.startswith(REPLACES_FUNCTIONS_OF_TORCH)}
    assert not [
        part
        for part in REPLACES_FUNCTIONS_OF_TORCH
        if not any(name.startswith(part) for name in patching)
    ]


PRONOUNS = {"one", "found", "known", "mine", "own", "some", "made", "kept", "given"}


def pronouns(source):
    """Returns the variables, arguments and attributes of a source that are called by a pronoun or a participle."""
    names = set()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return {name for name in names if name.lstrip("_") in PRONOUNS}


def test_names_are_nouns():
    files_with_pronouns = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if pronouns(path.read_text())
    }
    assert not files_with_pronouns


def test_names_of_classes_and_types_have_one_owner():
    owners = {}
    for path in PACKAGE.rglob("*.py"):
        for node in parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = (
                [node.name]
                if isinstance(node, ast.ClassDef)
                else [each.id for each in targets if isinstance(each, ast.Name)]
            )
            for name in names:
                if name[0].isupper() and len(name) > 1:  # A type variable has one letter.
                    owners.setdefault(name, set()).add(str(path.relative_to(PACKAGE)))
    assert {name: files for name, files in owners.items() if len(files) > 1} == {}


# Each has the reason why a module is not part of its only importer, in its own folder.
SINGLE_IMPORTER = {
    "diagnostics.bits": "a public argument",
    "loss.drafts": "the formula; notes are a mode of torch",
    "memory.allocator": "the rules of the allocator of torch",
    "memory.trace.doubles": "savings; the tracer runs updates",
    "memory.trace.results": "facts of results; the counter records memory",
    "reproducible.groups": "sums over ranks",
    "reproducible.kinds": "losses, beside gradients",
    "reproducible.numbered_rows": "reproducible=True alone",
    "savings.evaluation": "a public name",
    "simulation.cluster": "the public name",
    "simulation.device_module": "the module that torch asks for the devices",
    "strategies.launch": "the only reader of the environment",
    "training.forward_state": "state of modules, which an update surrounds",
}


def test_a_module_with_one_importer_in_its_folder_has_a_reason():
    imports = imports_by_file()
    importers = {
        name: {other for other, names in imports.items() if name in names} for name in imports
    }
    single = {
        name
        for name, others in importers.items()
        if len(others) == 1
        and name.rpartition(".")[0] == next(iter(others)).rpartition(".")[0]
        and "." in name
    }
    assert {name for name in single if not name.endswith("__init__")} == set(SINGLE_IMPORTER)
