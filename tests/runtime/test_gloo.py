"""gloo's threads at the end of a process: an exit waits until they have released their tensors, and for nothing else."""

import ctypes
import hashlib
import sys
import threading
import time

import pytest
import torch.distributed as dist

from balanced_parallel.distributed.process_group import end_process_group
from balanced_parallel.runtime import gloo

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no /proc")


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def test_threads_of_a_process_group_are_known_by_their_name(group):
    dist.barrier()  # one of them has run
    assert gloo.thread_states()


def test_an_idle_group_is_not_waited_for(group):
    dist.barrier()
    began = time.monotonic()
    gloo.wait_until_idle()
    assert time.monotonic() - began < 2


def test_a_busy_thread_is_waited_for():
    data, ended = bytes(2**26), []

    def work():
        ctypes.CDLL(None).prctl(15, b"pt_gloo_test", 0, 0, 0)  # PR_SET_NAME
        started.set()
        for _ in range(10):
            hashlib.sha512(data)  # without the interpreter's lock
        ended.append(time.monotonic())

    started, thread = threading.Event(), threading.Thread(target=work)
    thread.start()
    started.wait()
    gloo.wait_until_idle(60)
    assert ended
    thread.join()


def test_the_wait_has_a_limit():
    stop, started = threading.Event(), threading.Event()

    def work():
        ctypes.CDLL(None).prctl(15, b"pt_gloo_test", 0, 0, 0)
        started.set()
        while not stop.is_set():
            hashlib.sha512(bytes(2**22))

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    began = time.monotonic()
    gloo.wait_until_idle(0.1)
    assert time.monotonic() - began < 5
    stop.set()
    thread.join()


@pytest.mark.parametrize("failed", [True, False])
def test_a_group_is_destroyed_on_a_clean_exit_only(group, failed, monkeypatch):
    if failed:
        monkeypatch.setattr(sys, "last_value", LookupError("this rank fails"), raising=False)
    else:
        monkeypatch.delattr(sys, "last_value", raising=False)
    end_process_group()
    assert dist.is_initialized() == failed
