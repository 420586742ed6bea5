"""Progress of plain PyTorch beside the main job: a bar on a terminal, and lines without control characters elsewhere."""

import importlib
import sys

import pytest
from helpers.scripts import SCRIPT


@pytest.fixture
def comparison(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("comparison")


@pytest.mark.parametrize(("pause", "shown"), [(0.0, [1, 2, 3]), (60.0, [])])
def test_progress_is_lines_where_there_is_no_terminal(
    comparison, monkeypatch, capsys, pause, shown
):
    monkeypatch.setattr(comparison, "BEAT", pause)
    assert [*comparison.show_progress(4, "plain")] == [1, 2, 3, 4]
    assert capsys.readouterr() == (
        "",
        "plain: 4 steps\n" + "".join(f"plain: step {step}/4\n" for step in shown),
    )


def test_progress_is_a_bar_on_a_terminal(comparison, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert [*comparison.show_progress(4, "plain")] == [1, 2, 3, 4]
    assert "plain:   0%" in capsys.readouterr().err
