"""Lines that the main job prints at its end."""

import sys

import pytest
from helpers.scripts import SCRIPT


@pytest.mark.parametrize(("share", "workers", "flag"), [(0.21, 0, "--workers 2"), (0.9, 4, "--workers 8"), (0.2, 0, None)])
def test_more_than_a_fifth_of_the_time_without_data_names_the_flag(monkeypatch, share, workers, flag):
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])
    from recording import waiting_advice

    lines = waiting_advice(share, workers)
    assert [flag in line for line in lines] == ([] if flag is None else [True])
