"""Rules for the whole suite: one thread per process, fixed seeds, and no test leaves anything behind."""

import contextlib
import gc
import importlib
import os
import threading

import pytest
import torch
import torch.distributed as dist
from helpers.nets import NETS
from helpers.ranks import kill_pools
from helpers.slow import slow
from hypothesis import settings

from balanced_parallel.replicas import buckets as gradient_buckets
from balanced_parallel.replicas.workers import end_workers

settings.register_profile(
    "suite", derandomize=True, deadline=None, database=None
)  # the same cases on every machine
settings.load_profile("suite")
torch.set_num_threads(1)  # the suite already runs one process per core
gc.disable()  # It would visit all imported modules many times while tests are collected.


def pytest_configure(config):
    """Compiles the extension of the simulation while the workers import. Their first test of it would wait for half a minute."""
    if getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput"):
        gc.enable()  # It collects no tests.
        threading.Thread(target=compile_simulation, daemon=True).start()


def compile_simulation():
    with contextlib.suppress(RuntimeError):  # There is no compiler: the tests say so.
        importlib.import_module("balanced_parallel.simulation.compilation").load_native()


def pytest_collection_finish(session):
    """Hides what imports and the collection of tests have made from the garbage collector. Many tests run it."""
    importlib.import_module("torch._dynamo")  # the first optimizer would import it
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def earlier_objects_frozen():
    """Hides what earlier tests have left, such as imported modules and caches, from the garbage collector."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    environment = dict(os.environ)
    threads = set(threading.enumerate())
    yield
    changed = {
        name
        for name in environment.keys() | os.environ.keys()
        if environment.get(name) != os.environ.get(name)
    }
    by_libraries = (
        "PYTEST_CURRENT_TEST",
        "TORCHINDUCTOR_",
        "TRITON_",
        "CUDA_",
        "KMP_",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
    )  # torch sets them on the first use
    changed = {name for name in changed if not name.startswith(by_libraries)}
    assert not changed, f"the test changed the environment: {changed}"
    end_workers()  # A program keeps them.
    left = {
        thread.name
        for thread in set(threading.enumerate()) - threads
        if thread.name.startswith("replica")
    }
    assert not left, f"the test left threads running: {left}"
    assert not dist.is_initialized(), "the test left a process group running"
    # a start that fails leaves a number, and torch goes on with meshes of another name that it has cached
    dist.distributed_c10d._world.group_count = 0
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


@pytest.fixture
def double():
    """Float64 as the default, in which equality to 1e-10 means equality."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=[slow(25 * 2**20), 1], ids=["large buckets", "small buckets"])
def buckets(request, monkeypatch):
    """One bucket for all parameters of a small model, or one for each, whose sums run beside the backward."""
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", request.param)


@pytest.fixture
def small_buckets(monkeypatch):
    """A bucket for each parameter: the sums of all but the last run beside the backward."""
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 1)


@pytest.fixture
def nets(tmp_path):
    """Writes a file of networks. Returns the place of one of them, as the command line takes it."""
    (tmp_path / "nets.py").write_text(NETS)
    return lambda name: f"{tmp_path / 'nets.py'}:{name}"


@pytest.fixture
def trace_in_this_process(monkeypatch):
    """Traces for ``memory`` without a child process, as on other platforms than Linux.

    Torch caches the results of fake tensors, so that a trace takes a third of the time if one before ran the same operators
    in this process. ``tests/memory/test_fakes.py``, and the command line as a process, keep the children.
    """
    monkeypatch.setattr("balanced_parallel.memory.trace.fakes.FORKS", False)


def pytest_sessionfinish(session, exitstatus):
    """Ends the shared ranks. A run in which nothing passed is a failure, whatever pytest says of skips."""
    kill_pools()
    if hasattr(session.config, "workerinput") or session.config.option.collectonly:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == 0 and reporter is not None and not reporter.stats.get("passed"):
        session.exitstatus = 1
