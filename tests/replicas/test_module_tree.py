"""Trees with tied parameters, parameter lists, buffers that learn, and modules that are false."""

import copy

import pytest
import torch
from helpers.problems import assert_same_gradients, build_net, gradients
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from balanced_parallel import DataParallelModel, gather, simulate
from balanced_parallel.replicas.replicas import Replicas


class WithALearnedBuffer(nn.Module):
    """Two names for one buffer that learns, and one that does not."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(4, 4)
        self.register_buffer("prompt", torch.linspace(1, 2, 4).requires_grad_())
        self.register_buffer("again", self.prompt)
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x):
        return (self.scale(x) * self.prompt + self.offset) * self.again


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize("devices", [["cpu"] * 3, None])
def test_gradients_of_buffers_are_summed_over_replicas(double, devices):
    x = torch.randn(7, 4)
    net = WithALearnedBuffer()
    net(x).square().sum().backward()
    expected = [*gradients(net), net.prompt.grad]
    with simulate(3):
        parallel = copy.deepcopy(net)
        parallel.zero_grad()
        parallel.prompt = parallel.again = parallel.prompt.detach().to("cpu" if devices else "sim:0").requires_grad_()
        model = DataParallelModel(parallel, devices)
        with torch.no_grad():
            assert not any(output.requires_grad for output in model(x))
        gather(model(x)).square().sum().backward()
        assert_same_gradients([gradient.cpu() for gradient in (*gradients(parallel), parallel.prompt.grad)], expected)


CPU = torch.device("cpu")
CPUS = ["cpu"] * 3


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x):
        return self.output(self.embedding(x))


class UsesItsParameters(nn.Module):
    """A module that torch's replicas cannot run: it asks for its parameters, and keeps some in a ParameterList."""

    def __init__(self):
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(3), torch.randn(3)])
        self.named = nn.ParameterDict({"a": torch.randn(3)})
        self.plain = [*self.listed]

    def forward(self, x):
        assert next(self.parameters()).dtype == x.dtype
        assert len(self.listed) == 2
        return x * self.listed[0] + sum(self.plain) * self.named["a"]


class Falsy(nn.Linear):
    """A module that is false, as an empty container is; its parameters are copied all the same."""

    def __len__(self):
        return 0


@pytest.mark.usefixtures("double")
def test_modules_with_length_zero_are_copied():
    module = nn.Sequential(nn.Identity())
    module.add_module("falsy", Falsy(2, 2))
    with Replicas().of(module, [CPU, CPU], CPU) as (_, second):
        assert second.falsy is not module.falsy


CASES = {
    "tied": (Tied, lambda: torch.randint(7, (6,))),
    "parameters": (UsesItsParameters, lambda: torch.randn(6, 3)),
    "weight_norm": (lambda: weight_norm(nn.Linear(3, 2)), lambda: torch.randn(6, 3)),
    "spectral_norm": (lambda: spectral_norm(nn.Linear(3, 2)).eval(), lambda: torch.randn(6, 3)),
    "lstm": (lambda: Last(nn.LSTM(3, 2, 2, batch_first=True)), lambda: torch.randn(6, 5, 3)),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), lambda: torch.randn(6, 5, 4)),
    "shared module": (lambda: nn.Sequential(*[nn.Linear(3, 3)] * 2), lambda: torch.randn(6, 3)),
}


class Last(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, x):
        return self.rnn(x)[0]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_tied_and_listed_parameters_equal_the_plain_program(name):
    build, make = CASES[name]
    module, x = build(), make()
    module(x).pow(2).sum().backward()
    expected = gradients(module)
    module.zero_grad()
    gather(DataParallelModel(module, CPUS)(x)).pow(2).sum().backward()
    assert_same_gradients(gradients(module), expected)


def test_a_module_on_another_device_raises_an_error():
    message = "weight is on cpu, expected every parameter and buffer on the first device, sim:0"
    with simulate(2):
        model = DataParallelModel(build_net())  # moves the module to sim:0
        model.module.cpu()
        with pytest.raises(ValueError, match=message):
            model(torch.randn(4, 4))


class Capturing(nn.Module):
    """Registers a hook at its first call, as transformers does."""

    def __init__(self):
        super().__init__()
        self.layer, self.is_hooked = nn.Linear(4, 5), False

    def forward(self, x):
        captured = []
        if not self.is_hooked:
            self.layer.register_forward_hook(lambda module, inputs, output: captured.append(output))
            self.is_hooked = True
        self.layer(x)
        return torch.tensor([len(captured)])


def test_hooks_that_a_replica_registers_are_its_own():
    net = Capturing()
    assert DataParallelModel(net, ["cpu"] * 3)(torch.randn(7, 4)).gather().tolist() == [1, 1, 1]
    assert len(net.layer._forward_hooks) == 1
