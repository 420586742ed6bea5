import pytest
import torch

from balanced_parallel.runtime.devices import move, peak_bytes, resolve_devices, visible_devices

CPU = torch.device("cpu")


def test_names_of_every_kind_and_repeats():
    assert resolve_devices(["cpu", CPU, "cpu:0"]) == [CPU, CPU, CPU]


def test_default_is_every_accelerator_else_the_cpu():
    expected = torch.accelerator.device_count() if torch.accelerator.is_available() else 1
    assert len(resolve_devices(None)) == len(visible_devices()) == expected


@pytest.mark.parametrize(
    ("device_ids", "error", "message"),
    [
        ([], ValueError, "device_ids is empty"),
        ("cpu", TypeError, r"device_ids='cpu' is one device.*write device_ids=\['cpu'\]"),
        (0, TypeError, "one device, expected a list"),
        ([97], ValueError, r"there is no device 97: this machine has .*\['cpu', 'cpu'\]"),
        ([-1], ValueError, "there is no device -1"),
        (["cuda:97"], ValueError, "there is no device 'cuda:97'"),
        (["gpu"], ValueError, "'gpu' is no device, expected a name such as"),
        ([True], TypeError, "True is no device"),
        ([1.5], TypeError, "1.5 is no device"),
    ],
)
def test_errors_say_what_was_given_and_what_to_do(device_ids, error, message):
    with pytest.raises(error, match=message):
        resolve_devices(device_ids)


def test_moving_to_where_a_tensor_is_copies_nothing():
    tensor = torch.zeros(3)
    assert move(tensor, CPU) is tensor


def test_peak_of_the_cpu_is_that_of_the_process():
    before = peak_bytes(CPU)
    block = torch.ones(2**24)
    assert peak_bytes(CPU) >= max(before, block.nbytes)


def test_gpus_behind_devices_that_were_simulated_are_not_overlooked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    with pytest.raises(RuntimeError, match="this process has simulated devices.*use them in a new process"):
        visible_devices()
