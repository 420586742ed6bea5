"""Traces in processes of their own."""

import contextlib
import os
import threading
import time

import pytest
import torch
from helpers.memory_problems import PROBLEMS, estimated
from helpers.slow import slow_but
from torch import nn
from torch.nn import functional as F

from balanced_parallel import memory, simulate
from balanced_parallel.memory.devices import KINDS, find_kind
from balanced_parallel.memory.trace import allocations, tracer


def test_estimate_after_a_backward_on_an_accelerator_does_not_fork():
    """Autograd refuses to run in a process that is forked then: the trace is made in this one."""
    before = estimated("perceptron", device_kind="sim").allocated
    with simulate(2):
        net = nn.Linear(4, 4).to("sim:0")
        net(torch.zeros(2, 4, device="sim:0")).sum().backward()
        assert estimated("perceptron").allocated == before
        assert find_kind(None) is KINDS["sim"]
    resize = torch.UntypedStorage.resize_
    assert estimated("perceptron", device_kind="sim").allocated == before
    assert torch.UntypedStorage.resize_ is resize
    logits = torch.zeros(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            torch.softmax(logits.bfloat16(), 0).dtype == torch.bfloat16
        )  # the CPU's own choice is back


class Odd(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def die(inputs):
    os._exit(3)


def refuse(inputs):
    raise Odd("not", "here")


@pytest.mark.parametrize(
    ("forward", "kind", "message"),
    [(die, RuntimeError, "without a result"), (refuse, Exception, "^Odd: not here$")],
)
def test_a_killed_child_process_or_an_error_that_cannot_be_sent_raises_a_built_in_error(
    forward, kind, message
):
    net = nn.Linear(8, 8)
    net.forward = forward
    with pytest.raises(kind, match=message):
        memory.estimate(net, lambda out, _: out.sum(), torch.zeros(6, 8), torch.zeros(6))


HERE = os.getpid()


def hang_elsewhere(request, rows):
    if os.getpid() != HERE:
        threading.Event().wait()
    return os.getpid(), rows


def work_for(request, rows):
    end = time.monotonic() + rows
    while time.monotonic() < end:
        pass
    return os.getpid()


class Request:
    """A stand-in for a request."""


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.setattr(tracer, "PATIENCE", 0.2)
    monkeypatch.setattr(tracer.dataclasses, "replace", lambda request, **changes: request)
    with contextlib.closing(tracer.Processes([REQUEST])) as processes:
        yield processes


REQUEST = Request()


def test_processes_that_hang_are_replaced_by_this_process(processes):
    """A fork copies locks that other threads hold, which nothing releases in the child."""
    for rows in (1, 2):
        assert processes.run([(REQUEST, rows)], hang_elsewhere) == [(HERE, rows)]


def test_processes_that_work_are_waited_for(processes, caplog):
    with caplog.at_level("INFO", logger="balanced_parallel.memory"):
        first, second = processes.run([(REQUEST, 0.7), (REQUEST, 0)], work_for)
    assert HERE != first == second
    assert "traced 0 of 2 after 0 s" in caplog.messages


def test_options_of_a_plan_are_traced_in_the_same_processes(monkeypatch):
    pools = []

    class Counted(tracer.ProcessPoolExecutor):
        def submit(self, *args):
            result = super().submit(*args)
            pools.append((self, list(self._processes)))
            return result

    monkeypatch.setattr(tracer, "ProcessPoolExecutor", Counted)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2)])
    batch = torch.zeros(4, 64), torch.zeros(4, 64)
    plan = memory.plan(
        net, F.mse_loss, *batch, batch_size=256, capacity="190KiB", devices=2, device_kind="cpu"
    )
    assert len(plan.choices) > 1
    assert len({pool for pool, _ in pools}) == 1
    (numbers,) = {tuple(numbers) for _, numbers in pools}
    assert len(numbers) == min(2, os.cpu_count())
    for number in numbers:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


def run_anew(func, args, kwargs):
    return func(*args, **kwargs)


@pytest.mark.parametrize("name", slow_but([*PROBLEMS], "convolutions"))
def test_remembered_results_change_no_trace(monkeypatch, name):
    """Views, writes in place, several types and devices, a convolution: as if each operator ran anew."""
    settings = {"layout": "replicas", "devices": 2, "precision": "bf16", "device_kind": "a100"}
    monkeypatch.setattr("balanced_parallel.memory.trace.fakes.FORKS", False)
    ours = estimated(name, **settings).timeline
    monkeypatch.setattr(allocations, "run_once", run_anew)
    assert ours == estimated(name, **settings).timeline
