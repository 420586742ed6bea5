"""A script of tests/libraries/theirs, on tests like those of the library."""

import json
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


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.syspath_prepend(THEIRS)
    return pytest.importorskip("suite")


def test_tests_run_with_a_strategy_of_this_package(suite, tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tmp_path / "test_small.py").write_text(TESTS)
    results = suite.run("of_lightning", "2", tmp_path, ["test_small.py"])
    text = "AssertionError: assert 'BalancedStrategy' == 'SingleDeviceStrategy'"
    first, refused, choice = results.values()
    assert first == suite.Result("passed")
    assert refused.status == "failure"
    assert "has automatic_optimization=False" in refused.message
    assert choice == suite.Result("failure", text)


def test_differences_are_printed_with_their_reasons(suite, tmp_path, monkeypatch, capsys):
    """Results that are kept do not run again."""
    passed = ["passed", ""]
    failed = ["failure", "TypeError: unknown"]
    theirs = {"tests.small.test_a::One::test_x": passed, "tests.small.test_a::test_y": passed}
    ours = {"tests.small.test_a::One::test_x": failed, "tests.small.test_a::test_y": passed}
    for kind, results in ("theirs", theirs), ("2", ours):
        (tmp_path / f"{kind}__small__test_a.py.json").write_text(json.dumps(results))
    monkeypatch.setattr(sys, "argv", ["suite", str(tmp_path), "--kept", str(tmp_path)])
    for reasons, status in ({"unknown": "It is not known"}, 0), ({}, 1):
        given = suite.Suite("none", "tests", ["small/test_a.py"], {"2": "two devices"}, reasons)
        with pytest.raises(SystemExit) as ended:
            suite.main(given)
        assert ended.value.code == status
        printed = capsys.readouterr().out
        assert "| small/test_a.py | 2 | 2 | 1 |" in printed
        assert f"{status} differences have no reason." in printed
        assert ("It is not known (1): `test_x`" in printed) == (status == 0)
