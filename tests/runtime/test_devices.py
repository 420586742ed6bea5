"""Device lists: resolving, errors, moving tensors."""

import copy
import os

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from balanced_parallel import (
    BalancedOptimizer,
    DataParallelCriterion,
    DataParallelModel,
    TrainStep,
    simulate,
    verify,
)
from balanced_parallel.runtime import devices
from balanced_parallel.runtime.devices import free_bytes, resolve_devices, visible_devices

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device_ids", "error", "message"),
    [
        ([], ValueError, "device_ids is empty"),
        (
            "cpu",
            TypeError,
            r"device_ids='cpu', expected a list, such as \[0, 1\] or \['cpu', 'cpu'\]",
        ),
        (
            "auto",
            TypeError,
            r"device_ids='auto', expected a list, .*; leave it out to use each accelerator",
        ),
        (3, TypeError, r"device_ids=3, expected a list, such as \[0, 1\]"),
        (CPU, TypeError, "expected a list, such as"),
        ([97], ValueError, r"there is no device 97: this machine has .*\['cpu', 'cpu'\]"),
        ([-1], ValueError, "there is no device -1"),
        (["cuda:97"], ValueError, "there is no device 'cuda:97'"),
        (["gpu"], ValueError, "'gpu' is not a device, expected an integer, or a name such as"),
        ([True], TypeError, "True is not a device"),
        ([1.5], TypeError, "1.5 is not a device"),
    ],
)
def test_invalid_device_ids_raise_an_error_with_the_value_and_a_fix(device_ids, error, message):
    with pytest.raises(error, match=message):
        resolve_devices(device_ids)


def test_gpus_hidden_by_earlier_simulated_devices_raise_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
    )
    with pytest.raises(
        RuntimeError, match="this process has simulated devices.*use them in a new process"
    ):
        visible_devices()


def test_free_memory_of_the_host_is_half_of_all_where_the_system_does_not_tell(monkeypatch):
    assert (
        0
        < free_bytes(torch.device("cpu"))
        < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    monkeypatch.delitem(os.sysconf_names, "SC_AVPHYS_PAGES")  # macOS
    assert free_bytes(torch.device("cpu")) == os.sysconf("SC_PHYS_PAGES") // 2 * os.sysconf(
        "SC_PAGE_SIZE"
    )


class NoFloat64(TorchDispatchMode):
    """Refuses tensors in float64 on accelerators, as MPS does."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if (
                isinstance(leaf, torch.Tensor)
                and leaf.device.type == "sim"
                and leaf.dtype == torch.float64
            ):
                raise TypeError(f"{function} made a tensor in float64 on {leaf.device}")
        return result


@pytest.mark.parametrize("count", [1, 3])  # one replica runs in this thread, which the mode sees
@pytest.mark.parametrize(
    ("criterion", "weight"),
    [
        (nn.CrossEntropyLoss(weight=torch.arange(1.0, 6.0)), None),
        (
            lambda output, targets: (
                nn.functional.cross_entropy(output, targets) + 0.5 * output.pow(2).mean()
            ),
            None,
        ),
        (
            lambda output, targets: nn.functional.cross_entropy(output, targets),
            lambda output, targets: float(len(targets)),
        ),
    ],
    ids=["class weights", "means inside", "weight= returns a number"],
)
def test_devices_without_float64_train(monkeypatch, count, criterion, weight):
    monkeypatch.setattr(devices, "WITHOUT_FLOAT64", ("sim",))
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 5))
    batch = torch.randn(7, 4), torch.randint(5, (7,))
    with simulate(count), NoFloat64():
        model = DataParallelModel(net)
        losses = DataParallelCriterion(copy.deepcopy(criterion), weight=weight)
        optimizer = BalancedOptimizer(model, torch.optim.AdamW)
        loss = losses(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        step = TrainStep(model, losses, optimizer, micro_batch_size=2, max_grad_norm=1.0)
        assert 0 < step(*batch).item() < 10
        assert verify(net.eval(), losses, *batch).equal
