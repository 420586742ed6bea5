"""A new thread knows nothing of the with-blocks around the call: each kind of state must be carried."""

import threading

import pytest
import torch

from balanced_parallel.runtime.thread_state import AmbientState

CPU = [torch.device("cpu")]


def seen():
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        "product": (torch.ones(2, 2, device="cpu") @ torch.ones(2, 2, device="cpu")).dtype,
        "default device": torch.empty(0).device.type,
    }


def in_thread(ambient):
    found = {}

    def work():
        with ambient.enter():
            found.update(seen())
        found["after"] = seen()

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
def test_a_worker_sees_what_the_caller_set(block):
    plain = seen()
    with block():
        expected = seen()
        found = in_thread(AmbientState.capture(CPU))
    assert found.pop("after") == plain
    assert found == expected


def test_a_thread_left_alone_would_not():
    found = {}
    with torch.autocast("cpu", torch.bfloat16):
        thread = threading.Thread(target=lambda: found.update(seen()))
        thread.start()
        thread.join()
    assert not found["autocast"]
