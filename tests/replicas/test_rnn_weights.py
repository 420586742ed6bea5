"""Weights of RNNs on every device in one buffer, in cuDNN's order. A stand-in for cuDNN lays them out and checks them."""

import collections

import pytest
import torch
from torch import nn

from balanced_parallel import BalancedOptimizer, DataParallelModel, gather, simulate

KINDS = {
    "lstm": lambda: nn.LSTM(3, 2, 2, bidirectional=True),
    "gru without bias": lambda: nn.GRU(3, 2, 2, bias=False),
    "projected": lambda: nn.LSTM(3, 4, proj_size=2),
}


@pytest.fixture
def flattened(monkeypatch):
    """Replaces ``flatten_parameters``, which does nothing without CUDA, and counts its calls by device."""
    calls = collections.Counter()

    @torch.no_grad()
    def flatten_parameters(self):
        weights = self._flat_weights
        calls[str(weights[0].device)] += 1
        buffer = torch.cat([weight.flatten() for weight in in_order(weights)])
        pieces = buffer.split([weight.numel() for weight in in_order(weights)])
        for weight, piece in zip(in_order(weights), pieces, strict=True):
            weight.set_(piece.view(weight.shape))

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten_parameters)
    return calls


def in_order(weights):
    """Returns the matrices of all layers before their biases."""
    return sorted(weights, key=lambda weight: -weight.dim())


def is_flat(weights):
    """Returns True if the weights are as ``try_get_weight_buf`` of torch's ``cudnn/RNN.cpp`` expects them."""
    storage, offset = weights[0].untyped_storage().data_ptr(), 0
    for weight in in_order(weights):
        if weight.data_ptr() != storage + offset or not weight.is_contiguous():
            return False
        offset += weight.nbytes
    return weights[0].untyped_storage().nbytes() == offset


class Reads(nn.Module):
    """An RNN that records in each forward whether cuDNN could take its weights as they are."""

    def __init__(self, kind):
        super().__init__()
        self.rnn, self.found = KINDS[kind](), []

    def forward(self, x):
        output, _ = self.rnn(x)
        own = [getattr(self.rnn, name) for name in self.rnn._flat_weights_names]
        same = all(one is other for one, other in zip(own, self.rnn._flat_weights, strict=True))
        self.found.append((str(x.device), is_flat(self.rnn._flat_weights) and same))
        return output


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_flat_on_every_device_and_flattened_once(flattened, kind):
    with simulate(3):
        torch.manual_seed(0)
        net = Reads(kind).to("sim:0")
        model = DataParallelModel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        flattened.clear()
        for _ in range(3):
            gather(model(torch.ones(4, 6, 3).transpose(0, 1)), "cpu").sum().backward()
            optimizer.step()
        assert sorted(net.found) == [(f"sim:{index}", True) for index in range(3) for _ in range(3)]
        assert flattened == {"sim:1": 1, "sim:2": 1}  # the parameters themselves were flattened by .to()
        assert is_flat(net.rnn._flat_weights)
        assert all(one is other for one, other in zip(net.rnn._flat_weights, net.rnn.parameters(), strict=True))


def test_weights_that_got_another_type_are_flattened_again(flattened):
    with simulate(2):
        net = Reads("lstm").to("sim:0")
        model = DataParallelModel(net)
        model(torch.ones(4, 6, 3))
        net.double()
        flattened.clear()
        for _ in range(2):
            model(torch.ones(4, 6, 3, dtype=torch.double))
        assert flattened == {"sim:1": 1}
        assert all(flat for _, flat in net.found)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_flat_copies_follow_the_parameters(flattened, is_sharded):
    def trained(net, forward, optimizer):
        x = torch.linspace(-1, 1, 72).view(4, 6, 3)
        for _ in range(3):
            optimizer.zero_grad()
            forward(x).pow(2).sum().backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in net.parameters()]

    torch.manual_seed(0)
    plain = KINDS["lstm"]()
    state = plain.state_dict()
    state = {name: tensor.clone() for name, tensor in state.items()}
    expected = trained(plain, lambda x: plain(x)[0], torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    with simulate(3):
        net = Reads("lstm")
        net.rnn.load_state_dict(state)
        model = DataParallelModel(net.to("sim:0"), dim=1)
        settings = {"lr": 0.1, "momentum": 0.9}
        optimizer = (
            BalancedOptimizer(model, torch.optim.SGD, **settings) if is_sharded else torch.optim.SGD(net.parameters(), **settings)
        )
        found = trained(net, lambda x: gather(model(x), "cpu", dim=1), optimizer)
        assert all(flat for _, flat in net.found)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
