"""Writes to parameters that torch does not record: by optimizers and through ``.data``, compared with the plain program."""

import copy
import io

import pytest
import torch
from helpers.problems import build_net
from torch import nn
from torch.testing import assert_close

from balanced_parallel import DataParallelModel, gather, simulate


@pytest.mark.usefixtures("double")
def test_parameters_keep_their_class_and_serialization():
    with simulate(3):
        net = build_net().to("sim:0")
        model = DataParallelModel(net)
        optimizer = torch.optim.AdamW(net.parameters())
        gather(model(torch.randn(5, 4))).sum().backward()
        optimizer.step()
        kept = net[0].weight.data
        assert all(
            type(parameter) is nn.Parameter and not vars(parameter)
            for parameter in net.parameters()
        )
        assert type(kept) is torch.Tensor
        assert type(net[0].weight.detach()) is torch.Tensor
        assert all(
            type(parameter) is nn.Parameter for parameter in copy.deepcopy(model).parameters()
        )
        net.to("cpu")
        assert net[0].weight.data.device.type == "cpu"
        for saved in (net.state_dict(), net[0].weight, list(net.parameters())):
            file = io.BytesIO()
            torch.save(saved, file)
            assert b"balanced_parallel" not in file.getvalue()
            file.seek(0)
            torch.load(file, weights_only=True)
        net.half()
        assert net[0].weight.dtype == torch.float16
    file = io.BytesIO()
    torch.save(net, file)
    assert b"balanced_parallel" not in file.getvalue()


class Momentum(nn.Module):
    """The second layer follows the first in each forward, as in MoCo."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Linear(4, 3)
        self.key = nn.Linear(4, 3)

    def forward(self, x):
        with torch.no_grad():
            self.key.weight.lerp_(self.query.weight, 0.5)
        return self.query(x) - self.key(x + 1)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_a_forward_that_writes_parameters_runs_once_per_device(frozen, enabled):
    x = torch.randn(6, 4)
    expected = Momentum()
    output = expected(x)
    with simulate(2), torch.set_grad_enabled(enabled):
        for devices in (["sim:0", "sim:1"], ["cpu", "sim:1"]):
            net = Momentum()
            net.key.requires_grad_(not frozen)
            found = gather(DataParallelModel(net, devices)(x))
            assert_close(found.cpu(), output)
            assert_close(net.key.weight.cpu(), expected.key.weight)
        for devices in (["cpu", "cpu"], ["sim:0", "sim:1", "sim:1"]):
            net = Momentum()
            net.key.requires_grad_(not frozen)
            with pytest.raises(
                RuntimeError,
                match="wrote to a parameter that several replicas on one device share, .* expected one",
            ):
                DataParallelModel(net, devices)(x)
