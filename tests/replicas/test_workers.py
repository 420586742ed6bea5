"""Workers of replicas: results, failures, and the state of the calling thread.

Threads of the replicas: they persist, and keep nothing.
"""

import contextvars
import copy
import functools
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
from helpers.optimizers import sgd
from helpers.releases import released_at_once
from helpers.slow import slow_but
from torch import nn
from torch.utils.data import DataLoader

from balanced_parallel import (
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    convert_sync_batchnorm,
    simulate,
)
from balanced_parallel.replicas import workers
from balanced_parallel.replicas.workers import current_replica, run_replicas

CPUS = [torch.device("cpu")] * 3
APART = [torch.device("cpu", index) for index in range(3)]  # replicas on one device take turns


def idle_threads():
    return {worker.thread for each in workers._idle.values() for worker in each}


class Custom(Exception):
    """An error whose message is not its arguments."""

    def __init__(self, code, *, detail):
        super().__init__(code, detail)
        self.code = code
        self.detail = detail

    def __str__(self):
        return f"code {self.code}"


def failing(error):
    def work():
        raise error

    return work


@pytest.mark.parametrize(
    "error",
    [
        ValueError("wrong shape"),
        KeyError("name"),
        RuntimeError(),
        torch.OutOfMemoryError("out of memory"),
        FileNotFoundError(2, "No such file", "x"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
        Custom(7, detail="why"),
        KeyboardInterrupt("stop"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_keep_their_type_and_name_the_replica(error):
    text = str(error)
    arguments = error.args
    with pytest.raises(type(error)) as caught:
        run_replicas([int, failing(error), int], CPUS)
    assert caught.value is error
    assert (str(error), error.args, error.__notes__) == (
        text,
        arguments,
        ["in replica 1 on device cpu"],
    )


def test_replicas_on_one_device_take_turns_in_order():
    """They share its random numbers. A replica that waits for the others passes its turn on."""
    events = []

    def work(index):
        for part in "ab":
            events.append((index, part))
            time.sleep(0.01)
            events.append((index, part))
            current_replica().exchange(None)
        events.append((index, "c"))

    run_replicas(
        [functools.partial(work, index) for index in range(3)], [CPUS[0], APART[1], CPUS[0]]
    )
    on_cpu = [(index, part) for index, part in events if index != 1]
    assert on_cpu == [
        (0, "a"),
        (0, "a"),
        (2, "a"),
        (2, "a"),
        (0, "b"),
        (0, "b"),
        (2, "b"),
        (2, "b"),
        (0, "c"),
        (2, "c"),
    ]


@pytest.mark.parametrize("moment", ["before a start", "in a start"])
def test_keyboard_interrupt_before_all_workers_run_ends_the_others(monkeypatch, moment):
    calls = []
    ended = []
    start = threading.Thread.start

    def interrupted(thread, *arguments):
        calls.append(thread)
        if len(calls) != 2:
            return start(thread, *arguments)
        if moment == "in a start":
            start(thread)
        raise KeyboardInterrupt

    def exchanging():
        with pytest.raises(RuntimeError, match="ended without the exchange"):
            current_replica().exchange(1)
        ended.append(threading.current_thread())

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_replicas([exchanging] * 3, CPUS)
    assert {*ended} <= {calls[0]} == idle_threads()


def press_ctrl_c():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_keyboard_interrupt_ends_exchanges_on_one_device(monkeypatch):
    monkeypatch.setattr(workers, "INTERRUPTED_SECONDS", 0.4)

    def exchanging():
        return current_replica().exchange(1)

    def interrupting():
        press_ctrl_c()
        time.sleep(0.2)
        return current_replica().exchange(1)

    with pytest.raises(KeyboardInterrupt):
        run_replicas([exchanging, interrupting, exchanging], CPUS)
    assert run_replicas([exchanging] * 3, CPUS) == [[1] * 3] * 3


def test_keyboard_interrupt_does_not_wait_for_a_hanging_replica(monkeypatch):
    monkeypatch.setattr(workers, "INTERRUPTED_SECONDS", 0.2)
    released = threading.Event()
    threads = []

    def hanging():
        threads.append(threading.current_thread())
        press_ctrl_c()
        released.wait(60)

    with pytest.raises(KeyboardInterrupt):
        run_replicas([int, hanging, int], APART)
    assert run_replicas([threading.current_thread] * 3, APART)[1] is not threads[0]
    released.set()


def normalised():
    """Returns a model whose replicas wait for each other, so that they need threads on the CPU too."""
    return DataParallelModel(convert_sync_batchnorm(nn.BatchNorm1d(4)), ["cpu"] * 3)


class Recording(nn.Module):
    """Records the threads of each device."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 5)
        self.threads = {}

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
        net = Recording()
        loss = RecordingLoss()
        model = DataParallelModel(net)
        criterion = DataParallelCriterion(loss, weight="rows")
        step = TrainStep(model, criterion, sgd(model), micro_batch_size=1)
        for _ in range(3):
            step(torch.randn(12, 4), torch.randn(12, 5))
            criterion(model(torch.randn(5, 4)), torch.randn(5, 5))
            model(torch.randn(2, 4))
        assert {device: len(threads) for device, threads in net.threads.items()} == {
            f"sim:{index}": 1 for index in range(3)
        }
        assert net.threads == loss.threads
        other = Recording()
        DataParallelModel(other, ["sim:2", "sim:0"])(torch.randn(5, 4))
        assert all(other.threads[device] == net.threads[device] for device in other.threads)
        net.threads = {}
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            copied(torch.randn(6, 4))
        assert len(idle_threads()) == 3


def test_threads_keep_nothing_of_the_forward_that_starts_them(monkeypatch):
    """Models were never freed on Python without the global lock, where a thread keeps the context in which it was started."""
    contexts = []
    start = threading.Thread.start
    monkeypatch.setattr(
        threading.Thread,
        "start",
        lambda thread: (contexts.append(contextvars.copy_context()), start(thread)),
    )
    with simulate(2):
        DataParallelModel(nn.Linear(4, 5))(torch.randn(6, 4))
    assert [len(context) for context in contexts] == [0, 0]


def test_a_forward_inside_of_a_forward_gets_threads_of_its_own():
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.inner = [inner]

        def forward(self, x):
            return self.inner[0](self.linear(x)).gather(x.device)

    with simulate(3):
        inner = DataParallelModel(nn.Linear(4, 5))
        model = DataParallelModel(Outer(inner))
        for _ in range(5):
            model(torch.randn(9, 4)).gather().sum().backward()
        assert len(idle_threads()) == 6  # the inner model runs one forward at a time


class Interrupting(nn.Module):
    """Presses Ctrl-C in the forward of one replica, once."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.presses = [True]

    def forward(self, x):
        if x.device.index == 1 and self.presses:
            self.presses.pop()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.2)
        return self.norm(self.linear(x))


def test_a_model_can_be_used_after_ctrl_c():
    with simulate(3):
        net = convert_sync_batchnorm(Interrupting())
        own = [*map(id, net.parameters())]
        model = DataParallelModel(net)
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(9, 4))
        assert [*map(id, net.parameters())] == own
        model(torch.randn(9, 4)).gather().sum().backward()
        assert len(idle_threads()) == 3


class Large:
    pass


@released_at_once
@pytest.mark.parametrize("fails", [False, True])
def test_an_idle_worker_keeps_no_reference(fails):
    large = Large()
    variable = contextvars.ContextVar("variable")
    seen = weakref.ref(large)

    def work(large=large):
        variable.set(large)
        if fails:
            raise ValueError("bad")
        return large

    gc.disable()  # reference counts alone: memory in a cycle comes back late
    try:
        try:
            run_replicas([work, int, int], APART)
        except ValueError:
            assert fails
        del work, large
        assert seen() is None
    finally:
        gc.enable()


@released_at_once
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
    before = idle_threads()
    assert len(before) == 3
    loader = DataLoader(
        Rows(model), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    assert sum(len(batch) for batch in loader) == 8
    model(torch.ones(6, 4))
    assert idle_threads() == before


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


@pytest.mark.parametrize("end", slow_but(list(ENDS), "after a forward"))
def test_no_thread_holds_up_the_end_of_the_interpreter(end):
    source, code = ENDS[end]
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", EXIT + source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (code, "")
