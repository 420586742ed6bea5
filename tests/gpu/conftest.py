"""Fixtures of tests that run on GPUs (``pytest -m gpu``), and on simulated devices without that flag."""

import time

import pytest
import torch
from helpers.gpu import Machine, make_layout

from balanced_parallel import simulate

LONGEST = 540.0  # seconds, after which no test on a GPU begins
STARTED = time.monotonic()


@pytest.fixture
def machine(request):
    """The devices of a layout that :func:`helpers.gpu.on` names."""
    kind, layout = request.param
    if kind == "sim":
        with simulate(2) as cluster:
            yield Machine(make_layout(layout, cluster.devices), cluster)
        return
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch.cuda.is_available() is False")
    if time.monotonic() - STARTED > LONGEST:
        pytest.skip(f"the run has taken {LONGEST:.0f} s already: select this test with -k")
    machine = Machine(
        make_layout(
            layout, [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        )
    )
    machine.release()
    with torch.backends.cudnn.flags(
        enabled=True, allow_tf32=False
    ):  # fp32 is compared with the CPU's
        yield machine
    machine.release()


@pytest.fixture
def at_most(record_property):
    """Compares a number with its limit. scripts/gpu_page.py prints both. A nan is above all limits."""

    def check(text, number, limit):
        record_property("measured", f"{text}: {number:.3g} (limit {limit:.3g})")
        assert number <= limit, text

    return check
