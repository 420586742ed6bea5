"""Device lists: resolving, errors, moving tensors."""

import os

import pytest
import torch

from balanced_parallel.runtime.devices import free_bytes, move, resolve_devices, visible_devices

CPU = torch.device("cpu")


def test_devices_resolve_from_strings_and_devices_with_repeats():
    assert resolve_devices(["cpu", CPU, "cpu:0"]) == [CPU, CPU, CPU]


def test_default_is_all_accelerators_or_the_cpu():
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
        (["gpu"], ValueError, "'gpu' is not a device, expected a name such as"),
        ([True], TypeError, "True is not a device"),
        ([1.5], TypeError, "1.5 is not a device"),
    ],
)
def test_invalid_device_ids_raise_an_error_with_the_value_and_a_fix(device_ids, error, message):
    with pytest.raises(error, match=message):
        resolve_devices(device_ids)


def test_move_to_the_same_device_returns_the_tensor_itself():
    tensor = torch.zeros(3)
    assert move(tensor, CPU) is tensor


def test_gpus_hidden_by_earlier_simulated_devices_raise_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    with pytest.raises(RuntimeError, match="this process has simulated devices.*use them in a new process"):
        visible_devices()


def test_free_memory_of_the_host_is_half_of_all_where_the_system_does_not_tell(monkeypatch):
    assert 0 < free_bytes(torch.device("cpu")) < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.delitem(os.sysconf_names, "SC_AVPHYS_PAGES")  # macOS
    assert free_bytes(torch.device("cpu")) == os.sysconf("SC_PHYS_PAGES") // 2 * os.sysconf("SC_PAGE_SIZE")
