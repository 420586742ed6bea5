import pytest
import torch
from helpers.problems import assert_same_gradients, build_net, gradients
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from balanced_parallel import DataParallelModel, gather
from balanced_parallel.replicas.replicas import Replicas

CPU = torch.device("cpu")
CPUS = ["cpu"] * 3

pytestmark = pytest.mark.usefixtures("double")


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


def test_a_module_that_is_false_is_copied_too():
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


@pytest.mark.parametrize("name", CASES)
def test_gradients_reach_the_parameters_of_the_module(name):
    build, make = CASES[name]
    module, x = build(), make()
    module(x).pow(2).sum().backward()
    expected = gradients(module)
    module.zero_grad()
    gather(DataParallelModel(module, CPUS)(x)).pow(2).sum().backward()
    assert_same_gradients(gradients(module), expected)


def test_double_backward_and_gradients_of_some_parameters():
    net, x = build_net(), torch.randn(6, 4)

    def penalty(forward):
        found = torch.autograd.grad(forward(x).pow(2).sum(), list(net.parameters()), create_graph=True)
        return sum(gradient.pow(2).sum() for gradient in found)

    penalty(net).backward()
    expected = gradients(net)
    net.zero_grad()
    penalty(lambda x: gather(DataParallelModel(net, CPUS)(x))).backward()
    assert_same_gradients(gradients(net), expected)


def test_buffers_of_the_first_replica_stay_and_the_others_do_not():
    norm = nn.BatchNorm1d(2)
    x = torch.randn(9, 2)
    DataParallelModel(norm, CPUS)(x)
    torch.testing.assert_close(norm.running_mean, 0.1 * x[:3].mean(0))
    assert norm.num_batches_tracked == 1


def test_the_first_replica_is_the_module_and_the_others_share_no_buffer():
    module = nn.BatchNorm1d(2)
    with Replicas().of(module, [CPU, CPU], CPU) as (first, second):
        assert first is module
        assert second is not module
        assert type(second) is nn.BatchNorm1d
        assert second.running_mean is not module.running_mean
        assert [name for name, _ in second.named_parameters()] == ["weight", "bias"]


def test_modes_and_hooks_reach_the_replicas():
    net, calls = build_net(), []
    net[0].register_forward_hook(lambda module, inputs, output: calls.append(module.training))
    net.eval()
    DataParallelModel(net, CPUS)(torch.randn(3, 4))
    assert calls == [False] * 3


def test_what_cannot_be_replicated_is_refused():
    with pytest.raises(ValueError, match=r"weight is not initialised yet: run the module once"):
        DataParallelModel(nn.LazyLinear(3), CPUS)(torch.randn(3, 4))
    compiled = torch.compile(build_net(), backend="eager")
    with pytest.raises(TypeError, match=r"is compiled, which binds it to one replica: pass the module without torch.compile"):
        DataParallelModel(compiled, CPUS)(torch.randn(3, 4))
    model = DataParallelModel(build_net(), CPUS)
    model.module.to("meta")
    with pytest.raises(ValueError, match=r"0.weight is on meta, expected .* on the first device, cpu.*\.to\('cpu'\)"):
        model(torch.randn(3, 4))
