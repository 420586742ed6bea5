"""Thread-local state of the caller, seen by a new thread: each kind must be carried."""

import threading

import pytest
import torch

from balanced_parallel.runtime.thread_state import ThreadState

CPU = [torch.device("cpu")]


def current_state():
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        "product": (torch.ones(2, 2, device="cpu") @ torch.ones(2, 2, device="cpu")).dtype,
        "default device": torch.empty(0).device.type,
    }


def state_in_thread(state):
    found = {}

    def work():
        with state.enter():
            found.update(current_state())
        found["after"] = current_state()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found


@pytest.mark.parametrize(
    "block",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.autocast("cpu", enabled=False),
        lambda: torch.device("meta"),
    ],
)
def test_entered_state_equals_the_state_of_the_caller(block):
    plain = current_state()
    with block():
        expected = current_state()
        found = state_in_thread(ThreadState.capture(CPU))
    assert found.pop("after") == plain
    assert found == expected


def test_new_threads_do_not_inherit_autocast():
    found = {}
    with torch.autocast("cpu", torch.bfloat16):
        thread = threading.Thread(target=lambda: found.update(current_state()))
        thread.start()
        thread.join()
    assert not found["autocast"]
