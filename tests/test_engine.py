"""The engine trains without the folders that foresee, explain, simulate and integrate: a copy of the package without them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import balanced_parallel

TESTS = Path(__file__).parent
OTHERS = ("memory", "diagnostics", "simulation", "integrations")
RUN = (
    "test_equivalence.py",
    "batch/test_outputs_gathering.py",
    "loss/test_overlap.py",
    "loss/test_sums_settings.py",
    "training/test_update_accumulation.py",
    "training/test_state.py",
    "training/test_update_hooks.py",
)
# Python imports this module in each process that it starts. An editable installation would find the folders that the copy lacks.
WITHOUT_OTHERS = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "balanced_parallel" and name.split(".")[1:2] in [[other] for other in {OTHERS}]:
            raise ModuleNotFoundError("the engine imports " + name, name=name)

sys.meta_path.insert(0, Absent())
"""
# A plugin of pytest that asserts that the copy is the package that the tests import.
WITHIN = """
import os
from pathlib import Path
import balanced_parallel

def pytest_sessionstart(session):
    assert Path(balanced_parallel.__file__).parent == Path(os.environ["COPY"]) / "balanced_parallel"
"""


def copy_of_the_engine(folder):
    """Copies the package into ``folder``, without the folders that the engine does not need."""
    package = Path(balanced_parallel.__file__).parent
    shutil.copytree(package, folder / "balanced_parallel", ignore=shutil.ignore_patterns(*OTHERS, "__pycache__"))
    assert not {path.name for path in (folder / "balanced_parallel").iterdir()} & set(OTHERS)
    (folder / "sitecustomize.py").write_text(WITHOUT_OTHERS)
    (folder / "within_the_copy.py").write_text(WITHIN)


def run(copy, *arguments):
    """Runs Python in the folder of the copy, which is the first place where it looks for modules."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "COPY": str(copy)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=200)


def test_the_engine_passes_its_tests_without_the_other_folders(tmp_path):
    copy_of_the_engine(tmp_path)
    flags = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "within_the_copy", "--override-ini=addopts="]
    flags += ["-c", str(TESTS.parent / "pyproject.toml"), "-m", "not slow and not browser and not libraries and not gpu"]
    done = run(tmp_path, "-m", "pytest", *flags, *(str(TESTS / name) for name in RUN))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout.splitlines()[-1]
    assert "failed" not in done.stdout.splitlines()[-1]


USES = """
import balanced_parallel
assert {"memory", "simulate", "verify"} <= set(dir(balanced_parallel))
for name in ("memory", "simulate", "verify"):
    try:
        getattr(balanced_parallel, name)
    except ModuleNotFoundError:
        pass
    else:
        raise AssertionError(name)
"""


def test_names_of_the_other_folders_fail_when_they_are_used(tmp_path):
    copy_of_the_engine(tmp_path)
    done = run(tmp_path, "-c", USES)
    assert (done.returncode, done.stderr) == (0, "")
