"""Workers of replicas: results, failures, and the state of the calling thread."""

import contextvars
import functools
import gc
import signal
import threading
import time
import weakref

import pytest
import torch

from balanced_parallel.replicas import workers
from balanced_parallel.replicas.meeting import current_replica
from balanced_parallel.replicas.worker_pool import WorkerPool
from balanced_parallel.replicas.workers import run_replicas

CPUS = [torch.device("cpu")] * 3
APART = [torch.device("cpu", index) for index in range(3)]  # replicas on one device take turns


class Custom(Exception):
    """An error whose message is not its arguments."""

    def __init__(self, code, *, detail):
        super().__init__(code, detail)
        self.code, self.detail = code, detail

    def __str__(self):
        return f"code {self.code}"


def failing(error):
    def work():
        raise error

    return work


def test_workers_run_concurrently_and_return_in_order():
    barrier = threading.Barrier(3, timeout=20)
    work = [lambda index=index: (barrier.wait(), index)[1] for index in range(3)]
    assert run_replicas(work, APART) == [0, 1, 2]


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
    with pytest.raises(type(error), match="in replica 1 on device cpu") as caught:
        run_replicas([int, failing(error), int], CPUS)
    assert text.strip("'") in str(caught.value)
    assert type(caught.value).__name__ == type(error).__name__
    for name in ("code", "detail", "errno", "filename", "reason"):
        assert getattr(caught.value, name, None) == getattr(error, name, None)


def test_errors_of_a_single_replica_name_the_replica():
    with pytest.raises(ValueError, match=r"bad \(in replica 0 on device cpu\)"):
        run_replicas([failing(ValueError("bad"))], CPUS[:1])


def test_first_error_is_raised_after_all_workers_ended():
    begun, finished = threading.Event(), threading.Event()

    def slow():
        begun.set()
        time.sleep(0.2)
        finished.set()
        raise TypeError("the second failure")

    def fast():
        begun.wait(20)
        raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        run_replicas([slow, fast, int], APART)
    assert finished.is_set()


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

    run_replicas([functools.partial(work, index) for index in range(3)], [CPUS[0], APART[1], CPUS[0]])
    on_cpu = [(index, part) for index, part in events if index != 1]
    assert on_cpu == [(0, "a"), (0, "a"), (2, "a"), (2, "a"), (0, "b"), (0, "b"), (2, "b"), (2, "b"), (0, "c"), (2, "c")]


def test_replicas_do_not_begin_after_a_failure_on_their_device():
    begun = []
    with pytest.raises(ValueError, match="replica 0"):
        run_replicas([failing(ValueError("bad")), lambda: begun.append(1), lambda: begun.append(2)], CPUS)
    assert not begun


def test_handled_errors_keep_no_tensor_alive():
    tensor = torch.zeros(10)
    seen = weakref.ref(tensor)

    def work(tensor=tensor):
        raise ValueError("bad")

    try:
        run_replicas([work, int], CPUS[:2])
    except ValueError:
        pass
    gc.disable()  # only reference counts: what a cycle would hold on to until the collector runs is memory not returned
    try:
        del work, tensor
        assert seen() is None
    finally:
        gc.enable()


def test_workers_have_the_grad_mode_and_autocast_of_the_caller():
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = run_replicas([lambda: (torch.is_grad_enabled(), torch.get_autocast_dtype("cpu"))] * 3, CPUS)
    assert found == [(False, torch.bfloat16)] * 3


class ByKeyword(Exception):
    def __new__(cls, *, code):
        return super().__new__(cls, code, "detail")

    def __init__(self, *, code):
        self.code = code


class ByMapping(Exception):
    """An exception whose message is made of an argument that is not a string."""

    def __str__(self):
        return f"code {self.args[0]['code']}"


class Slotted(Exception):
    __slots__ = ("_code",)

    def __init__(self, code, detail):
        super().__init__(code, detail)
        self._code = code

    def __str__(self):
        return f"code {self._code}"


class Indexed(Exception):
    """Cannot be printed without what its constructor has found."""

    def __new__(cls, *found):
        made = super().__new__(cls)
        made.found = dict(enumerate(found))
        return made

    def __init__(self, *found):
        super().__init__()
        self.first = self.found[0]

    def __str__(self):
        return f"first {self.found[0]}"


def _invalid():
    pydantic = pytest.importorskip("pydantic")
    with pytest.raises(pydantic.ValidationError) as caught:
        pydantic.TypeAdapter(int).validate_python("x")
    return caught.value


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    "make", [lambda: ByKeyword(code=3), lambda: ByMapping({"code": 3}), lambda: Slotted(3, 4), lambda: Indexed(3), _invalid]
)
def test_errors_with_custom_constructors_keep_type_and_arguments(make, replicas):
    error = make()
    text, arguments = str(error), error.args
    with pytest.raises(type(error)) as caught:
        run_replicas([failing(error), int, int][:replicas], CPUS[:replicas])
    found = caught.value
    assert text in str(found)
    assert found.args == arguments
    for name in ("code", "_code", "first"):
        assert getattr(found, name, None) == getattr(error, name, None)
    assert "in replica 0 on device cpu" in "".join([str(found), *getattr(found, "__notes__", [])])


@pytest.mark.parametrize("moment", ["before a start", "in a start"])
def test_keyboard_interrupt_before_all_workers_run_ends_the_others(monkeypatch, moment):
    calls = []
    start = threading.Thread.start

    def interrupted(thread, *arguments):
        calls.append(thread)
        if len(calls) != 2:
            return start(thread, *arguments)
        if moment == "in a start":
            start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_replicas([lambda: current_replica().exchange(1)] * 3, CPUS)
    for thread in calls if moment == "in a start" else calls[:1]:
        thread.join(20)
        assert not thread.is_alive()


def press_ctrl_c():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.mark.parametrize("devices", [CPUS, APART], ids=["one device", "several devices"])
def test_keyboard_interrupt_ends_exchanges(devices):
    pool = WorkerPool()

    def exchanging():
        return current_replica().exchange(1)

    def interrupting():
        press_ctrl_c()
        time.sleep(0.2)
        return current_replica().exchange(1)

    with pytest.raises(KeyboardInterrupt):
        run_replicas([exchanging, interrupting, exchanging], devices, pool=lambda: pool)
    assert run_replicas([exchanging] * 3, devices, pool=lambda: pool) == [[1] * 3] * 3


def test_keyboard_interrupt_does_not_wait_for_a_hanging_replica(monkeypatch):
    monkeypatch.setattr(workers, "INTERRUPTED_SECONDS", 0.2)
    pool, released, threads = WorkerPool(), threading.Event(), []

    def hanging():
        threads.append(threading.current_thread())
        press_ctrl_c()
        released.wait(60)

    with pytest.raises(KeyboardInterrupt):
        run_replicas([int, hanging, int], APART, pool=lambda: pool)
    assert run_replicas([threading.current_thread] * 3, APART, pool=lambda: pool)[1] is not threads[0]
    released.set()
    threads[0].join(20)
    assert not threads[0].is_alive()


@pytest.mark.usefixtures("double", "buckets")
def test_workers_have_the_context_variables_of_the_caller():
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    assert run_replicas([variable.get] * 3, [torch.device("cpu")] * 3) == [7] * 3
