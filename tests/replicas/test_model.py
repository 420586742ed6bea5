"""``DataParallelModel``: outputs, arguments, devices, errors, copies."""

import pytest
import torch
from helpers.problems import build_net
from helpers.traffic import devices_of
from torch import nn

from balanced_parallel import DataParallelModel, simulate

CPUS = ["cpu"] * 3


def test_model_is_a_data_parallel_with_its_state_dict():
    model = DataParallelModel(build_net(), CPUS)
    assert isinstance(model, nn.DataParallel)
    other = nn.DataParallel(build_net())
    assert list(model.state_dict()) == list(other.state_dict())
    model.load_state_dict(other.state_dict())
    other.load_state_dict(model.state_dict())
    assert all(name.startswith("module.") for name in model.state_dict())


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7])
def test_one_output_per_replica_that_had_rows(rows):
    net = build_net()
    outputs = DataParallelModel(net, CPUS)(torch.randn(rows, 4))
    assert isinstance(outputs, list)
    assert [len(output) for output in outputs] == [
        size for size in (-(-(rows - i) // 3) for i in range(3)) if size > 0
    ] or [0]


def test_default_devices_are_all_simulated_devices():
    with simulate(3) as cluster:
        net = build_net().to("sim:0")
        assert DataParallelModel(net).devices == cluster.devices
        assert DataParallelModel(net, device_ids=[0, "sim:2"]).devices == cluster.devices[::2]
        assert devices_of(DataParallelModel(net, [0, 0])(torch.randn(4, 4))) == ["sim:0"] * 2
        with pytest.raises(
            ValueError, match="there is no device 3: this machine has 3 sim devices"
        ):
            DataParallelModel(net, device_ids=[3])


def test_out_of_memory_error_names_the_replica():
    with simulate(3, memory=["8MiB", "2MiB", "8MiB"]):
        model = DataParallelModel(nn.Linear(64, 2048).to("sim:0"))
        with pytest.raises(
            torch.OutOfMemoryError, match="GPU 1 has a total capacity of 2.00 MiB"
        ) as caught:
            model(torch.randn(600, 64))
        assert "replica 1" in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
