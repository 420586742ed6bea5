"""Streams that are current in several threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from balanced_parallel import simulate
from balanced_parallel.runtime.streams import on_streams


def test_threads_that_enter_one_stream_get_back_their_own():
    """Replicas enter the streams of the caller. Without the global lock this failed at "Stream context stack is empty"."""
    entered = threading.Event()
    left = threading.Event()

    def run(stream, before_end):
        with torch.Stream(stream.device) as own:
            with on_streams({stream.device: stream}):
                before_end()
            left.set()
            return torch.accelerator.current_stream(stream.device) == own

    with simulate(1), ThreadPoolExecutor(1) as pool:
        shared = torch.Stream("sim:0")
        other = []

        def enter_in_another_thread():
            other.append(pool.submit(run, shared, lambda: (entered.set(), left.wait(20))))
            assert entered.wait(20)

        assert run(shared, enter_in_another_thread)
        assert other[0].result(20)
