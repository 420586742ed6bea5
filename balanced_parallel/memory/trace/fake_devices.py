"""The devices of a trace."""

import torch

__all__: list[str] = []

HOME = torch.device("cpu")


def fake_devices(count: int) -> list[torch.device]:
    """Returns ``count`` devices for fake tensors.

    They are CPUs, because autograd aborts on accelerators that this machine does not have. The first has no index, so that a
    tensor that a model makes without naming a device is on it.
    """
    return [HOME, *(torch.device("cpu", index) for index in range(1, count))]


def host_of(count: int) -> torch.device:
    """Returns the fake device that represents the host of ``count`` fake devices."""
    return torch.device("cpu", count)
