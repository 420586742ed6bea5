"""``inplace_activations``: only where nothing needs the input of an activation any more."""

import copy
import dataclasses
import functools

import pytest
import torch
from helpers.savings import WIDTH, assert_unchanged
from helpers.slow import slow_but
from torch import nn

from balanced_parallel import DataParallelModel, savings, simulate


def inplace(net):
    assert savings.inplace_activations(net, torch.randn(4, WIDTH, dtype=torch.get_default_dtype()))


def inplace_checkpointed(net):
    savings.checkpoint_activations(net)
    inplace(net)


def inplace_offloaded(net):
    inplace(net)
    return functools.partial(savings.offload_activations, min_bytes=1)


def all_savings(net):
    savings.checkpoint_activations(net)
    return inplace_offloaded(net)


SAVINGS = [inplace, inplace_checkpointed, inplace_offloaded, all_savings]
LAYOUTS = [(1, False), (2, False), (1, True)]
WAYS = [(*layout, name, saving) for layout in LAYOUTS for name in ("residual", "convolutions") for saving in SAVINGS]
IN_ALL_RUNS = [way for place, way in enumerate(WAYS) if way[2:] == ("residual", all_savings) or place % 3 == 0]


@pytest.mark.parametrize(("ranks", "simulated", "name", "saving"), slow_but(WAYS, *IN_ALL_RUNS))
def test_loss_and_gradients_are_those_without_it(ranks, name, saving, simulated):
    assert_unchanged(ranks, name, saving, simulated)


class Net(nn.Module):
    """A network with two linear layers, an activation between them, and a forward of the test."""

    def __init__(self, function, activation=None):
        super().__init__()
        self.first, self.second, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function
        self.activation = activation or nn.LeakyReLU(0.3)
        self.weight = nn.Parameter(torch.randn(4))
        self.kept = []

    def forward(self, x):
        return self.function(self, x)


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    result: torch.Tensor


def with_input_kept(net, x):
    hidden = net.first(x)
    net.kept = [hidden]
    return net.activation(hidden)


def with_input_logged(net, x):
    hidden = net.first(x)
    result = net.activation(hidden)
    net.norm = hidden.detach().norm()
    return result


def used_in_evaluation(net, x):
    hidden = net.first(x)
    result = net.activation(hidden)
    return result if net.training else result + hidden


def read_in_evaluation(net, x):
    hidden = net.first(x)
    result = net.activation(hidden)
    return result if net.training else result + 0 * hidden


def as_output(net, x):
    hidden = net.first(x)
    return Output(hidden, net.second(net.activation(hidden)))


def with_pieces(net, x):
    first, second = net.first(x).chunk(2, 1)
    return net.activation(first) * second


def twice(net, x):
    hidden = net.activation(net.first(x))
    other = net.second(hidden)
    return other + net.activation(other)


UNSAFE = {
    "residual": lambda net, x: (hidden := net.first(x)) + net.activation(hidden),
    "residual before": lambda net, x: net.activation(hidden := net.first(x)) + hidden,
    "residual of no weight": lambda net, x: (hidden := net.first(x)) + 0 * net.activation(hidden),
    "residual of no change": lambda net, x: (hidden := net.first(x).relu()) + net.activation(hidden),
    "weight of no residual": lambda net, x: net.activation(hidden := net.first(x)) + 0 * hidden,
    "output of a saved result": lambda net, x: net.activation(net.first(x).tanh()),
    "input of a saved result": lambda net, x: net.activation(net.first(x).exp()),
    "input": lambda net, x: net.second(net.activation(x)),
    "view of the input": lambda net, x: net.second(net.activation(x.flatten().view(-1, 4))),
    "parameter": lambda net, x: net.first(x) * net.activation(net.weight),
    "expanded": lambda net, x: net.first(x) * net.activation((net.weight * 2).expand(3, 4)),
    "second output": lambda net, x: (hidden := net.first(x), net.activation(hidden)),
    "output in a list": lambda net, x: [{"hidden": (hidden := net.first(x))}, net.activation(hidden)],
    "view of an output": lambda net, x: ((hidden := net.first(x))[:, 1:], net.activation(hidden)),
    "output in an object": as_output,
    "kept": with_input_kept,
    "logged": with_input_logged,
    "evaluation": used_in_evaluation,
    "evaluation without an effect": read_in_evaluation,
    "pieces": with_pieces,
    "twice": twice,
    "by name": lambda net, x: (hidden := net.first(x)) + net.activation(input=hidden),
}
SAFE = {
    "plain": lambda net, x: net.second(net.activation(net.first(x))),
    "last": lambda net, x: net.activation(net.first(x)),
    "twice": lambda net, x: net.activation(net.second(net.activation(net.first(x)))),
    "view": lambda net, x: net.activation(net.first(x).view(-1, 2, 2)),
    "by name": lambda net, x: net.activation(input=net.first(x)),
    "residual of another": lambda net, x: x + net.second(net.activation(net.first(x))),
    "object": lambda net, x: Output(x, net.activation(net.first(x))),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_activations_whose_input_is_needed_stay(name):
    net = Net(UNSAFE[name])
    before = copy.deepcopy(net.state_dict())
    x = torch.randn(3, 4)
    assert savings.inplace_activations(net, x) == ()
    assert not net.activation.inplace
    assert all(value.equal(before[key]) for key, value in net.state_dict().items())
    assert net.kept == []


@pytest.mark.parametrize("name", SAFE)
@pytest.mark.parametrize("frozen", [False, True])
def test_activations_whose_input_is_free_change(name, frozen):
    net = Net(SAFE[name]).requires_grad_(not frozen)
    x = torch.randn(3, 4)
    values, state = x.clone(), torch.get_rng_state()
    assert savings.inplace_activations(net, x) == ("activation",)
    assert net.activation.inplace
    assert x.equal(values)
    assert torch.get_rng_state().equal(state)
    assert all(parameter.grad is None and parameter.requires_grad != frozen for parameter in net.parameters())


GAINS = {
    nn.ReLU: True,
    nn.LeakyReLU: True,
    nn.ELU: True,
    nn.SELU: True,
    nn.RReLU: True,
    nn.CELU: True,
    nn.Dropout: False,  # its mask is wider on a GPU
    nn.SiLU: False,  # in place, torch copies the input for the backward
    nn.Mish: False,
    nn.Hardswish: False,
    nn.ReLU6: False,
    nn.Identity: False,
}


@pytest.mark.parametrize(("make", "gain"), GAINS.items(), ids=str)
def test_activations_change_if_that_saves_memory(make, gain):
    net = nn.Sequential(nn.Linear(4, 8), make(), nn.Linear(8, 4))
    assert savings.inplace_activations(net, torch.randn(5, 4)) == (("1",) if gain else ())


def test_each_activation_of_a_network_is_proved_by_itself():
    block = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.Dropout(), nn.SiLU(), nn.Flatten())

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.residual = nn.Sequential(block, nn.Linear(32, 4), nn.ELU(), nn.Linear(4, 4)), nn.ReLU()

        def forward(self, *, images):
            hidden = self.blocks(images)
            return hidden + self.residual(hidden)

    net = Whole()
    assert savings.inplace_activations(net, {"images": torch.randn(3, 2, 4, 4)}) == ("blocks.0.2", "blocks.2")
    assert savings.inplace_activations(net, {"images": torch.randn(3, 2, 4, 4)}) == ()  # the others still stay


def test_the_first_activation_of_a_checkpointed_block_stays():
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    savings.checkpoint_activations(net, blocks=["1"])
    assert savings.inplace_activations(net, torch.randn(2, 4)) == ("1.2",)


def test_saved_results_inside_of_a_checkpointed_block_are_not_overwritten():
    class Squared(nn.Module):
        def forward(self, x):
            return (x * x).exp()  # positive, so that the activation changes nothing here

    for checkpointed in (False, True):
        net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Squared(), nn.ReLU(), nn.Linear(4, 4)))
        if checkpointed:
            savings.checkpoint_activations(net, blocks=["1"])
        assert savings.inplace_activations(net, torch.randn(2, 4)) == ()


def test_replicas_peak_lower():
    peaks = []
    for change in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.LeakyReLU())])
        if change:
            assert len(savings.inplace_activations(net, torch.randn(2, 64))) == 8
        with simulate(2) as cluster:
            model = DataParallelModel(net.to("sim:0"))
            for _ in range(2):
                cluster.reset_peak()
                model(torch.ones(4096, 64)).map(torch.sum).gather().sum().backward()
            peaks.append(cluster.peak)
            del model
    assert all(after < 0.7 * before for before, after in zip(*peaks, strict=True)), peaks


class Forces(nn.Module):
    """The negative gradient of an energy."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, positions):
        with torch.enable_grad():
            positions = positions.requires_grad_()
            return -torch.autograd.grad(self.energy(positions).sum(), positions, create_graph=True)[0]


def test_a_forward_that_runs_a_backward_is_watched_too():
    inputs = torch.randn(3, 4)
    plain, net = Forces(), Forces()
    net.load_state_dict(plain.state_dict())
    assert savings.inplace_activations(net, inputs) == ("energy.1",)  # ReLU keeps its output alone
    for one in (plain, net):
        one(inputs).square().sum().backward()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
