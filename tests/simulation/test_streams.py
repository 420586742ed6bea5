"""Streams: simulated devices find operations that a GPU might run too early."""

import pytest
import torch
from helpers.streams import TOO_EARLY, stream_on

from balanced_parallel import simulate


def read_before(other, tensor):
    with other:
        return tensor + 1


def write_before(other, tensor):
    with other:
        tensor += 1


def write_while_it_is_read(other, tensor):
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        tensor.sum()
    tensor += 1


def read_what_another_wrote(other, tensor):
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        tensor += 1
    return tensor.sum()


def copy_to_the_host(other, tensor):
    with other:
        return tensor.cpu()


def read_a_number(other, tensor):
    with other:
        return tensor[0].item()


def allocate_and_read_on(other):
    fresh = torch.ones(4, device="sim:0")
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        fresh.sum()
    return fresh


def free_while_it_is_read(other, tensor):
    allocate_and_read_on(other)
    return tensor * 3  # may be given the same memory


UNSYNCHRONIZED = [
    *(read_before, write_before, write_while_it_is_read, read_what_another_wrote),
    *(copy_to_the_host, read_a_number, free_while_it_is_read),
]


@pytest.mark.parametrize("program", UNSYNCHRONIZED)
def test_unsynchronized_streams_raise_an_error(program):
    with simulate(2):
        tensor = torch.ones(4, device="sim:0")
        with pytest.raises(RuntimeError, match=TOO_EARLY):
            program(stream_on(), tensor)
    with simulate(2, strict=False):
        program(stream_on(), torch.ones(4, device="sim:0"))


def test_synchronized_streams_run_in_order():
    with simulate(2):
        mine = torch.accelerator.current_stream()
        other = stream_on()
        tensor = torch.ones(4, device="sim:0")
        other.wait_stream(mine)
        with other:
            assert torch.accelerator.current_stream() == other
            tensor += 1
            event = other.record_event()
            halves = tensor.to("sim:1") / 2  # a copy between devices has both wait for each other
        mine.wait_event(event)
        assert tensor.tolist() == [2] * 4
        assert halves.sum().item() == 4
        with other:
            tensor += 1
        other.synchronize()  # the host has waited, so what it calls next comes after
        assert tensor.sum().item() == 12
        with other:
            tensor += 1
        torch.sim.synchronize("sim:0")
        assert tensor.sum().item() == 16
        with other:
            tensor += 1
        torch.sim.synchronize("sim:1")  # the wrong one
        with pytest.raises(RuntimeError, match=TOO_EARLY):
            tensor.sum()


def test_record_stream_delays_reuse_of_memory():
    with simulate(1):
        mine = torch.accelerator.current_stream()
        other = stream_on()
        allocate_and_read_on(other).record_stream(other)
        assert torch.zeros(4, device="sim:0").sum() == 0
        allocate_and_read_on(other)
        mine.wait_stream(other)
        assert torch.zeros(4, device="sim:0").sum() == 0


def test_views_and_shapes_need_no_synchronization():
    with simulate(1):
        tensor = torch.ones(4, 4, device="sim:0")
        with stream_on():
            assert tensor[1:].view(-1, 2).t().detach().shape == (2, 6)
            assert torch.empty_like(tensor).shape == tensor.shape
