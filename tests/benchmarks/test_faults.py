"""The benchmark of interrupted runs: one that goes on in other layouts."""

import os
import random

import pytest
from helpers.benchmarks import load


@pytest.mark.slow
def test_a_run_killed_on_one_device_and_on_three_ranks_ends_on_two_with_the_digest_of_the_undisturbed_one(
    tmp_path, monkeypatch
):
    faults = load("faults", monkeypatch)
    faults.run("one device", [], tmp_path / "undisturbed", 0, *faults.BITS).check_returncode()
    drawn = faults.move(tmp_path / "moved", random.Random(0))
    assert len(os.listdir(tmp_path / "moved" / "faults")) == len(drawn) == 2
    expected = faults.digests(tmp_path / "undisturbed")
    assert len(expected) == 1
    assert faults.digests(tmp_path / "moved") == expected
    assert faults.losses(tmp_path / "moved") == faults.losses(tmp_path / "undisturbed")
