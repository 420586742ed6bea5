"""The core trains without all other folders: a copy of the package without them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.scripts import words_of
from test_walls import CORE, MAY_IMPORT

import balanced_parallel

TESTS = Path(__file__).parent
OTHERS = tuple(sorted(MAY_IMPORT.keys() - CORE))
FILES = (
    "batch/test_outputs_zip.py",
    "loss/test_criterion.py",
    "loss/test_overlap.py",
    "optim/test_balanced_rank_shards.py",
    "runtime/test_collectives.py",
    "strategies/test_fsdp_exchanges.py",
    "strategies/test_parallelize.py",
    "strategies/test_ranks_inputs.py",
    "training/test_update_accumulation.py",
    "training/test_update_hooks.py",
)
# Cases with a saving or with random numbers by row.
OF_OTHERS = "savings or random_splits or follow_the_rows"
# Python imports this module in each process that it starts. An editable installation would find the folders that the copy lacks.
WITHOUT_OTHERS = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "balanced_parallel" and name.split(".")[1:2] in [[other] for other in {OTHERS}]:
            raise ModuleNotFoundError("the core imports " + name, name=name)

sys.meta_path.insert(0, Absent())
"""
# A plugin of pytest: the copy is the package that the tests import, and names of the other folders fail when they are used.
WITHIN = """
import os
from pathlib import Path
import pytest
import balanced_parallel

def pytest_sessionstart(session):
    assert Path(balanced_parallel.__file__).parent == Path(os.environ["COPY"]) / "balanced_parallel"
    others = {"memory", "simulate", "verify", "savings", "ByCost", "RankBatchSampler", "Checkpoints"}
    assert others <= set(dir(balanced_parallel))
    for name in others:
        with pytest.raises(ModuleNotFoundError):
            getattr(balanced_parallel, name)
"""


@pytest.mark.slow  # tests/test_walls.py says the same of all imports, also of those in functions
def test_the_core_passes_its_tests_without_the_other_folders(tmp_path):
    package = Path(balanced_parallel.__file__).parent
    shutil.copytree(
        package,
        tmp_path / "balanced_parallel",
        ignore=shutil.ignore_patterns(*OTHERS, "__pycache__"),
    )
    assert not {path.name for path in (tmp_path / "balanced_parallel").iterdir()} & set(OTHERS)
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_OTHERS)
    (tmp_path / "within_the_copy.py").write_text(WITHIN)
    # the folder of the copy is the first place where Python looks for modules
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "COPY": str(tmp_path)}
    flags = words_of(
        [
            "-q -p no:cacheprovider -p no:xdist -p within_the_copy --override-ini=addopts=",
            f"-k 'not ({OF_OTHERS})' -c {TESTS.parent}/pyproject.toml",
            "-m 'not slow and not browser and not libraries and not gpu'",
        ]
    )
    command = [sys.executable, "-m", "pytest", *flags, *(str(TESTS / name) for name in FILES)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout.splitlines()[-1]
    assert "failed" not in done.stdout.splitlines()[-1]
