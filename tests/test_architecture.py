"""The walls of the house, each kept by a test: what imports what, what is public, what importing does."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import balanced_parallel

PACKAGE = Path(balanced_parallel.__file__).parent
CORRIDOR = [
    "devices",
    "streams",
    "sizes",
    "ambient",
    "nesting",
    "dims",
    "ranks",
    "provenance",
    "gathering",
    "per_replica",
    "marks",
    "rows",
    "scattering",
    "shares",
    "adding",
    "deferral",
    "reduction",
    "ownership",
    "shells",
    "writes",
    "watching",
    "replication",
    "execution",
    "batchnorm",
    "losses",
    "reductions",
    "summation",
    "weighting",
    "terms",
    "precision",
    "model",
    "output_rows",
    "criterion_settings",
    "criterion",
    "optimizer",
    "microbatching",
    "accumulation",
    "update",
    "step_settings",
    "step",
    "partition",
    "recording",
    "diagnosis",
    "examination",
    "verification",
]
WINGS = ["launch", "memory", "simulation"]
COMMAND_LINE = "__main__"  # stands outside, and may import all of it
PUBLIC = {
    "DataParallelModel",
    "DataParallelCriterion",
    "gather",
    "scatter",
    "parallelize",
    "TrainStep",
    "Precision",
    "loss_weight",
    "weighted_mean",
    "convert_sync_batchnorm",
    "verify",
    "simulate",
    "BalancedOptimizer",
    "memory",
    "PerReplica",
    "Whole",
    "Rows",
}


def imported_rooms(source, package):
    """The rooms of this package that a file imports, ``package`` being the parts of the package that it is in."""
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            base = [part for part in base if part]
            rooms |= {base[0]} if base else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "balanced_parallel":
            rooms |= {(node.module + ".").split(".")[1]} - {""} or {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            rooms |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("balanced_parallel.")}
    return rooms


def forbidden(room, rooms):
    """What ``room`` may not import: rooms below it, and wings; a wing may import all of the corridor and itself."""
    allowed = {*CORRIDOR, room} if room in WINGS else set(CORRIDOR[: CORRIDOR.index(room)])
    return rooms - allowed


def files():
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts not in {("__init__",), (COMMAND_LINE,)}:
            yield path, parts[0], parts[:-1]


def test_every_room_has_its_place():
    assert {room for _, room, _ in files()} == {*CORRIDOR, *WINGS}


@pytest.mark.parametrize(("path", "room", "package"), list(files()), ids=lambda value: str(getattr(value, "name", value)))
def test_rooms_import_only_rooms_above_them(path, room, package):
    assert not forbidden(room, imported_rooms(path.read_text(), package))


def test_the_wall_can_be_hit():
    assert forbidden("scattering", imported_rooms("from .model import DataParallelModel", ())) == {"model"}
    assert forbidden("step", imported_rooms("from .launch.distributed import parallelize", ())) == {"launch"}
    assert forbidden("step", imported_rooms("from . import launch", ())) == {"launch"}
    assert forbidden("step", imported_rooms("import balanced_parallel.launch", ())) == {"launch"}
    assert not forbidden("launch", imported_rooms("from ..devices import move\nfrom .torchrun import x", ("launch",)))


def test_files_stay_small():
    sources = [*(path for path, _, _ in files()), *(PACKAGE / "simulation" / "native").iterdir()]
    assert not {path.name: lines for path in sources if (lines := len(path.read_text().splitlines())) > 300}


def test_public_names():
    assert set(balanced_parallel.__all__) == PUBLIC
    assert all(getattr(balanced_parallel, name).__doc__ for name in PUBLIC)


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
"""


def test_importing_prints_nothing_reads_no_variable_and_starts_nothing():
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORT], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_only_one_file_reads_the_environment():
    readers = [path.name for path, _, _ in files() if "environ" in path.read_text() and "os." in path.read_text()]
    assert readers == ["torchrun.py"]


def test_the_version_is_read_without_torch():
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['setup.py', '--version']; exec(open('setup.py').read())"
    done = subprocess.run(
        [sys.executable, "-c", "__file__ = 'setup.py'; " + code], capture_output=True, text=True, timeout=100, cwd=PACKAGE.parent
    )
    assert done.stdout.splitlines()[-1] == balanced_parallel.__version__
