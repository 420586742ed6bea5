"""Estimates of one number of rows, and traces that find torch's caches filled."""

import pytest

from balanced_parallel.memory import estimation, other_batches
from balanced_parallel.memory.trace import tracer


@pytest.fixture
def one_trace(monkeypatch):
    """Makes an estimate trace its own number of rows alone. For tests that ask for no other: it takes half of the time."""
    monkeypatch.setattr(estimation, "lines_of", lambda request, rows: [other_batches.trace_exactly(request, rows)] * 2)


@pytest.fixture(autouse=True)
def trace_in_this_process(request, monkeypatch):
    """Traces without a child process, as on other platforms than Linux.

    Torch caches the results of fake tensors, so that a trace takes a third of the time if one before ran the same operators
    in this process. ``test_child_process.py``, the command line and the pages of ``docs/`` keep the children.
    """
    if request.path.name != "test_child_process.py":
        monkeypatch.setattr(tracer, "start_in_child", lambda function: function)
