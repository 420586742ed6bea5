"""Evaluation without a graph: modes are put back, replicas follow, and training goes on."""

import copy

import pytest
import torch
from helpers.problems import assert_equal
from helpers.slow import pairs
from torch import nn

from balanced_parallel import DataParallelModel, simulate
from balanced_parallel.savings import inference


def make_net():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 5))
    net[1].eval()  # frozen
    return net


def test_modes_are_put_back_after_an_error_too():
    net = make_net()
    other = nn.Dropout()

    def fail():
        with inference(net, other):
            assert not any(module.training for module in [*net.modules(), other])
            assert not net(torch.ones(2, 4)).requires_grad
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [module.training for module in net.modules()] == [True, True, False, True, True]
    assert other.training
    assert not torch.is_inference_mode_enabled()

    @inference(net)
    def evaluate():
        return net(torch.ones(2, 4))

    assert evaluate().is_inference()
    assert evaluate().is_inference()
    assert net.training


class Forces(nn.Module):
    """Energies, and their gradients by the positions, by features, or by a weight."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.first = nn.Linear(3, 6)
        self.second = nn.Linear(6, 1)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_() if self.way == "detached" else x
            features = self.first(x).tanh()
            energies = self.second(features)
            of = {"features": features, "weight": self.second.weight}.get(self.way, x)
            (gradient,) = torch.autograd.grad(energies.sum(), of)
        return energies.detach(), gradient


@pytest.mark.parametrize(
    ("way", "frozen", "devices"),
    pairs(["positions", "detached", "features", "weight"], [False, True], [None, ["cpu"] * 3]),
)
def test_gradients_in_a_forward_under_no_grad(double, way, frozen, devices):
    """Shards had no graph to their input, and replicas on other devices had parameters without ``requires_grad``."""
    plain = Forces(way)
    x = torch.randn(7, 3, requires_grad=True)
    with simulate(3):
        net = copy.deepcopy(plain)
        model = DataParallelModel(net, devices)
        inputs = x.detach().to("cpu" if devices else "sim:0").requires_grad_()
        model(inputs)
        # The copies are there by then.
        for module in (plain, net):
            module.first.requires_grad_(not frozen)
        model.refresh_replicas()
        with torch.no_grad():
            outputs = model(inputs)
            energies, forces = plain(x)
        assert_equal(outputs.unzip()[0].gather("cpu"), energies)
        parts = [part.cpu() for _, part in outputs]
        total = sum(parts) if way == "weight" else torch.cat(parts)
        assert_equal(total, forces)
        copies = [copied for each in model.replicas.copies.by_device.values() for copied in each]
        expected = [parameter.requires_grad for parameter in net.parameters()]
        assert [copied.requires_grad for copied in copies] == expected * (0 if devices else 2)
        assert all(tensor.grad is None for tensor in (*net.parameters(), *copies, inputs))
