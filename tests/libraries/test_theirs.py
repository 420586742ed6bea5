"""A script of tests/libraries/theirs, on tests like those of the library."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.libraries

pytest.importorskip("lightning")

THEIRS = Path(__file__).parent / "theirs"
TESTS = """
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel

QUIET = {"accelerator": "cpu", "fast_dev_run": True, "enable_progress_bar": False}


@pytest.mark.parametrize("kind", [BoringModel, ManualOptimBoringModel])
def test_fit(kind):
    Trainer(**QUIET).fit(kind())


def test_choice():
    assert type(Trainer(**QUIET).strategy).__name__ == "SingleDeviceStrategy"

"""


def test_tests_run_twice_and_each_difference_is_printed(tmp_path):
    folder = tmp_path / "checkout" / "tests" / "small"
    folder.mkdir(parents=True)
    (folder / "test_small.py").write_text(TESTS)
    (tmp_path / "kept").mkdir()
    command = [sys.executable, THEIRS / "of_lightning.py", tmp_path / "checkout"]
    command += ["small/test_small.py", "--kept", tmp_path / "kept", "--kinds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220)
    assert done.returncode == 1, done.stderr
    assert "| small/test_small.py | 3 | 3 | 1 |" in done.stdout
    assert "manual optimization" in done.stdout
    assert "1 differences have no reason.\n`test_choice`" in done.stdout
    kept = json.loads((tmp_path / "kept" / "2__small__test_small.py.json").read_text())
    assert sorted(status for status, _ in kept.values()) == ["failure", "failure", "passed"]
    (folder / "test_small.py").unlink()  # Kept results are printed again.
    again = subprocess.run(command, capture_output=True, text=True, timeout=220)
    assert again.stdout == done.stdout
