"""The claim of the page about simulated devices, measured again on a small scale."""

import pytest
from helpers.benchmarks import load


@pytest.mark.slow
def test_simulation_takes_less_than_ten_times_the_time_of_the_cpu(monkeypatch):
    assert max(load("simulation", monkeypatch).ratios(4, rounds=1)) < 10
