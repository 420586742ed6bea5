"""Threads of the replicas: they persist, end with the models, and keep nothing."""

import contextvars
import copy
import gc
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from helpers.slow import slow_but
from torch import nn
from torch.utils.data import DataLoader

from balanced_parallel import DataParallelCriterion, DataParallelModel, TrainStep, convert_sync_batchnorm, simulate
from balanced_parallel.replicas.worker_pool import Worker, WorkerPool
from balanced_parallel.replicas.workers import run_replicas

APART = [torch.device("cpu", index) for index in range(3)]


def workers():
    return {thread for thread in threading.enumerate() if thread.name.startswith("replica")}


def wait_for_no_workers():
    deadline = time.monotonic() + 20
    while workers():
        assert time.monotonic() < deadline, f"left: {workers()}"
        time.sleep(0.01)


def normalised():
    """Returns a model whose replicas wait for each other, so that they need threads on the CPU too."""
    return DataParallelModel(convert_sync_batchnorm(nn.BatchNorm1d(4)), ["cpu"] * 3)


class Recording(nn.Module):
    """Records the threads of each device."""

    def __init__(self):
        super().__init__()
        self.linear, self.threads = nn.Linear(4, 5), {}

    def forward(self, x, target=None):
        self.threads.setdefault(str(x.device), set()).add(threading.current_thread())
        return self.linear(x) if target is None else (x - target).square().mean()


class RecordingLoss(nn.MSELoss):
    def __init__(self):
        super().__init__()
        self.threads = {}

    def forward(self, x, target):
        self.threads.setdefault(str(x.device), set()).add(threading.current_thread())
        return super().forward(x, target)


def test_one_thread_per_replica_runs_all_forwards_and_the_criterion():
    with simulate(3):
        net, loss = Recording(), RecordingLoss()
        model, criterion = DataParallelModel(net), DataParallelCriterion(loss, weight="rows")
        step = TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=1)
        for _ in range(3):
            step(torch.randn(12, 4), torch.randn(12, 5))
            criterion(model(torch.randn(5, 4)), torch.randn(5, 5))
            model(torch.randn(2, 4))
        assert {device: len(threads) for device, threads in net.threads.items()} == {f"sim:{index}": 1 for index in range(3)}
        assert net.threads == loss.threads
        other = Recording()
        DataParallelModel(other, ["sim:2", "sim:0"])(torch.randn(5, 4))
        assert all(other.threads[device] == net.threads[device] for device in other.threads)
        assert len(workers()) == 3


def test_threads_end_with_the_last_model():
    with simulate(3):
        model, criterion = DataParallelModel(nn.Linear(4, 5)), DataParallelCriterion(nn.MSELoss())
        criterion(model(torch.randn(6, 4)), torch.randn(6, 5)).backward()
        before = workers()
        assert len(before) == 3
        del model
        gc.collect()
        assert workers() == before
        del criterion
        gc.collect()
        wait_for_no_workers()


def test_a_model_that_has_not_run_in_threads_keeps_none():
    other = DataParallelModel(nn.Linear(4, 5), ["cpu"] * 2)
    other(torch.randn(6, 4))
    model = normalised()
    model(torch.ones(6, 4))
    assert len(workers()) == 3
    del model
    gc.collect()
    wait_for_no_workers()
    other(torch.randn(6, 4))


def test_a_thousand_models_have_no_more_threads_than_one():
    keep = []
    for number in range(1000):
        model = normalised()
        model(torch.ones(6, 4))
        keep = [*keep[-2:], model]
        assert len(workers()) == 3, number
    del model, keep
    gc.collect()
    wait_for_no_workers()


def test_copies_and_pickles_of_a_model_share_its_threads():
    with simulate(3):
        net = Recording()
        model = DataParallelModel(net)
        model(torch.randn(6, 4))
        before, net.threads = workers(), {}
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(torch.randn(6, 4))
            assert workers() == before


def test_a_forward_inside_of_a_forward_gets_threads_of_its_own():
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.linear, self.inner = nn.Linear(4, 4), [inner]

        def forward(self, x):
            return self.inner[0](self.linear(x)).gather(x.device)

    with simulate(3):
        inner = DataParallelModel(nn.Linear(4, 5))
        model = DataParallelModel(Outer(inner))
        for _ in range(5):
            model(torch.randn(9, 4)).gather().sum().backward()
        assert len(workers()) == 6  # the inner model runs one forward at a time


def test_forwards_in_two_threads_at_once_do_not_wait_for_each_other():
    together = threading.Barrier(6, timeout=20)
    pool = WorkerPool()
    settings = {"pool": lambda: pool}
    threads = [threading.Thread(target=run_replicas, args=([together.wait] * 3, APART), kwargs=settings) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not together.broken
    assert len(workers()) == 6
    assert len(set(run_replicas([threading.current_thread] * 3, APART, pool=lambda: pool))) == 3


def test_a_pool_outlives_failures():
    pool = WorkerPool()
    before = run_replicas([threading.current_thread] * 3, APART, pool=lambda: pool)
    with pytest.raises(ZeroDivisionError, match="replica 1"):
        run_replicas([int, lambda: 1 // 0, int], APART, pool=lambda: pool)
    assert run_replicas([threading.current_thread] * 3, APART, pool=lambda: pool) == before


class Interrupting(nn.Module):
    """Presses Ctrl-C in the forward of one replica, once."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.presses = nn.Linear(4, 5), nn.BatchNorm1d(5), [True]

    def forward(self, x):
        if x.device.index == 1 and self.presses:
            self.presses.pop()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.2)
        return self.norm(self.linear(x))


def test_a_model_can_be_used_after_ctrl_c():
    with simulate(3):
        net = convert_sync_batchnorm(Interrupting())
        own, model = [*map(id, net.parameters())], DataParallelModel(net)
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(9, 4))
        assert [*map(id, net.parameters())] == own
        model(torch.randn(9, 4)).gather().sum().backward()
        assert len(workers()) == 3


class Large:
    pass


@pytest.mark.parametrize("fails", [False, True])
def test_an_idle_worker_keeps_no_reference(fails):
    pool, large, variable = WorkerPool(), Large(), contextvars.ContextVar("variable")
    seen = weakref.ref(large)

    def work(large=large):
        variable.set(large)
        if fails:
            raise ValueError("bad")
        return large

    gc.disable()  # reference counts alone: memory in a cycle comes back late
    try:
        try:
            run_replicas([work, int, int], APART, pool=lambda: pool)
        except ValueError:
            assert fails
        del work, large
        assert seen() is None
    finally:
        gc.enable()


def test_memory_of_a_forward_is_free_when_its_outputs_are():
    with simulate(3) as cluster:
        model = DataParallelModel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
        model(torch.randn(6, 64))
        torch.accelerator.synchronize()
        live = cluster.live
        gc.disable()
        try:
            for _ in range(50):
                outputs = model(torch.randn(300, 64))
                del outputs
                assert cluster.live == live
        finally:
            gc.enable()


def test_a_worker_ends_with_its_last_reference_also_while_it_runs():
    released = threading.Event()
    worker = Worker("replica")
    thread = worker.thread
    worker.start(lambda: released.wait(20), int)
    del worker
    time.sleep(0.05)
    assert thread.is_alive()
    released.set()
    thread.join(20)
    assert not thread.is_alive()


class Rows:
    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.model(torch.full((6, 4), float(index))).gather().sum().item()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_models_run_in_the_processes_of_a_loader():
    model = normalised()
    model(torch.ones(6, 4))
    before = workers()
    assert len(before) == 3
    loader = DataLoader(Rows(model), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60)
    assert sum(len(batch) for batch in loader) == 8
    model(torch.ones(6, 4))
    assert workers() == before


EXIT = """
import atexit, os, threading, torch
from torch import nn
from balanced_parallel import DataParallelModel, convert_sync_batchnorm
model = DataParallelModel(convert_sync_batchnorm(nn.BatchNorm1d(4)), ["cpu"] * 3)
x = torch.ones(6, 4)
model(x)
assert len([thread for thread in threading.enumerate() if thread.name.startswith("replica")]) == 3
def run():
    for _ in range(200): model(x)
"""
ENDS = {
    "after a forward": ("raise SystemExit(3)", 3),
    "after a fork": ("if os.fork(): raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))", 0),
    "in a forward of an exit handler": ("atexit.register(model, x)", 0),
    "beside forwards": ("threading.Thread(target=run).start()", 0),
}


@pytest.mark.parametrize("end", slow_but(list(ENDS), "after a forward", "beside forwards"))
def test_no_thread_holds_up_the_end_of_the_interpreter(end):
    source, code = ENDS[end]
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", EXIT + source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (code, "")
