"""Estimates of one number of rows, traced in the process of the test."""

import pytest

from balanced_parallel.memory import estimation, lines
from balanced_parallel.memory.report import OtherBatches


@pytest.fixture
def one_trace(monkeypatch):
    """Makes an estimate trace its own number of rows alone. For tests that ask for no other: it takes half of the time."""

    def one(request, rows):
        traced = lines.trace_exactly(request, rows)
        return OtherBatches(request, traced, traced)

    monkeypatch.setattr(estimation, "lines_of", one)


@pytest.fixture(autouse=True)
def own_process(request):
    """Traces in this process, but for the tests of the child processes."""
    if request.path.name != "test_fakes.py":
        request.getfixturevalue("trace_in_this_process")
